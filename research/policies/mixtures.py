"""What a policy costs a model: answers over chunks whose KV is a mixture of several computations.

python -m research.policies.mixtures --study leads --model leaning-block --questions order.jsonl --out leads.jsonl

The study `leads` asks how a text before chunks affects them, `blend` which recomputed tokens cost answers. Writes one
JSON line for each prompt and mixture, and prints how many answers are right, and from which documents the wrong ones
come, counted from the right one.
"""

import argparse
import json
import random
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import torch
from transformers import AutoTokenizer

from oracle.policies import Layers, Ranges, candidates, chunk_spans, keep_all_but, leading_text, without_best
from oracle.segments import Segment, token_ids
from research.policies.evaluate import draw
from research.policies.preambles import PREAMBLES
from research.policies.prototype import Prompt, Prototype
from research.quality.asking import Prompts
from research.quality.questions import Question
from research.report.mixtures import mixtures_of
from sglang_lazy.verify.scores import exact_match

Mixture = tuple[str, Layers, Sequence[Ranges]]
"""Its name, the KV of all chunks, and the ranges kept; the rest is recomputed in context."""
RATIOS = (0.05, 0.15, 0.3, 0.5, 0.7, 1.0)
RATIO = 0.15


class Mixed(Prototype):
    """Answers over arbitrary KV of chunks."""

    cache: Layers | None = None

    def fill(self, segments: list[Segment], preamble: Sequence[int] = ()) -> Layers:
        return super().fill(segments, preamble) if self.cache is None else self.cache

    def start_over(self, cache: Layers, segments: list[Segment], kept: Sequence[Ranges]) -> Prompt:
        self.cache = cache
        try:
            return self.start(segments, kept)
        finally:
            self.cache = None

    @torch.inference_mode()
    def in_context(self, segments: list[Segment]) -> Layers:
        """The KV of all candidates under full attention."""
        ids, positions = token_ids(segments), candidates(segments)
        layers = self.forward(ids, range(len(ids)), logits_to_keep=1).past_key_values.layers
        return [(layer.keys[:, :, positions], layer.values[:, :, positions]) for layer in layers]


def replaced(
    cache: Layers,
    by: Layers,
    tokens: torch.Tensor,
    parts: Collection[str] = ("keys", "values"),
    layers: Collection[int] | None = None,
) -> Layers:
    """`cache` with `parts` of the KV of `tokens`, bool [n], replaced from `by`; in these layers, or in all."""

    def chosen(layer: int, part: str) -> torch.Tensor:
        return tokens[:, None] & (part in parts and (layers is None or layer in layers))

    return [
        (torch.where(chosen(layer, "keys"), its[0], mine[0]), torch.where(chosen(layer, "values"), its[1], mine[1]))
        for layer, (mine, its) in enumerate(zip(cache, by, strict=True))
    ]


def leads(oracle: Mixed, segments: list[Segment], tokenizer) -> Iterator[Mixture]:
    """Chunks after various texts, and after the lead (BOS and instruction) with part of their KV computed alone."""
    lead, neutral = leading_text(segments), tokenizer.encode(PREAMBLES["short"], add_special_tokens=False)
    whole = keep_all_but(segments, ())
    texts = {"block": (), "BOS": lead[:1], "instruction": lead[1:], "lead": lead}
    for name, text in (texts | {"neutral": (lead[0], *neutral[1 - len(lead) :])}).items():
        yield name, oracle.fill(segments, text), whole
    alone, behind = oracle.fill(segments), oracle.fill(segments, lead)
    every = at(segments, candidates(segments))
    yield "lead, keys alone", replaced(behind, alone, every, ["keys"]), whole
    yield "lead, values alone", replaced(behind, alone, every, ["values"]), whole
    first = at(segments, [start for start, _ in chunk_spans(segments)])
    yield "lead, first keys alone", replaced(behind, alone, first, ["keys"]), whole


def blend(oracle: Mixed, segments: list[Segment], tokenizer) -> Iterator[Mixture]:
    """`blend`, the same number of other tokens, and document titles with part of their KV as under full attention."""
    alone, context, whole = oracle.fill(segments), oracle.in_context(segments), keep_all_but(segments, ())
    keys = [(fresh[0], cached[0]) for fresh, cached in zip(context, alone, strict=True)]
    deviation = [(fresh - cached).square().sum((0, 1, 3)) for fresh, cached in keys]
    yield "block", alone, whole
    for ratio in RATIOS:
        yield f"blend:ratio={ratio}", alone, without_best(segments, deviation[1], ratio)
    for layer in range(2, len(alone)):
        yield f"keys of layer {layer + 1}", alone, without_best(segments, deviation[layer], RATIO)
    dice = torch.Generator().manual_seed(random.Random(str(token_ids(segments))).getrandbits(32))
    for number in (1, 2):
        scores = torch.rand(deviation[1].shape, generator=dice)
        yield f"random tokens, {number}", alone, without_best(segments, scores, RATIO)
    chunks = deviation[1].split([end - start for start, end in chunk_spans(segments) if start < end])
    means = torch.cat([chunk.mean().expand_as(chunk) for chunk in chunks])
    yield "whole documents", alone, without_best(segments, means, RATIO)
    positions = title_positions(segments, tokenizer)
    titles = at(segments, positions)
    yield "titles", alone, keep_all_but(segments, positions)
    yield "blend without titles", alone, without_best(segments, deviation[1].masked_fill(titles, -1), RATIO)
    for part in ("keys", "values"):
        yield f"titles, {part} in context", replaced(alone, context, titles, [part]), whole
    yield "titles, layer 2 in context", replaced(alone, context, titles, layers=[1]), whole
    yield "titles, layers from 3 in context", replaced(alone, context, titles, layers=range(2, len(alone))), whole
    yield "titles behind the lead", replaced(alone, oracle.fill(segments, leading_text(segments)), titles), whole


STUDIES = {"leads": leads, "blend": blend}


def at(segments: list[Segment], positions: Sequence[int]) -> torch.Tensor:
    """A mask of the candidates at these positions, bool [n]."""
    return torch.isin(torch.tensor(candidates(segments)), torch.tensor(positions))


def title_positions(segments: list[Segment], tokenizer) -> list[int]:
    """The positions of each chunk's first line."""
    ids, positions = token_ids(segments), []
    for start, end in chunk_spans(segments):
        ends = (i + 1 for i in range(start, end) if "\n" in tokenizer.decode([ids[i]]))
        positions += range(start, next(ends, end))
    return positions


def document_of(question: Question, answer: str) -> int | None:
    """The index of the first document that contains the answer."""
    return next((index for index, document in enumerate(question.chunks) if answer and answer in document), None)


def main() -> None:
    args = parse_args()
    tokenizer, oracle = AutoTokenizer.from_pretrained(args.model), Mixed(args.model)
    lines = []
    with open(args.out, "w", encoding="utf-8") as out:
        for question, segments in draw(args, Prompts(tokenizer), tokenizer):
            right = document_of(question, question.answers[0])
            for name, cache, kept in STUDIES[args.study](oracle, segments, tokenizer):
                prompt = oracle.start_over(cache, segments, kept)
                answer = tokenizer.decode(prompt.greedy(8, tokenizer.eos_token_id), skip_special_tokens=True).strip()
                em, document = exact_match(answer, question.answers), document_of(question, answer)
                line = {"group": question.group, "id": question.id, "policy": name, "answer": answer, "em": em}
                lines.append(line | {"right": right, "document": document})
                print(json.dumps(lines[-1]), file=out, flush=True)
    print(mixtures_of(lines), end="")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", choices=list(STUDIES), required=True)
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
