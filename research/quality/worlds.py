"""Worlds of invented people: short documents with facts about them, and questions over one or two documents.

Each person of a world has a document that names them in every sentence and gives one fact per sentence, so it stands
alone; the value ends its sentence, after the name. A single-hop question asks for a fact of one
document. A two-hop question names a person through a relation ("the teacher of ..."): the first document says who that
is, and the answer is in the document of that other person.

Full names are split by a hash: no name of a test world occurs in a training world, though its parts do.

    python -m research.quality.worlds > examples/data/worlds_sample.jsonl    # the questions of the demo
"""

import dataclasses
import functools
import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from research.quality.facts import FIRST_NAMES, PREDICATES, SURNAMES, Predicate

Split = Literal["train", "test"]
TEST_SHARE = 8  # one full name in this many is held out
SIMILAR = 0.3  # the share of people who share a first name or surname with another


@functools.cache
def people(split: Split) -> tuple[str, ...]:
    """All full names in a split."""
    names = (f"{first} {surname}" for first in FIRST_NAMES for surname in SURNAMES)
    return tuple(name for name in names if is_held_out(name) == (split == "test"))


def is_held_out(name: str) -> bool:
    """Whether a name or thing belongs to the test split."""
    return hashlib.sha256(name.encode()).digest()[0] % TEST_SHARE == 0


@dataclasses.dataclass(frozen=True)
class Question:
    """`hops` is 1 or 2, `gold` the documents needed, in the order in which they are needed.

    hard: the world states the same relation for somebody else who shares a name with one of these people.
    """

    text: str
    answer: str
    hops: int
    gold: tuple[int, ...]
    hard: bool


@dataclasses.dataclass(frozen=True)
class World:
    """Documents as (title, text), and everything that can be asked about them."""

    documents: list[tuple[str, str]]
    single_hop: list[Question]
    two_hop: list[Question]

    def draw(self, rng: random.Random, count: int, two_hop_share: float, hard_share: float) -> list[Question]:
        """Draw `count` questions with replacement: two-hop with probability `two_hop_share`, hard with `hard_share`, if
        there are any."""
        drawn = []
        for _ in range(count):
            questions = self.two_hop if self.two_hop and rng.random() < two_hop_share else self.single_hop
            hard = [question for question in questions if question.hard]
            drawn.append(rng.choice(hard if hard and rng.random() < hard_share else questions))
        return drawn


def make_world(rng: random.Random, split: Split, num_documents: int, similar: float = SIMILAR) -> World:
    """A world of `num_documents` people, a `similar` share of whom have a first name or surname from another."""
    names = draw_people(rng, split, num_documents, similar)
    facts = [_draw_facts(rng, names, index, split) for index in range(num_documents)]
    documents = [(name, _describe(rng, name, known)) for name, known in zip(names, facts, strict=True)]
    single_hop, two_hop = [], []

    def has_rival(index: int, predicate: Predicate) -> bool:
        others = (other for other in range(num_documents) if other != index and predicate in facts[other])
        return any(not set(names[index].split()).isdisjoint(names[other].split()) for other in others)

    for index, (name, known) in enumerate(zip(names, facts, strict=True)):
        for predicate, value in known.items():
            question = rng.choice(predicate.questions)
            hard = has_rival(index, predicate)
            single_hop.append(Question(question.format(who=name), value, 1, (index,), hard))
            if predicate.phrase and value in names:
                other = names.index(value)
                who = predicate.phrase.format(name=name)
                for asked, answer in facts[other].items():
                    if answer != name:  # otherwise the question contains the answer
                        text = rng.choice(asked.questions).format(who=who)
                        two_hop.append(Question(text, answer, 2, (index, other), hard or has_rival(other, asked)))
    return World(documents, single_hop, two_hop)


def draw_people(rng: random.Random, split: Split, count: int, similar: float) -> list[str]:
    """Different full names; a `similar` share of them shares a first name or surname with an earlier one."""
    names = [rng.choice(people(split))]
    while len(names) < count:
        name = rng.choice(people(split))
        if rng.random() < similar:
            first, surname = name.split()
            other_first, other_surname = rng.choice(names).split()
            name = f"{other_first} {surname}" if rng.random() < 0.5 else f"{first} {other_surname}"
        if name not in names and is_held_out(name) == (split == "test"):
            names.append(name)
    return names


def _draw_facts(rng: random.Random, names: list[str], index: int, split: Split) -> dict[Predicate, str]:
    """One to four facts about a person; three in four related people are also in this world."""
    facts = {}
    for predicate in rng.sample(PREDICATES, rng.randint(1, 4)):
        if predicate.phrase is None:
            facts[predicate] = rng.choice(predicate.values)
        elif len(names) > 1 and rng.random() < 0.75:
            facts[predicate] = names[rng.choice([other for other in range(len(names)) if other != index])]
        else:
            facts[predicate] = _draw_stranger(rng, names, split)
    return facts


def _draw_stranger(rng: random.Random, names: list[str], split: Split) -> str:
    while (name := rng.choice(people(split))) in names:
        pass
    return name


def _describe(rng: random.Random, name: str, facts: dict[Predicate, str]) -> str:
    return " ".join(rng.choice(fact.statements).format(name=name, value=value) for fact, value in facts.items())


Make = Callable[[random.Random, Split, int, float], World]
"""make(rng, split, num_documents, similar), like `make_world`."""


def records(
    seed: int, split: Split, count: int, hops: int, *, documents: tuple[int, int] = (10, 20), make: Make = make_world
) -> Iterator[dict]:
    """`count` questions of one kind, each over a world of its own with `documents` (least, most) documents.

    The records have the form of the real question sets: docs, question, answers, gold_ids, type.
    """
    rng = random.Random(f"{split}/{hops}/{seed}")
    number = 0
    while number < count:
        world = make(rng, split, rng.randint(*documents), SIMILAR)
        questions = world.single_hop if hops == 1 else world.two_hop
        if not questions:
            continue
        yield _record(f"{split}-{hops}-{seed}-{number}", world, rng.choice(questions), range(len(world.documents)))
        number += 1


def records_of_one_world(
    seed: int, split: Split, count: int, *, world_size: int = 24, documents: tuple[int, int] = (10, 12)
) -> Iterator[dict]:
    """`count` different questions over one world, single-hop and two-hop in turn.

    Each has `documents` (least, most) of the world's documents in its own order, including the necessary ones, so
    documents recur across questions at other positions.
    """
    rng = random.Random(f"{split}/one world/{seed}")
    world = make_world(rng, split, world_size)
    single_hop, two_hop = rng.sample(world.single_hop, count - count // 2), rng.sample(world.two_hop, count // 2)
    for number in range(count):
        question = (two_hop if number % 2 else single_hop)[number // 2]
        others = [index for index in range(world_size) if index not in question.gold]
        listed = [*question.gold, *rng.sample(others, rng.randint(*documents) - len(question.gold))]
        rng.shuffle(listed)
        yield _record(f"{split}-one-world-{seed}-{number}", world, question, listed)


def _record(name: str, world: World, question: Question, listed: Sequence[int]) -> dict:
    """A question over the documents of `world` whose indices are `listed`, in that order."""
    documents = [(index, *world.documents[index]) for index in listed]
    docs = [{"id": str(index), "title": title, "text": text} for index, title, text in documents]
    return {
        "id": name,
        "docs": docs,
        "question": question.text,
        "answers": [question.answer],
        "gold_ids": [str(index) for index in question.gold],
        "type": f"{question.hops}-hop",
    }


if __name__ == "__main__":
    for record in records_of_one_world(0, "test", 16):
        print(json.dumps(record))
