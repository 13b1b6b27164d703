"""Rows for training a Comb model: what its decoder, its encoder and its teacher read of the same prompts.

The teacher reads a row as packing.py makes it, under the full mask. The encoder reads its chunk tokens, with positions
from each chunk's beginning; the decoder reads the text, with positions that do not count chunks.
"""

import dataclasses
import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from oracle.segments import Segment
from research.quality.packing import ANSWER, CONTEXT, FIELDS, IGNORED, Mix, Row
from research.quality.recipe import Recipe, encoder

CHUNK_FIELDS = ("ids", "positions", "worlds", "chunks")
"""The arrays that the encoder reads."""
TEXT_FIELDS = ("ids", "positions", "worlds", "branches", "kinds", "targets", "places")
"""The arrays that the decoder reads.  places: its tokens' indices in the row.  kinds: IGNORED outside questions."""


@dataclasses.dataclass(frozen=True)
class CombRecipe(Recipe):
    """A row has at most `chunk_length` chunk tokens and `text_length` text tokens.

    cross_layers: the decoder's layers that have a cross layer before them. grouped: the share of worlds with several
    documents in a chunk. data: files of questions to use instead of worlds.
    """

    cross_layers: tuple[int, ...] = ()
    chunk_length: int = 3072
    text_length: int = 1536
    grouped: float = 0.5
    data: tuple[str, ...] = ()


class Example(NamedTuple):
    """A prompt and its answer under full attention, including the end of sequence if it was generated."""

    before: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...]
    question: tuple[int, ...]
    answer: tuple[int, ...]


def example_of(segments: Sequence[Segment], answer: Sequence[int]) -> Example:
    """Raises ValueError for a prompt without chunks or without text after them."""
    places = [place for place, segment in enumerate(segments) if segment.kind == "chunk"]
    if not places or segments[-1].kind == "chunk":
        raise ValueError("a prompt needs chunks, and text after them")

    def text(part: Sequence[Segment]) -> tuple[int, ...]:
        return tuple(token for segment in part if segment.kind == "text" for token in segment.ids)

    chunks = tuple(segment.ids for segment in segments if segment.kind == "chunk")
    return Example(text(segments[: places[-1]]), chunks, text(segments[places[-1] :]), tuple(answer))


class CombRow(Row):
    def __init__(self, recipe: CombRecipe):
        super().__init__(recipe.length)
        self.limits = (recipe.chunk_length, recipe.text_length)

    def fits(self) -> bool:
        text = self.fields["chunks"].count(0)
        sizes = (len(self.fields["chunks"]) - text, text)
        return super().fits() and all(size <= limit for size, limit in zip(sizes, self.limits, strict=True))

    def add_example(self, example: Example) -> bool:
        """Add a prompt and its answer; returns False, adding nothing, if there is no room."""
        before = len(self.fields["ids"])
        self.num_worlds += 1
        self._segment(list(example.before), CONTEXT, position=0)
        for number, tokens in enumerate(example.chunks, start=1):
            self._segment(list(tokens), CONTEXT, position=len(self.fields["ids"]) - before, chunk=number)
        self._segment(list(example.question), CONTEXT, position=len(self.fields["ids"]) - before, branch=1)
        self.fields["targets"][-1], self.fields["kinds"][-1] = example.answer[0], ANSWER
        self._segment(list(example.answer), ANSWER, position=len(self.fields["ids"]) - before, branch=1)
        return self._keep(before)


def group(rng: random.Random, row: np.ndarray, share: float) -> None:
    """In a `share` of a row's worlds, merge runs of documents into one chunk."""
    world, chunk = row[FIELDS.index("worlds")], row[FIELDS.index("chunks")]
    for number in range(1, int(world.max()) + 1):
        mine = (world == number) & (chunk > 0)
        if rng.random() < share:
            size = rng.randint(2, max(2, int(chunk[mine].max())))
            chunk[mine] = (chunk[mine] - 1) // size + 1


class Rows(NamedTuple):
    """full: [rows, len(FIELDS), length]; chunks: [rows, len(CHUNK_FIELDS), chunk_length]; texts: [rows,
    len(TEXT_FIELDS), text_length]; all int32. Sizes are the same in every step, so the step is compiled once."""

    full: np.ndarray
    chunks: np.ndarray
    texts: np.ndarray


def divide(rows: np.ndarray, recipe: CombRecipe) -> Rows:
    """rows: [rows, len(FIELDS), length]."""
    count, _, length = rows.shape
    chunks = np.zeros((count, len(CHUNK_FIELDS), recipe.chunk_length), np.int32)
    texts = np.zeros((count, len(TEXT_FIELDS), recipe.text_length), np.int32)
    for number, row in enumerate(rows):
        fields = dict(zip(FIELDS, row, strict=True))
        world, chunk = fields["worlds"], fields["chunks"]
        index, in_chunk = np.arange(length), chunk > 0
        begins = np.r_[True, (world[1:] != world[:-1]) | (chunk[1:] != chunk[:-1])]
        since = index - np.maximum.accumulate(np.where(begins, index, 0))
        passed = np.cumsum(in_chunk)
        first = np.r_[True, world[1:] != world[:-1]]
        before = np.maximum.accumulate(np.where(first, passed - in_chunk, 0))
        own = {
            "positions": fields["positions"] - (passed - before),
            "kinds": np.where(fields["branches"] > 0, fields["kinds"], IGNORED),
            "places": index,
        }
        mine, its = np.flatnonzero(in_chunk), np.flatnonzero(~in_chunk & (world > 0))
        chunks[number, :, : len(mine)] = np.stack([fields["ids"], since, world, chunk])[:, mine]
        texts[number, :, : len(its)] = np.stack([(fields | own)[name] for name in TEXT_FIELDS])[:, its]
    return Rows(rows.astype(np.int32), chunks, texts)


def world_row(rng: random.Random, mix: Mix, recipe: CombRecipe, grouped: float, split="train") -> np.ndarray:
    """[len(FIELDS), length]. `recipe.start_worker` must have been called."""
    row = CombRow(recipe)
    row.fill(rng, encoder(), mix, split)
    made = row.finish()
    group(rng, made, grouped)
    return made


def make_worlds(recipe: CombRecipe, step: int) -> Rows:
    """The rows of a step."""
    mix = dataclasses.replace(recipe.mix(step), block_share=1)
    rngs = (random.Random(f"{recipe.seed}/{step}/{row}") for row in range(recipe.rows))
    return divide(np.stack([world_row(rng, mix, recipe, recipe.grouped) for rng in rngs]), recipe)


_examples: Sequence[Example]


def start_worker(examples: Sequence[Example]) -> None:
    global _examples
    _examples = examples


def make_examples(recipe: CombRecipe, step: int) -> Rows:
    """The rows of a step, with the chunks of each prompt in random order and some left out."""
    rows = []
    for number in range(recipe.rows):
        rng, row = random.Random(f"{recipe.seed}/{step}/{number}"), CombRow(recipe)
        while row.add_example(vary(rng, rng.choice(_examples))):
            pass
        rows.append(row.finish())
    return divide(np.stack(rows), recipe)


def vary(rng: random.Random, example: Example) -> Example:
    """Half of the time all chunks, otherwise some; in random order."""
    count = len(example.chunks)
    kept = count if rng.random() < 0.5 else rng.randint(1, count)
    return example._replace(chunks=tuple(rng.sample(example.chunks, kept)))
