"""What a lead does to chunks: answers over KV of which a part was computed alone, and the rest behind the lead.

python -m benchmark.policies.leads --model leaning-block --questions worlds/order*.jsonl --out leads.jsonl

Writes one JSON line for each prompt and variant, and prints how many answers are right, and from which documents the
others are, counted from the right one.
"""

import argparse
import collections
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import AutoTokenizer

from benchmark.policies.evaluate import draw
from benchmark.policies.preambles import PREAMBLES
from benchmark.policies.prototype import Prototype
from benchmark.quality.asking import Prompts
from benchmark.quality.questions import Question
from oracle.policies import Layers, chunk_spans, keep_all_but, leading_text
from oracle.segments import Segment
from sglang_lazy.verify.scores import exact_match

Alone = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""For tokens, each given as its index in its chunk, [n]: whether its keys are computed alone, and its values; bool."""

ALONE: dict[str, Alone] = {
    "keys alone": lambda index: (index >= 0, index < 0),
    "values alone": lambda index: (index < 0, index >= 0),
    "first keys alone": lambda index: (index == 0, index < 0),
}


class Mixed(Prototype):
    """Computes chunks behind a preamble, except for what `alone` says."""

    alone: Alone | None = None

    def fill(self, segments: list[Segment], preamble: Sequence[int] = ()) -> Layers:
        behind = super().fill(segments, preamble)
        if self.alone is None:
            return behind
        index = torch.cat([torch.arange(end - start) for start, end in chunk_spans(segments)]).to(self.model.device)
        chosen = [part[:, None] for part in self.alone(index)]
        return [
            tuple(torch.where(part, *pair) for part, pair in zip(chosen, zip(*layer, strict=True), strict=True))
            for layer in zip(super().fill(segments), behind, strict=True)
        ]


def variants(lead: Sequence[int], neutral: Sequence[int]) -> dict[str, tuple[Sequence[int], Alone | None]]:
    """By name, what chunks are computed behind, and what of them alone.  lead: BOS and instruction."""
    return {
        "block": ((), None),
        "BOS": (lead[:1], None),
        "instruction": (lead[1:], None),
        "lead": (lead, None),
        "neutral": ((lead[0], *neutral[1 - len(lead) :]), None),
        **{f"lead, {name}": (lead, alone) for name, alone in ALONE.items()},
    }


def document_of(question: Question, answer: str) -> int | None:
    """The index of the first document that has the answer."""
    return next((index for index, document in enumerate(question.chunks) if answer and answer in document), None)


def main() -> None:
    args = parse_args()
    tokenizer, oracle = AutoTokenizer.from_pretrained(args.model), Mixed(args.model)
    neutral = tokenizer.encode(PREAMBLES["short"], add_special_tokens=False)
    found: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    with open(args.out, "w", encoding="utf-8") as out:
        for question, segments in draw(args, Prompts(tokenizer), tokenizer):
            right = document_of(question, question.answers[0])
            for name, (preamble, oracle.alone) in variants(leading_text(segments), neutral).items():
                prompt = oracle.start(segments, keep_all_but(segments, ()), preamble)
                answer = tokenizer.decode(prompt.greedy(8, tokenizer.eos_token_id), skip_special_tokens=True).strip()
                em, document = exact_match(answer, question.answers), document_of(question, answer)
                line = {"group": question.group, "id": question.id, "policy": name, "answer": answer, "em": em}
                print(json.dumps(line | {"right": right, "document": document}), file=out, flush=True)
                away = "in none" if document is None or right is None else f"{document - right:+}"
                found[name]["right" if em else away] += 1
    print("| chunks computed behind | right | wrong |\n|---|---|---|")
    for name, counts in found.items():
        wrong = ", ".join(f"{away}: {count}" for away, count in counts.most_common() if away != "right")
        print(f"| {name} | {counts['right']} of {counts.total()} | {wrong} |")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="path or hub name")
    parser.add_argument("--questions", type=Path, nargs="+", required=True, help="JSON lines")
    parser.add_argument("--count", type=int, default=60, help="prompts of each file")
    parser.add_argument("--skip", type=int, default=0, help="prompts of each file to leave out first")
    parser.add_argument("--max-tokens", type=int, default=1500, help="longer prompts are left out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
