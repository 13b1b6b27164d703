"""Trains the tokens that the policies `packet` and `kvlink` put around chunks; all model weights are frozen.

python -m research.policies.train_tokens --model path/to/model --questions mine.jsonl --policy packet --out trained

KV Packet (arXiv 2604.13226) and KVLink (arXiv 2502.16002) teach a model tokens that make chunks fit together. Here the
model is its own teacher: its next-token distributions under full attention, over the question and its own greedy
answer, are the target under the policy. `--out` is a copy of the model's folder in which only the trained rows of the
input embedding differ, plus a `lazy_tokens.json` that describes them to servers. An output layer that was tied to the
embedding is stored beside it as it was, so that the model does not come to answer with these tokens.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer
from transformers.core_model_loading import revert_weight_conversion

from oracle.block_mask import load_model, visibility
from oracle.segments import Segment, text, token_ids
from research.policies import distill
from research.policies.preambles import PREAMBLES
from research.policies.specs import TRAINED, around
from research.quality.divergence import kl_divergence
from sglang_lazy.core.policy import Policy, TrainedTokens
from sglang_lazy.policies import get_policy
from sglang_lazy.serving.trained_tokens import FILE, load

EMBEDDING_ANSWERS = frozenset(
    {
        "Cohere2ForCausalLM",
        "CohereForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "Gemma3ForConditionalGeneration",
        "GemmaForCausalLM",
    }
)
"""Architectures whose output layer is the embedding in SGLang, even in a folder that has another one."""


class Trainer:
    """A frozen model and the rows of its input embedding that are trained; an output layer tied to it keeps its own."""

    def __init__(self, model, ids: Sequence[int], initial: Sequence[int]):
        """ids: the trained tokens.  initial: tokens whose embeddings they start from, in rotation."""
        self.model = model.requires_grad_(False)
        self.embedding = embedding = model.get_input_embeddings().weight
        self.name = self.weight_name(model.get_input_embeddings())
        output = model.get_output_embeddings()
        self.tied = self.weight_name(output) if output.weight is embedding else None
        self.ids = torch.tensor(list(ids), device=embedding.device)
        self.rows = torch.nn.Parameter(embedding[[initial[i % len(initial)] for i in range(len(ids))]])

    def weight_name(self, layer: torch.nn.Module) -> str:
        """The name of a layer's weight in the model."""
        return next(name for name, module in self.model.named_modules() if module is layer) + ".weight"

    def stored_name(self, name: str) -> str:
        """The name under which the model's folder has a weight: in vision models, often not Transformers' own."""
        (stored,) = revert_weight_conversion(self.model, {name: self.embedding})
        return stored

    def loss(self, segments: list[Segment], answer: list[int], policy: Policy, trained: TrainedTokens) -> torch.Tensor:
        """The mean of KL(full || policy) after every token of the question and the answer except the last one."""
        scored = distill.num_scored(segments, answer)
        with torch.no_grad():
            causal = visibility([text(token_ids(segments))], len(answer))
            target = distill.log_probabilities(self.model, {}, [*token_ids(segments), *answer], causal, scored)
        served = around(segments, policy, trained)
        weights = {self.name: self.embedding.index_copy(0, self.ids, self.rows)}
        visible = visibility(served, len(answer))
        found = distill.log_probabilities(self.model, weights, [*token_ids(served), *answer], visible, scored)
        return kl_divergence(found, target).mean()


def fields(policy: Policy, ids: Sequence[int]) -> dict[str, list[int]]:
    """A policy's entry in `lazy_tokens.json`: the first half of a packet's tokens go before each chunk."""
    if policy.name == "kvlink":
        return {"link": list(ids)}
    return {"before": list(ids[: len(ids) // 2]), "behind": list(ids[len(ids) // 2 :])}


def unused_special_tokens(tokenizer) -> list[int]:
    """Special tokens without a role in the tokenizer that do not occur in its chat template."""
    roles = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    template = tokenizer.chat_template or ""
    special = {index: token.content for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return [index for index, content in sorted(special.items()) if index not in roles and content not in template]


def save(model: Path, out: Path, trainer: Trainer, policy: Policy, ids: Sequence[int]) -> None:
    """Copy the model's folder, with the trained rows and the policy's entry in `lazy_tokens.json`.

    An output layer that was tied to the embedding is stored under its own name, without the trained rows.
    """
    shutil.copytree(model, out)
    files, name = tensor_files(out), trainer.stored_name(trainer.name)
    tensors = load_file(files[name])
    if trainer.tied:
        edit(out / "config.json", untied)
        output = trainer.stored_name(trainer.tied)
        if output not in files:  # or it has the same rows, or else Transformers would not have tied it
            tensors[output] = tensors[name].clone()
            if (index := out / "model.safetensors.index.json").is_file():
                shard = {output: files[name].name}
                edit(index, lambda known: known | {"weight_map": known["weight_map"] | shard})
    tensors[name][list(ids)] = trainer.rows.detach().cpu().to(tensors[name].dtype)
    save_file(tensors, files[name], metadata={"format": "pt"})
    edit(out / FILE, lambda known: known | {policy.name: fields(policy, ids)})


def tensor_files(model: Path) -> dict[str, Path]:
    """The safetensors file of each tensor in a model's folder."""
    found: dict[str, Path] = {}
    for path in model.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= dict.fromkeys(file.keys(), path)
    return found


def untied(config: dict) -> dict:
    """A model's `config.json` with an output layer of its own, also in a vision model's part for text."""
    inner = {"text_config": untied(config["text_config"])} if "text_config" in config else {}
    return config | inner | {"tie_word_embeddings": False}


def edit(file: Path, change: Callable[[dict], dict]) -> None:
    """Apply a change to a JSON file; one that does not exist is taken for empty."""
    known = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    file.write_text(json.dumps(change(known)) + "\n", encoding="utf-8")


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
        sys.exit("error: --ids must name at least two tokens that no other policy of this model uses")
    trained = TrainedTokens(**fields(policy, ids))
    print(f"{policy}: {' '.join(tokenizer.convert_ids_to_tokens(ids))}")
    if refused := EMBEDDING_ANSWERS.intersection(AutoConfig.from_pretrained(args.model).architectures or ()):
        names = ", ".join(refused)
        sys.exit(f"error: SGLang has no output layer for {names}: answers would contain trained tokens")
    model = load_model(str(args.model), getattr(torch, args.dtype), args.device)
    model.set_attn_implementation("sdpa")
    trainer = Trainer(model, ids, tokenizer.encode(PREAMBLES["short"], add_special_tokens=False))
    if (name := trainer.stored_name(trainer.name)) not in tensor_files(args.model):
        sys.exit(f"error: no safetensors file in {args.model} has {name}")
    scale = trainer.embedding.float().square().mean().sqrt().item()
    losses = (trainer.loss(*example, policy, trained) for example in distill.examples(model, tokenizer, args))
    distill.optimise([trainer.rows], args.learning_rate * scale, losses, args)
    save(args.model, args.out, trainer, policy, ids)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    distill.add_arguments(parser, steps=500, learning_rate=0.1, meaning="over the embedding's root mean square")
    parser.add_argument("--policy", required=True, metavar="LINK", help="packet, or kvlink with its number of tokens")
    parser.add_argument("--ids", type=int, nargs="+", help="tokens to train (default: unused special ones)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
