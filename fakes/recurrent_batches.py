"""Random batches for recurrent layers. Tokens have names, 1, 2, 3 ..., and a state is the names that it has gone
through."""

import itertools
import random
from collections.abc import Iterator

from sglang_lazy.recurrent.pieces import Chunk, ChunkRow, Text, TextRow

NUM_SLOTS = 12


class Batch:
    """Rows of a batch, the slots of requests and of chunks, and what must come of them.

    longest: the most tokens of a piece.  shortest: the fewest of a chunk.
    requests, chunks: the tokens in each slot before the batch; a chunk computed in part has its first ones.
    tokens: the batch's own.  before: by piece, what has been seen before it.
    requests_after, chunks_after: of the slots that the batch writes.
    context: by token, what was seen before it when it was computed.
    """

    def __init__(self, seed: int, longest: int, shortest: int):
        self.dice, self.longest, self.shortest = random.Random(seed), longest, shortest
        self._names = itertools.count(1)
        self.context: dict[int, list[int]] = {}
        self.requests = [self._draw(0, []) for _ in range(NUM_SLOTS)]
        self.chunks = [self._draw(shortest, []) for _ in range(NUM_SLOTS)]
        self.rows: list[TextRow | ChunkRow] = []
        self.tokens: list[int] = []
        self.before: list[list[int]] = []
        self.requests_after: dict[int, list[int]] = {}
        self.chunks_after: dict[int, list[int]] = {}
        cached, free = list(range(1, 5)), iter(range(5, NUM_SLOTS))
        kept: dict[int, list[int]] = {}  # beginnings of prompts; no row of the batch goes on from there
        slots = self.dice.sample(range(1, NUM_SLOTS), 4)
        for _ in range(self.dice.randint(0, 3)):
            after = self.dice.choice([None, None, *cached, *self.chunks_after])
            resumed = self.dice.random() < 0.4 and after not in self.chunks_after
            self._add_chunk(next(free), resumed, after)
        for slot in slots[: self.dice.randint(not self.rows, 4)]:
            self._add_text(slot, [*cached, *self.chunks_after] if self.dice.random() < 0.7 else [], free, kept)
        self.chunks_after |= kept

    def _draw(self, least: int, before: list[int]) -> list[int]:
        names = [next(self._names) for _ in range(self.dice.randint(least, self.longest))]
        for i, name in enumerate(names):
            self.context[name] = before + names[:i]
        return names

    def _add_piece(self, before: list[int], least: int) -> list[int]:
        new = self._draw(least, before)
        self.before.append(before)
        self.tokens += new
        return new

    def _add_chunk(self, slot: int, resumed: bool, after: int | None) -> None:
        preamble = [] if after is None else self.chunks_after.get(after, self.chunks[after])
        if resumed and after is not None:
            self.chunks[slot] = self._draw(self.shortest, preamble)
        start = self.chunks[slot] if resumed else []
        new = self._add_piece(preamble + start, 1 if resumed else self.shortest)
        self.rows.append(ChunkRow(slot, len(new), resumed, after))
        self.chunks_after[slot] = start + new

    def _add_text(self, slot: int, chunks: list[int], free: Iterator[int], kept: dict[int, list[int]]) -> None:
        resumed, keeps = self.dice.random() < 0.5, None
        seen, parts = self.requests[slot] if resumed else [], list[Chunk | Text]()
        for _ in range(self.dice.randint(1, 3)):
            for chunk in self.dice.choices(chunks, k=self.dice.randint(0, 2)) if chunks else []:
                parts.append(Chunk(chunk))
                seen = seen + self.chunks_after.get(chunk, self.chunks[chunk])
            new = self._add_piece(seen, 1)
            parts.append(Text(len(new)))
            seen = seen + new
            if len(parts) == 1 and not resumed and self.dice.random() < 0.5:
                keeps = next(free)
                kept[keeps] = new
        self.rows.append(TextRow(slot, resumed, parts, keeps))
        self.requests_after[slot] = seen
