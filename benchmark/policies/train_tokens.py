"""Trains the tokens that the policies `packet` and `kvlink` put around chunks, all weights of the model frozen.

python -m benchmark.policies.train_tokens --model path/to/model --questions mine.jsonl --policy packet --out trained

KV Packet (arXiv 2604.13226) and KVLink (arXiv 2502.16002) teach a model tokens that make chunks fit together. Here the
model teaches them to itself: its next-token distributions under full attention, over the question and over its own
greedy answer, are the target of those under the policy. `--out` is a copy of the model's folder in which the trained
rows of the embedding differ, with the `lazy_tokens.json` that tells a server of them.
"""

import argparse
import json
import random
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from benchmark.policies.preambles import PREAMBLES
from benchmark.policies.specs import TRAINED, around
from benchmark.quality.asking import Prompts, as_user_message
from benchmark.quality.questions import read_questions
from oracle.block_mask import load_model, visibility
from oracle.segments import Segment, text, token_ids
from sglang_lazy.core.policy import Policy, TrainedTokens
from sglang_lazy.policies import get_policy
from sglang_lazy.serving.trained_tokens import FILE, load


class Trainer:
    """A frozen model and the rows of its embedding that are trained.

    Where the model's output layer is tied to its embedding, the rows are trained as part of both.
    """

    def __init__(self, model, ids: Sequence[int], initial: Sequence[int]):
        """ids: the trained tokens. initial: tokens whose embeddings they begin with, in turn."""
        self.model = model.requires_grad_(False)
        embedding = model.get_input_embeddings().weight
        self.name = next(name for name, weight in model.named_parameters() if weight is embedding)
        self.embedding = embedding
        self.ids = torch.tensor(list(ids), device=embedding.device)
        self.rows = torch.nn.Parameter(embedding[[initial[i % len(initial)] for i in range(len(ids))]])

    @torch.no_grad()
    def answer(self, segments: list[Segment], limit: int) -> list[int]:
        """The greedy answer under full attention, at most `limit` tokens, with the end of sequence if it comes."""
        ids = torch.tensor([token_ids(segments)], device=self.rows.device)
        mask = torch.ones_like(ids)
        output = self.model.generate(ids, attention_mask=mask, max_new_tokens=limit, do_sample=False, pad_token_id=0)
        return output[0, ids.shape[1] :].tolist()

    def loss(self, segments: list[Segment], answer: list[int], policy: Policy, trained: TrainedTokens) -> torch.Tensor:
        """KL(full || policy) behind every token of the question and the answer but the last one, their mean."""
        question = segments[-1].ids if segments[-1].kind == "text" else segments[-1].ids[-1:]
        scored = len(question) + len(answer) - 1
        with torch.no_grad():
            causal = visibility([text(token_ids(segments))], len(answer))
            target = self._forward([*token_ids(segments), *answer], causal, scored, self.embedding)
        served = around(segments, policy, trained)
        embedding = self.embedding.index_copy(0, self.ids, self.rows)
        found = self._forward([*token_ids(served), *answer], visibility(served, len(answer)), scored, embedding)
        return torch.nn.functional.kl_div(found, target, log_target=True, reduction="batchmean")

    def _forward(self, ids: list[int], visible: torch.Tensor, scored: int, embedding: torch.Tensor) -> torch.Tensor:
        """Log-probabilities behind the `scored` tokens before the last, [scored, vocab_size] fp32."""
        device = self.rows.device
        hidden = torch.finfo(embedding.dtype).min
        mask = torch.zeros(visible.shape, dtype=embedding.dtype).masked_fill(~visible, hidden)[None, None].to(device)
        options = {
            "attention_mask": mask,
            "position_ids": torch.arange(len(ids), device=device)[None],
            "use_cache": False,
            "logits_to_keep": scored + 1,
        }
        inputs = torch.tensor([ids], device=device)
        output = torch.func.functional_call(self.model, {self.name: embedding}, (inputs,), options)
        return output.logits[0, :-1].float().log_softmax(-1)


def fields(policy: Policy, ids: Sequence[int]) -> dict[str, list[int]]:
    """What `lazy_tokens.json` says of a policy: the first half of a packet's tokens go before each chunk."""
    if policy.name == "kvlink":
        return {"link": list(ids)}
    return {"before": list(ids[: len(ids) // 2]), "behind": list(ids[len(ids) // 2 :])}


def unused_special_tokens(tokenizer) -> list[int]:
    """Those that have no role in the tokenizer and do not occur in its chat template."""
    roles = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    template = tokenizer.chat_template or ""
    special = {index: token.content for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return [index for index, content in sorted(special.items()) if index not in roles and content not in template]


def train(trainer: Trainer, prompts: Iterator[list[Segment]], policy: Policy, trained: TrainedTokens, args) -> None:
    """Adam with a linearly decaying rate, which is given in units of the embedding's root mean square."""
    scale = trainer.embedding.float().square().mean().sqrt().item()
    optimizer = torch.optim.Adam([trainer.rows], lr=args.learning_rate * scale)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, args.steps)
    for step in range(args.steps):
        losses = []
        for _ in range(args.batch):
            segments = next(prompts)
            loss = trainer.loss(segments, trainer.answer(segments, args.new_tokens), policy, trained)
            (loss / args.batch).backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_([trainer.rows], args.clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        print(f"step {step + 1} of {args.steps}: KL {sum(losses) / len(losses):.4f}", flush=True)


def save(model: Path, out: Path, trainer: Trainer, policy: Policy, ids: Sequence[int]) -> None:
    """Copy the model's folder, with the trained rows and the policy's entry in `lazy_tokens.json`."""
    shutil.copytree(model, out)
    for path in out.glob("*.safetensors"):
        tensors = load_file(path)
        if trainer.name in tensors:
            tensors[trainer.name][list(ids)] = trainer.rows.detach().cpu().to(tensors[trainer.name].dtype)
            save_file(tensors, path, metadata={"format": "pt"})
    file = out / FILE
    known = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    file.write_text(json.dumps(known | {policy.name: fields(policy, ids)}) + "\n", encoding="utf-8")


def main() -> None:
    args = parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    policy = get_policy(args.policy)
    others = [tokens for name, tokens in load(str(args.model), len(tokenizer)).items() if name != policy.name]
    taken = {index for tokens in others for part in tokens for index in part}
    ids = args.ids or [index for index in unused_special_tokens(tokenizer) if index not in taken]
    if policy.name not in TRAINED:
        sys.exit(f"error: --policy must be one of {', '.join(TRAINED)}, got {policy.name}")
    if args.out.exists():
        sys.exit(f"error: {args.out} exists")
    if len(ids) < 2 or taken.intersection(ids):
        sys.exit("error: --ids must name at least two tokens, none of which another policy of this model has")
    trained = TrainedTokens(**fields(policy, ids))
    print(f"{policy}: {' '.join(tokenizer.convert_ids_to_tokens(ids))}")
    model = load_model(str(args.model), getattr(torch, args.dtype), args.device)
    model.set_attn_implementation("sdpa")
    trainer = Trainer(model, ids, tokenizer.encode(PREAMBLES["short"], add_special_tokens=False))
    train(trainer, draw(args, tokenizer), policy, trained, args)
    save(args.model, args.out, trainer, policy, ids)


def draw(args: argparse.Namespace, tokenizer) -> Iterator[list[Segment]]:
    """Prompts of at most `max_tokens` in an order that the seed decides, again and again."""
    prompts = Prompts(tokenizer)
    questions = [as_user_message(question, tokenizer) for path in args.questions for question in read_questions(path)]
    made = [segments for segments in map(prompts.make, questions) if len(token_ids(segments)) <= args.max_tokens]
    if not made:
        sys.exit(f"error: no prompt has at most {args.max_tokens} tokens")
    order = random.Random(args.seed)
    while True:
        yield from order.sample(made, len(made))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a model in safetensors")
    parser.add_argument("--questions", type=Path, nargs="+", required=True, help="JSON lines")
    parser.add_argument("--policy", required=True, metavar="LINK", help="packet, or kvlink with its number of tokens")
    parser.add_argument("--ids", type=int, nargs="+", help="tokens to train (default: unused special ones)")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=4, help="prompts of each step")
    parser.add_argument("--learning-rate", type=float, default=0.1, help="over the embedding's root mean square")
    parser.add_argument("--clip", type=float, default=1.0, help="norm of the gradient, at most")
    parser.add_argument("--new-tokens", type=int, default=24, help="of a greedy answer")
    parser.add_argument("--max-tokens", type=int, default=2000, help="longer prompts are left out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True, help="new folder")
    return parser.parse_args()


if __name__ == "__main__":
    main()
