"""Prompts with several documents each, most of them from one collection."""

import dataclasses
import random
from collections.abc import Iterator

from benchmark.serving.workloads import draw_distinct, zipf_weights

DOCUMENTS_A_PROMPT = 5


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Each prompt asks about a collection.

    collections, size: the number of collections and of documents in each; both are drawn from a Zipf distribution.
    alpha: its exponent.
    others: how many of a prompt's documents come from any collection.
    """

    collections: int = 24
    size: int = 20
    alpha: float = 0.8
    others: int = 0

    def prompts(self, seed: int) -> Iterator[tuple[int, list[int]]]:
        """Yields each prompt's collection and documents; documents are numbered consecutively."""
        rng = random.Random(seed)
        by_rank = zipf_weights(self.collections, self.alpha)
        inside = zipf_weights(self.size, self.alpha)
        while True:
            (collection,) = draw_distinct(rng, by_rank, 1)
            own = draw_distinct(rng, inside, DOCUMENTS_A_PROMPT - self.others)
            documents = dict.fromkeys(collection * self.size + index for index in own)
            while len(documents) < DOCUMENTS_A_PROMPT:
                (other,), (index,) = draw_distinct(rng, by_rank, 1), draw_distinct(rng, inside, 1)
                documents[other * self.size + index] = None
            order = list(documents)
            rng.shuffle(order)
            yield collection, order


TRAFFIC = {"collections": Traffic(), "mixed": Traffic(others=2)}


def tokens_of(document: int, length: int) -> list[int]:
    """The document's text, as token ids valid for any small model."""
    rng = random.Random(f"document {document}")
    return [rng.randrange(10, 500) for _ in range(length)]
