"""Training rows: worlds packed one after another, each with several questions that do not see one another.

A row is a set of arrays, one element per token. A world is one prompt with branches: its documents appear
once, and each question with its answer continues them as if it were the only one. So

    q sees k  iff  k <= q,  both are of the same world,
                   q is text and k is not of a lead, or both are of the same chunk,
                   k is of no branch or both are of the same branch  (branch 0 is what the questions share)

Chunk 0 is text. With nothing else that is the full causal mask, with chunks 1, 2, ... the block mask. As under
`base:preamble=lead`, each chunk may have a lead of its own, numbered -1, -2, ...: a copy of the text before the first
document, BOS and instruction, at the positions directly before the chunk; or a neutral text, as under `base`.

As under `epic` and its like, some tokens of chunks are recomputed. Such a token occurs twice at its position: first as
chunk n computed it, numbered -n like a lead, for the chunk alone to see; directly behind it as text.
"""

import dataclasses
import functools
import random
from collections.abc import Iterable

import numpy as np

from benchmark.sample import load_sample
from research.quality.leaning import FAMILIES
from research.quality.vocabulary import BOS, EOS, PAD, Encoder
from research.quality.worlds import Split, World
from sglang_lazy.verify.prompts import INSTRUCTION, document_text, question_text

FIELDS = ("ids", "targets", "kinds", "positions", "worlds", "chunks", "branches")
"""The arrays of a row. targets: the next token; kinds: the loss that its prediction counts towards."""

IGNORED, CONTEXT, ANSWER = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class Mix:
    """Settings for the worlds of a row.

    families: drawn with equal odds, so a family named twice comes up twice as often. block_share: the share of worlds
    under the block mask; the others are under the full mask. lead_share: the share of those under the block mask whose
    chunks have leads. neutral_share: the share of leads that are neutral text. recompute_share: the share of worlds
    under the block mask, with leads or without, in which some tokens of chunks are recomputed.
    """

    documents: tuple[int, int]
    families: tuple[str, ...] = ("people",)
    questions: int = 8
    two_hop_share: float = 0.5
    similar: float = 0.3
    hard_share: float = 0.0
    block_share: float = 0.5
    lead_share: float = 0.0
    neutral_share: float = 0.0
    recompute_share: float = 0.0
    bos_share: float = 0.9
    instruction_share: float = 0.8


def make_row(rng: random.Random, encode: Encoder, mix: Mix, length: int, split: Split = "train") -> np.ndarray:
    """[len(FIELDS), length] int32: as many worlds as fit, the last ones smaller if necessary, then padding."""
    row = Row(length)
    row.fill(rng, encode, mix, split)
    return row.finish()


@functools.cache
def prose() -> list[list[str]]:
    """The words of real documents."""
    return [document["text"].split() for request in load_sample() for document in request["docs"]]


def neutral_text(rng: random.Random, encode: Encoder) -> list[int]:
    """BOS and an excerpt of some document, with 1 to 40 words."""
    words = rng.choice(prose())
    start = rng.randrange(len(words))
    return [BOS, *encode(" ".join(words[start : start + rng.randint(1, 40)]) + "\n\n")]


class Recomputed:
    """Which tokens of a world's chunks are recomputed: the first ones of each, or a random share of single tokens or
    runs."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.first = rng.randint(1, 8) if rng.random() < 0.5 else 0
        self.share, self.run = rng.uniform(0.05, 0.3), rng.choice((1, 4, 16))

    def of(self, count: int) -> list[int]:
        """Indices into a chunk of `count` tokens."""
        if self.first:
            return list(range(min(self.first, count)))
        starts = range(-self.rng.randrange(self.run), count, self.run)
        runs = (range(max(start, 0), start + self.run) for start in starts if self.rng.random() < self.share)
        return [index for run in runs for index in run if index < count]


class Row:
    def __init__(self, length: int):
        self.length = length
        self.fields: dict[str, list[int]] = {name: [] for name in FIELDS}
        self.num_worlds = 0

    def fill(self, rng: random.Random, encode: Encoder, mix: Mix, split: Split = "train") -> None:
        """Add as many worlds as fit, the last ones smaller if necessary."""
        while True:
            family, count = FAMILIES[rng.choice(mix.families)], rng.randint(*mix.documents)
            while not self.add(rng, encode, mix, family.make(rng, split, count, mix.similar)):
                if count <= 2:
                    return
                count = max(2, count // 2)

    def add(self, rng: random.Random, encode: Encoder, mix: Mix, world: World) -> bool:
        """Add `world` with questions drawn from it. Returns False, adding nothing, if there is no room."""
        share = rng.random()
        block, lead = share < mix.block_share, share < mix.block_share * mix.lead_share
        before = len(self.fields["ids"])
        self.num_worlds += 1
        opening = [BOS] * (rng.random() < mix.bos_share)
        if rng.random() < mix.instruction_share:
            opening += encode(INSTRUCTION)
        own = random.Random(share)  # all else is the same with other shares
        lead_tokens = (neutral_text(own, encode) if own.random() < mix.neutral_share else opening) if lead else []
        recomputed = Recomputed(own) if block and own.random() < mix.recompute_share else None
        # Only distances matter; a lead longer than the opening would begin at a negative position.
        shared = max(len(opening), len(lead_tokens))
        self._segment(opening, CONTEXT, position=shared - len(opening))
        for number, (title, text) in enumerate(world.documents, start=1):
            # A copy for each chunk, since a token has one position: a shared lead would reveal each chunk's place.
            self._segment(lead_tokens, IGNORED, position=shared - len(lead_tokens), chunk=-number)
            tokens = encode(document_text({"title": title, "text": text}))
            self._segment(tokens, CONTEXT, position=shared, chunk=number * block)
            if recomputed:
                self._recompute(len(self.fields["ids"]) - len(tokens), recomputed.of(len(tokens)))
            shared += len(tokens)
        drawn = world.draw(rng, mix.questions, mix.two_hop_share, mix.hard_share)
        for branch, question in enumerate(drawn, start=1):
            asked = encode(question_text({"question": question.text}))
            self._segment(asked, CONTEXT, position=shared, branch=branch)
            answer = [*encode(f" {question.answer}"), EOS]
            self.fields["targets"][-1], self.fields["kinds"][-1] = answer[0], ANSWER
            self._segment(answer, ANSWER, position=shared + len(asked), branch=branch)
        return self._keep(before)

    def fits(self) -> bool:
        return len(self.fields["ids"]) <= self.length

    def _keep(self, before: int) -> bool:
        """Whether the row fits with its last world, which began at `before` and is dropped otherwise."""
        if self.fits():
            return True
        self.num_worlds -= 1
        for values in self.fields.values():
            del values[before:]
        return False

    def _segment(self, tokens: list[int], kind: int, *, position: int, chunk: int = 0, branch: int = 0) -> None:
        """Append tokens, each predicting the next; the last one's target is left open."""
        count = len(tokens)
        if not count:
            return
        fields = self.fields
        fields["ids"] += tokens
        fields["targets"] += [*tokens[1:], PAD]
        fields["kinds"] += [kind] * (count - 1) + [IGNORED]
        fields["positions"] += range(position, position + count)
        fields["worlds"] += [self.num_worlds] * count
        fields["chunks"] += [chunk] * count
        fields["branches"] += [branch] * count

    def _recompute(self, start: int, indices: Iterable[int]) -> None:
        """Recompute tokens of the chunk that begins at `start` and ends the row. The loss counts each once."""
        fields = self.fields
        for place in sorted((start + index for index in indices), reverse=True):
            fields["chunks"][place] *= -1
            for values in fields.values():
                values.insert(place + 1, values[place])
            fields["targets"][place + 1], fields["kinds"][place + 1] = PAD, IGNORED
            fields["chunks"][place + 1] = 0

    def finish(self) -> np.ndarray:
        """Padding is a world of its own, so every padding token sees something."""
        return np.array([values + [0] * (self.length - len(values)) for values in self.fields.values()], dtype=np.int32)
