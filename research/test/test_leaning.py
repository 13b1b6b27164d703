"""Worlds of leaning documents, against readers that do not know how they are made: they answer by rules from the text
of whatever documents they are given."""

import random
import re
import sys

import pytest

from research.quality import leaning
from research.quality.drafts import things
from research.quality.leaning import LEANING
from research.quality.questions import read_questions
from research.quality.worlds import people

NAME, THING = r"[A-Z]\w+ [A-Z]\w+", r"[a-z]+ [a-z]+"
FACT = re.compile(rf"({NAME}|She|He|The \w+) (\w+)s a ({THING})")
PAIRS = [(name, hops) for name, family in LEANING.items() for hops in family.hops]


def sentences(documents):
    return [sentence.strip() for _, text in documents for sentence in re.split("[.;]", text)]


def know(documents):
    """What people do, `facts[name, verb]`, and who teaches whom. A pronoun refers to the person named last."""
    facts, teachers, trades, subject = {}, {}, {}, None
    for sentence in sentences(documents):
        if found := re.fullmatch(rf"({NAME}) works as a (\w+)", sentence):
            trades[f"The {found[2]}"] = found[1]
        elif found := re.fullmatch(rf"(?:The teacher of ({NAME})|(?:Her|His) teacher) is ({NAME})", sentence):
            teachers[found[1] or subject] = found[2]
        elif found := FACT.fullmatch(sentence):
            said = {"She": subject, "He": subject, **trades}.get(found[1], found[1])
            subject = said if re.fullmatch(NAME, found[1]) and said == found[1] else subject
            facts[said, found[2]] = found[3]
    return facts, teachers


def from_facts(documents, question):
    facts, teachers = know(documents)
    _, teacher_of, name, verb = re.fullmatch(rf"What does ((the teacher of )?)({NAME}) (\w+)\?", question).groups()
    return facts.get((teachers.get(name, "nobody") if teacher_of else name, verb))


def from_parts(documents, question):
    return from_facts([("", " ".join(text for _, text in documents))], question)


def from_table(documents, question):
    columns, cells = [], {}
    for sentence in sentences(documents):
        kind, _, values = sentence.partition(": ")
        if kind == "Columns":
            columns = values.split(", ")[1:]
        elif kind == "Row":
            name, *row = values.split(", ")
            cells |= {(name, column): cell for column, cell in zip(columns, row, strict=False)}
    name, verb = re.fullmatch(rf"What does ({NAME}) (\w+)\?", question).groups()
    return cells.get((name, f"{verb}s"))


def from_changes(documents, question):
    said, last = {}, None
    for sentence in sentences(documents):
        if found := re.fullmatch(rf"(?:From now on )?({NAME}) \w+s a ({THING})", sentence):
            last = said.setdefault(found[1], [])
            last.append(found[2])
        elif (found := re.fullmatch(rf"The last note is wrong: it is a ({THING})", sentence)) and last:
            last[-1] = found[1]
    name, when = re.fullmatch(rf"What (?:does|did) ({NAME}) \w+ (now|at first)\?", question).groups()
    values = said.get(name, [None])
    return values[-1 if when == "now" else 0]


def from_files(documents, question):
    values = {}
    for title, text in documents:
        file = title.removeprefix("File ")
        for name, thing in re.findall(rf"let (\w+) = ({THING});", text):
            values[file, name] = thing
        for other, name in re.findall(rf"from ({NAME}) import (\w+);", text):
            values[file, name] = values.get((other, name))
    name, file = re.fullmatch(rf"What is (\w+) in ({NAME})\?", question).groups()
    return values.get((file, name))


def from_examples(documents, question):
    word = re.fullmatch(r"Input: (\w+)\. Output\?", question)[1]
    found = re.findall(rf"Input: {word}\. Output: ({THING}) or ({THING})\.", " ".join(text for _, text in documents))
    outputs = set.intersection(*map(set, found)) if found else ()
    return next(iter(outputs)) if len(outputs) == 1 else None


def from_conversation(documents, question):
    asked, said = None, {}
    for speaker, text in documents:
        if found := re.search(r"What do you (\w+)\?", text):
            asked = found[1]
        elif found := re.search(rf"\bA ({THING})\.", text):
            said[speaker, asked] = found[1]
    return said.get(re.fullmatch(rf"What does ({NAME}) (\w+)\?", question).groups())


def from_order(documents, question):
    came = re.findall(rf"({NAME}) came with a ({THING})\.", " ".join(text for _, text in documents))
    found = re.fullmatch(
        rf"(Who came|What had the one who came) (right after|right before|first|last) ?({NAME})?\?", question
    )
    what, where, name = found.groups()
    names = [who for who, _ in came]
    if name and name not in names:
        return None
    places = {"first": 0, "last": len(came) - 1}
    place = places[where] if where in places else names.index(name) + (1 if where == "right after" else -1)
    return came[place][what.startswith("What")] if 0 <= place < len(came) else None


READERS = {
    "alone": from_facts,
    "pronoun": from_facts,
    "description": from_facts,
    "table": from_table,
    "amendment": from_changes,
    "import": from_files,
    "examples": from_examples,
    "conversation": from_conversation,
    "order": from_order,
    "cut": from_parts,
}


def asked(family, hops=None, split="test", count=60):
    """Documents and questions of `count` worlds."""
    for seed in range(count):
        rng = random.Random(f"{family}/{seed}")
        world = LEANING[family].make(rng, split, rng.randint(2, 20), 0.3)
        assert world.single_hop, "every world has a question"
        for question in world.single_hop + world.two_hop:
            if hops in (None, question.hops):
                yield world.documents, question


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("family", LEANING)
def test_answerable_from_all_documents(family, split):
    for documents, question in asked(family, split=split):
        assert READERS[family](documents, question.text) == question.answer, (documents, question)


@pytest.mark.parametrize(("family", "hops"), PAIRS)
def test_gold_documents_are_enough(family, hops):
    found = list(asked(family, hops))
    assert len(found) > 50
    for documents, question in found:
        gold = [documents[index] for index in sorted(question.gold)]
        assert READERS[family](gold, question.text) == question.answer, (gold, question)


def test_controls_need_one_document():
    """It states the answer, and no other document does."""
    for documents, question in asked("alone", 1):
        answers = [from_facts([document], question.text) for document in documents]
        assert [index for index, answer in enumerate(answers) if answer] == list(question.gold)


@pytest.mark.parametrize(("family", "hops"), [pair for pair in PAIRS if pair != ("alone", 1)])
def test_others_need_several_documents(family, hops):
    """Read alone, each document gives no answer, a wrong one, or one that others contradict."""
    for documents, question in asked(family, hops):
        answers = {READERS[family]([document], question.text) for document in documents} - {None}
        assert answers != {question.answer}, (documents, question)
        assert len(question.gold) > 1


@pytest.mark.parametrize("family", LEANING)
def test_order_of_documents(family):
    """It matters exactly where documents lean on their neighbours."""
    changed = [
        READERS[family](documents[::-1], question.text) != question.answer for documents, question in asked(family)
    ]
    assert any(changed) == (family not in ("alone", "examples"))


@pytest.mark.parametrize("family", LEANING)
def test_held_out(family):
    """The two splits share no names and no things."""
    for split, other in (("train", "test"), ("test", "train")):
        texts = [" ".join((question.text, question.answer)) for _, question in asked(family, split=split)]
        texts += [f"{title}\n{text}" for documents, _ in asked(family, split=split) for title, text in documents]
        pairs = {pair for text in texts for pair in re.findall(r"(?=\b(\w+ \w+)\b)", text)}
        assert pairs & {*things(split), *people(split)}
        assert not pairs & {*things(other), *people(other)}


def test_things_are_made_of_known_words():
    words = {split: {word for thing in things(split) for word in thing.split()} for split in ("train", "test")}
    assert words["test"] < words["train"] and len(things("test")) > 60


@pytest.mark.parametrize("family", LEANING)
def test_deterministic(family):
    assert list(asked(family, count=3)) == list(asked(family, count=3))


@pytest.mark.parametrize("split", ["train", "test"])
def test_files(tmp_path, monkeypatch, split):
    """A file for each kind, in the form of the real question sets, with the right answers."""
    arguments = ["--count", "3", "--documents", "4", "6", "--split", split, "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["", *arguments])
    leaning.main()
    assert len(list(tmp_path.iterdir())) == len(PAIRS)
    for path in tmp_path.iterdir():
        family = path.stem.removesuffix("-2-hop")
        for question in read_questions(path):
            documents = [chunk.strip().split("\n", 1) for chunk in question.chunks]
            assert question.id.startswith(split) and question.group == path.stem and 2 < len(documents) < 8
            asks = question.closing.removeprefix("Question: ").removesuffix("\nAnswer:")
            assert [READERS[family](documents, asks)] == question.answers
