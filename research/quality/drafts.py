"""Building blocks of worlds with leaning documents: unique people and things, facts, and questions."""

import functools
import random
from collections.abc import Iterable

from research.quality.facts import ATTRIBUTES, TOWNS
from research.quality.worlds import Question, Split, World, draw_people, is_held_out

TRADES, _, _, INSTRUMENTS, ANIMALS, COLOURS, DISHES = (predicate.values for predicate in ATTRIBUTES)
VERBS = {"keeps": "keep", "likes": "like", "sells": "sell", "paints": "paint", "hears": "hear", "finds": "find"}
"""What a person may do with a thing, as in a statement and as in a question."""
FILLERS = {
    "Many live in {town}.": COLOURS,
    "The house in {town} is painted {value}.": COLOURS,
    "In the yard in {town} lives a {value}.": ANIMALS,
    "In {town} they play the {value}.": INSTRUMENTS,
}
"""Sentences about no person, with the choices for {value}."""

Facts = dict[str, tuple[str, list[int]]]
"""What is known about a person: for each verb, the thing and the documents needed to know it."""


@functools.cache
def things(split: Split) -> tuple[str, ...]:
    """All values in a split, such as `crimson goat`."""
    pairs = (f"{colour} {noun}" for colour in COLOURS for noun in (*ANIMALS, *INSTRUMENTS))
    return tuple(pair for pair in pairs if is_held_out(pair) == (split == "test"))


class Draft:
    """A world under construction; no person and no thing occurs twice."""

    def __init__(self, rng: random.Random, split: Split, num_people: int, similar: float):
        self.rng, self.split = rng, split
        self.people = draw_people(rng, split, num_people, similar)
        self.world = World([], [], [])
        self.used: set[str] = set()

    def thing(self) -> str:
        while (thing := self.rng.choice(things(self.split))) in self.used:
            pass
        self.used.add(thing)
        return thing

    def verbs(self, count: int) -> list[str]:
        return self.rng.sample(list(VERBS), count)

    def add(self, title: str, *sentences: str) -> int:
        """Add a document, mixing in up to two unrelated sentences; returns its index."""
        text = list(sentences)
        for _ in range(self.rng.randint(0, 2)):
            text.insert(self.rng.randint(0, len(text)), filler(self.rng))
        self.world.documents.append((title, " ".join(text)))
        return len(self.world.documents) - 1

    def ask(self, text: str, answer: str, gold: Iterable[int], hops: int = 1) -> None:
        question = Question(text, answer, hops, tuple(dict.fromkeys(gold)), hard=False)
        (self.world.single_hop if hops == 1 else self.world.two_hop).append(question)

    def ask_about(self, facts: dict[str, Facts], teachers: dict[str, tuple[str, list[int]]]) -> None:
        """Ask for each fact, and for the facts of each teacher.

        teachers: for each person, the teacher and the documents needed to know who that is.
        """
        for name, known in facts.items():
            for verb, (thing, gold) in known.items():
                self.ask(f"What does {name} {VERBS[verb]}?", thing, gold)
        for name, (teacher, before) in teachers.items():
            for verb, (thing, gold) in facts[teacher].items():
                self.ask(f"What does the teacher of {name} {VERBS[verb]}?", thing, [*before, *gold], hops=2)


def filler(rng: random.Random) -> str:
    sentence, values = rng.choice(list(FILLERS.items()))
    return sentence.format(town=rng.choice(TOWNS), value=rng.choice(values))


def sizes(rng: random.Random, total: int, low: int, high: int) -> list[int]:
    """Random sizes from `low` to `high` whose sum is at most `total` and more than `total - low`."""
    found = []
    while total >= low:
        found.append(rng.randint(low, min(high, total)))
        total -= found[-1]
    return found
