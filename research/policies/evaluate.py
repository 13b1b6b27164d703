"""Asks a model questions over documents under each policy, and compares the answers with those of full attention.

python -m research.policies.evaluate --model path/to/model --questions questions.jsonl --out results.jsonl

Writes one JSON line for each prompt and policy; `python -m benchmark.report.means results.jsonl` makes the table.
With `--comb`, a Comb model trained for this model is evaluated as well: `comb`, and `comb:chunks=1` with all documents
in one chunk. With `--adapter`, the model has a LoRA adapter.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoTokenizer

from benchmark.kv_bytes import kv_bytes_per_token
from oracle.adapters import merge
from oracle.policies import candidates
from oracle.segments import Segment, token_ids
from research.policies.comb import COMB, CombModel
from research.policies.preambles import PREAMBLES
from research.policies.prototype import Prototype
from research.policies.specs import SERVER, Preambles, parse
from research.quality.asking import Prompts, as_user_message
from research.quality.divergence import kl_divergence
from research.quality.questions import Question, read_questions
from sglang_lazy.verify.scores import exact_match, f1

POLICIES = [
    "full",
    "block",
    "base",
    "base:preamble=lead",
    "epic:tokens=16",
    "base+epic:tokens=16",
    "query:ratio=0.05",
    "query:ratio=0.15",
    "base+query:ratio=0.05",
    "base+query:ratio=0.15",
    "base+query:ratio=0.2",
    "base+query:ratio=0.3",
    "base+blend:ratio=0.15",
]


def main() -> None:
    args = parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    oracle = Prototype(args.model, getattr(torch, args.dtype), args.device)
    if args.adapter:
        merge(oracle.model, args.adapter)
    try:
        comb = CombModel(args.comb, oracle.model.state_dict(), args.device) if args.comb else None
    except ValueError as error:
        sys.exit(f"error: {error}")
    before = tokenizer.encode("")  # BOS, if the tokenizer adds it
    texts = PREAMBLES | {SERVER: PREAMBLES[args.preamble]}
    preambles = {name: [*before, *tokenizer.encode(text, add_special_tokens=False)] for name, text in texts.items()}
    with open(args.out, "a", encoding="utf-8") as out:
        for question, segments in draw(args, Prompts(tokenizer), tokenizer):
            for line in evaluate(oracle, comb, tokenizer, question, segments, preambles, args):
                line |= {"policy": args.prefix + line["policy"], "seed": args.seed, "preamble": args.preamble}
                print(json.dumps(line), file=out, flush=True)


def draw(args: argparse.Namespace, prompts: Prompts, tokenizer) -> Iterator[tuple[Question, list[Segment]]]:
    """`count` questions of each file, alternating, that fit into `max_tokens`; the seed decides which."""
    files = []
    for path in args.questions:
        questions = [as_user_message(question, tokenizer) for question in read_questions(path)]
        random.Random(args.seed).shuffle(questions)
        made = ((question, prompts.make(question)) for question in questions)
        files.append(pair for pair in made if len(token_ids(pair[1])) <= args.max_tokens)
    for _ in range(args.skip):
        [next(file, None) for file in files]
    for _ in range(args.count):
        yield from filter(None, [next(file, None) for file in files])


def evaluate(
    oracle: Prototype,
    comb: CombModel | None,
    tokenizer,
    question: Question,
    segments: list[Segment],
    preambles: Preambles,
    args,
) -> Iterator[dict]:
    """A line for each policy, `full` first, and for each form of `comb`. Two answers are scored token by token: the
    first gold answer, and the answer under full attention."""
    space = "" if question.closing[-1].isspace() else " "  # as the model itself would begin, after "Answer:"
    gold = tokenizer.encode(space + question.answers[0], add_special_tokens=False)
    full: list[torch.Tensor] = []
    names = ["full", *(name for name in args.policies if name != "full"), *(COMB if comb else ())]
    for name in names:
        started, recomputed, asked = time.perf_counter(), 0.0, segments
        if name in COMB:
            prompt = comb.start(segments, together=COMB[name])
        else:
            spec = parse(name)
            asked = spec.prompt(segments, args.model, oracle.model.config.vocab_size)
            kept = spec.kept(oracle, asked, preambles)
            recomputed = 1 - sum(high - low for ranges in kept for low, high in ranges) / len(candidates(asked))
            prompt = oracle.start(asked, kept, spec.preamble(asked, preambles))
        greedy = (
            prompt.greedy(args.new_tokens, tokenizer.eos_token_id) if name in {"full", *COMB, *args.generate} else None
        )
        if name == "full":
            own = greedy or [tokenizer.eos_token_id]
        scored = [prompt.score(gold).cpu(), prompt.score(own).cpu()]
        full = full or scored
        line = {
            "group": question.group,
            "id": question.id,
            "policy": name,
            "prompt_tokens": len(token_ids(asked)),
            "share": recomputed,
            "kv_bytes": comb.bytes_per_token if name in COMB else kv_bytes_per_token(oracle.model.config),
            "nll": -scored[0].gather(1, torch.tensor(gold)[:, None]).mean().item(),
            "answer_tokens": len(gold),
            "own_tokens": len(own),
        }
        for answer, mine, its in zip(("", "own_"), scored, full, strict=True):
            line[f"{answer}kl"] = kl_divergence(mine, its).mean().item()
            line[f"{answer}agree"] = (its.argmax(-1) == mine.argmax(-1)).float().mean().item()
        if greedy is not None:
            answer = tokenizer.decode(greedy, skip_special_tokens=True).strip().split("\n")[0]
            line |= {"answer": answer, "em": exact_match(answer, question.answers), "f1": f1(answer, question.answers)}
        yield line | {"seconds": round(time.perf_counter() - started, 2)}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="path or hub name")
    parser.add_argument("--comb", type=Path, help="folder of a Comb model whose decoder is the model")
    parser.add_argument("--adapter", type=Path, help="folder of a LoRA adapter of the model, as PEFT writes it")
    parser.add_argument("--prefix", default="", help="prefix of the policies' names, to tell models apart in one table")
    parser.add_argument("--questions", type=Path, nargs="+", required=True, help="JSON lines")
    parser.add_argument("--policies", nargs="+", default=POLICIES, metavar="SPEC")
    parser.add_argument(
        "--generate", nargs="*", default=(), metavar="SPEC", help="policies that, like full, answer greedily"
    )
    parser.add_argument("--new-tokens", type=int, default=24, help="maximum tokens of a greedy answer")
    parser.add_argument("--preamble", choices=list(PREAMBLES), default="valley", help="preamble of base")
    parser.add_argument("--count", type=int, default=20, help="prompts of each file")
    parser.add_argument("--skip", type=int, default=0, help="prompts of each file to leave out first")
    parser.add_argument("--max-tokens", type=int, default=1500, help="longer prompts are left out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are appended to this file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
