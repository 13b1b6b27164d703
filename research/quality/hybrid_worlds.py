"""Leaning worlds as word-level tokens for a small hybrid: few words, so that a model learns them in minutes."""

import dataclasses
import random
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from research.quality.leaning import FAMILIES, LEANING
from research.quality.worlds import Question, Split, World

PAD, EOS, UNKNOWN = range(3)
WORD = re.compile(r"\w+|[^\w\s]|\n")


class Asked(NamedTuple):
    """Token ids of documents, and of a question and its answer."""

    documents: list[list[int]]
    question: list[int]
    answer: list[int]


class Words:
    """Ids of words; those that training worlds do not have are unknown."""

    def __init__(self, words: Sequence[str]):
        self.words = list(words)
        self._ids = {word: i for i, word in enumerate(self.words, start=UNKNOWN + 1)}

    @classmethod
    def of_worlds(cls, count: int = 6000) -> "Words":
        """All words of so many worlds."""
        rng, words = random.Random("words"), dict[str, None]()
        for number in range(count):
            world = make(rng, list(LEANING)[number % len(LEANING)], "train", (2, 8))
            texts = [document(*each) for each in world.documents]
            texts += [f"{each.text} {each.answer}" for each in world.single_hop + world.two_hop]
            words.update(dict.fromkeys(word for text in texts for word in WORD.findall(text)))
        return cls(sorted(words))

    def __len__(self) -> int:
        return len(self.words) + UNKNOWN + 1

    def ids(self, text: str) -> list[int]:
        return [self._ids.get(word, UNKNOWN) for word in WORD.findall(text)]


def document(title: str, text: str) -> str:
    return f"{title}: {text}\n"


def make(rng: random.Random, family: str, split: Split, documents: tuple[int, int]) -> World:
    return FAMILIES[family].make(rng, split, rng.randint(*documents), 0.3)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """text, branch: tokens of a world's documents, and of a question with its answer.  branches: questions a world."""

    text: int = 192
    branch: int = 24
    branches: int = 4


def rows(words: Words, sizes: Sizes, seed: int, count: int, documents: tuple[int, int]) -> list[np.ndarray]:
    """`count` training worlds of (least, most) documents: ids [count, text], lens [count], branches
    [count, branches, branch] and, of each, how many tokens belong to the question, [count, branches]. int16."""
    rng, families = random.Random(f"rows/{seed}"), list(LEANING)
    ids = np.full((count, sizes.text), PAD, np.int16)
    branches = np.full((count, sizes.branches, sizes.branch), PAD, np.int16)
    lens, asked = np.zeros(count, np.int16), np.zeros((count, sizes.branches), np.int16)
    number = 0
    while number < count:
        world = make(rng, rng.choice(families), "train", documents)
        text = [each for title, body in world.documents for each in words.ids(document(title, body))]
        questions = world.single_hop + world.two_hop
        if len(text) > sizes.text or not questions:
            continue
        ids[number, : len(text)], lens[number] = text, len(text)
        for i, question in enumerate(world.draw(rng, sizes.branches, 0.5, 0.3)):
            first, second = encode(words, question)
            whole = (first + second)[: sizes.branch]
            branches[number, i, : len(whole)], asked[number, i] = whole, len(first)
        number += 1
    return [ids, lens, branches, asked]


def encode(words: Words, question: Question) -> tuple[list[int], list[int]]:
    """A question, and its answer with the end of sequence."""
    return words.ids(question.text), [*words.ids(question.answer), EOS]


def kinds() -> list[tuple[str, str, int]]:
    """For each kind of question: its name, family and hops."""
    found = [(family, hops) for family, each in LEANING.items() for hops in each.hops]
    return [(f"{family}-{hops}-hop" if hops > 1 else family, family, hops) for family, hops in found]


def questions_of(words: Words, family: str, hops: int, count: int, documents: int) -> list[Asked]:
    """`count` test questions over this many documents each."""
    rng, found = random.Random(f"test/{family}/{hops}"), list[Asked]()
    while len(found) < count:
        world = make(rng, family, "test", (documents, documents + 1))  # some families make one less
        questions = world.single_hop if hops == 1 else world.two_hop
        if len(world.documents) == documents and questions:
            texts = [words.ids(document(*each)) for each in world.documents]
            found.append(Asked(texts, *encode(words, rng.choice(questions))))
    return found
