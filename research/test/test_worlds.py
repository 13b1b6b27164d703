"""Generated worlds: held-out names, where answers stand, and determinism."""

import random

import pytest

from benchmark.sample import WORLDS, load_sample
from research.quality.facts import PREDICATES
from research.quality.worlds import make_world, people, records, records_of_one_world


def worlds(split="train", count=40, seed=0):
    rng = random.Random(seed)
    return [make_world(rng, split, rng.randint(2, 20)) for _ in range(count)]


def names_in(world) -> set[str]:
    """The people of a world and everyone they are related to."""
    relations = {question.answer for question in world.single_hop if question.text.startswith("Who ")}
    return {title for title, _ in world.documents} | relations


def test_held_out_names():
    """No name of one split occurs in the other, in any role."""
    train, test = set(people("train")), set(people("test"))
    assert not train & test and len(test) > 2000
    assert all(names_in(world) <= train for world in worlds("train"))
    assert all(names_in(world) <= test for world in worlds("test"))


def test_documents_stand_alone():
    """Every sentence names its document's person; a person has one document."""
    for world in worlds():
        titles = [title for title, _ in world.documents]
        assert len(set(titles)) == len(titles)
        for title, text in world.documents:
            sentences = text.split(". ")
            assert 1 <= len(sentences) <= 4
            assert all(title in sentence for sentence in sentences)


def test_single_hop():
    """The answer is in the one document needed, and the question names that document's person."""
    for world in worlds():
        assert world.single_hop
        for question in world.single_hop:
            title, text = world.documents[question.gold[0]]
            assert question.answer in text and title in question.text and len(question.gold) == 1


def test_two_hop():
    """The first document says who is meant; the second, another one, holds the answer; the question names neither that
    person nor the answer."""
    found = [(world, question) for world in worlds() for question in world.two_hop]
    assert len(found) > 100
    for world, question in found:
        (first, known), (second, text) = (world.documents[index] for index in question.gold)
        assert first != second
        assert first in question.text and second not in question.text
        assert second in known and question.answer in text
        assert question.answer not in question.text


def test_similar_names_are_distractors():
    """With `similar`, people share first names or surnames within a world."""

    def shared(similar: float) -> float:
        firsts = [
            [title.split()[0] for title, _ in make_world(random.Random(seed), "train", 12, similar).documents]
            for seed in range(30)
        ]
        return sum(len(names) - len(set(names)) for names in firsts) / 30

    assert shared(0.6) > 1 + shared(0.0)


def test_templates():
    """A statement ends with its value, and the name comes before."""
    for predicate in PREDICATES:
        for statement in predicate.statements:
            assert statement.endswith("{value}.") and statement.index("{name}") < statement.index("{value}")
        assert all("{who}" in question for question in predicate.questions)


@pytest.mark.parametrize("hops", [1, 2])
def test_records(hops):
    """The same seed gives the same records, in the format of the real sets; another seed gives others."""
    first, again, other = (list(records(seed, "test", 20, hops)) for seed in (0, 0, 1))
    assert first == again != other
    for record in first:
        assert 10 <= len(record["docs"]) <= 20
        assert len(record["gold_ids"]) == hops and record["type"] == f"{hops}-hop"
        gold = next(doc for doc in record["docs"] if doc["id"] == record["gold_ids"][-1])
        assert record["answers"][0] in gold["text"]


def test_records_of_one_world():
    """Both kinds of questions alternate, none repeats; answers are in the documents, which recur, with held-out
    names."""
    sample = list(records_of_one_world(1, "test", 16))
    assert [record["type"] for record in sample] == ["1-hop", "2-hop"] * 8
    assert len({record["question"] for record in sample}) == 16
    assert all(10 <= len(record["docs"]) <= 12 for record in sample)
    documents = {(doc["id"], doc["title"], doc["text"]) for record in sample for doc in record["docs"]}
    ids, titles, _ = zip(*documents, strict=True)
    assert len(documents) == len(set(ids)) == len(set(titles)) <= 24
    assert set(titles) <= set(people("test"))
    orders = [[doc["id"] for doc in record["docs"]] for record in sample]
    assert any(order != sorted(order, key=int) for order in orders)
    for record in sample:
        texts = {doc["id"]: doc["text"] for doc in record["docs"]}
        assert len(texts) == len(record["docs"])
        assert record["answers"][0] in texts[record["gold_ids"][-1]]
        assert set(record["gold_ids"]) <= texts.keys() and len(record["gold_ids"]) == int(record["type"][0])


def test_sample_of_the_demo():
    """The demo's file is what worlds.py writes."""
    assert load_sample(WORLDS) == list(records_of_one_world(0, "test", 16))
