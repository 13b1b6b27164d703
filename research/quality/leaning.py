"""Worlds whose documents lean on one another: a sentence's meaning depends on an earlier document or on their order.

Each family makes a `World` of about `num_documents` documents in the order of a prompt. Facts have one form, so that
the kind of answer gives nothing away: a person does something with a thing ("Ada Holt keeps a crimson goat").

| family | what a document needs of others |
|---|---|
| alone | nothing: each sentence names its person; the control |
| pronoun | who "she" is, named one to three documents earlier |
| description | who "the baker" is: the last person introduced as a baker |
| table | the header, which names the columns |
| amendment | what was changed: corrections refer to the previous document, amendments to one long before |
| import | the file from which a file imports a name, directly or through another file |
| examples | other examples of the same input: each allows two outputs, all together only one |
| conversation | the question that it answers |
| order | its neighbours: who came after whom |
| cut | the preceding text: people and pronouns in one text, cut between random words |

Two-hop questions go through a person ("the teacher of ..."), a second import or a neighbour.

Names and things are split by a hash: those of test worlds do not occur in training worlds, though their parts do.

    python -m research.quality.leaning --count 100 --out worlds    # test questions, a file for each kind
    python -m research.quality.leaning --split train --out mine    # questions to train on
"""

import argparse
import dataclasses
import json
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import get_args

from research.quality.drafts import DISHES, TRADES, VERBS, Draft, Facts, filler, sizes
from research.quality.worlds import Make, Split, World, make_world, records


def alone(rng: random.Random, split: Split, num_documents: int, similar: float) -> World:
    draft = Draft(rng, split, num_documents, similar)
    facts: dict[str, Facts] = {}
    teachers = {}
    for index, name in enumerate(draft.people):
        facts[name] = {verb: (draft.thing(), [index]) for verb in draft.verbs(rng.randint(1, 2))}
        sentences = [f"{name} {verb} a {thing}." for verb, (thing, _) in facts[name].items()]
        if rng.random() < 0.5:
            teachers[name] = (rng.choice([other for other in draft.people if other != name]), [index])
            sentences.append(f"The teacher of {name} is {teachers[name][0]}.")
        draft.add(name, *sentences)
    draft.ask_about(facts, teachers)
    return draft.world


def pronoun(rng: random.Random, split: Split, num_documents: int, similar: float) -> World:
    lengths = sizes(rng, num_documents, 2, 4)
    draft = Draft(rng, split, len(lengths), similar)
    facts: dict[str, Facts] = {}
    teachers = {}
    for name, length in zip(draft.people, lengths, strict=True):
        pronoun, possessive = rng.choice((("She", "Her"), ("He", "His")))
        others = [other for other in draft.people if other != name]
        verbs = draft.verbs(length)
        first = draft.add("Note", f"{name} {verbs[0]} a {draft.thing()}.")
        facts[name] = {}
        for number, verb in enumerate(verbs[1:], start=1):
            thing = draft.thing()
            sentences = [f"{pronoun} {verb} a {thing}."]
            if others and number == length - 1 and rng.random() < 0.7:
                teachers[name] = (rng.choice(others), [first, first + number])
                sentences.append(f"{possessive} teacher is {teachers[name][0]}.")
            facts[name][verb] = (thing, [first, draft.add("Note", *sentences)])
    draft.ask_about(facts, teachers)
    return draft.world


def description(rng: random.Random, split: Split, num_documents: int, similar: float) -> World:
    lengths = sizes(rng, num_documents, 2, 6)
    draft = Draft(rng, split, num_documents, similar)
    trades = rng.sample(TRADES, 3)  # few, so that most recur
    people = iter(draft.people)
    facts: dict[str, Facts] = {}
    for length in lengths:
        count = min(length // 2, len(trades))
        introduced = {trade: next(people) for trade in rng.sample(trades, count)}
        where = {trade: draft.add("Note", f"{name} works as a {trade}.") for trade, name in introduced.items()}
        for _ in range(length - count):
            trade = rng.choice(list(introduced))
            known = facts.setdefault(introduced[trade], {})
            verb, thing = rng.choice([verb for verb in VERBS if verb not in known]), draft.thing()
            known[verb] = (thing, [where[trade], draft.add("Note", f"The {trade} {verb} a {thing}.")])
    draft.ask_about(facts, {})
    return draft.world


def table(rng: random.Random, split: Split, num_documents: int, similar: float) -> World:
    draft = Draft(rng, split, num_documents, similar)
    people = iter(draft.people)
    facts: dict[str, Facts] = {}
    for length in sizes(rng, num_documents, 2, 7):
        verbs = draft.verbs(3)
        header = draft.add("Table", f"Columns: name, {', '.join(verbs)}.")
        for name in (next(people) for _ in range(length - 1)):
            row = {verb: draft.thing() for verb in verbs}
            index = draft.add("Table", f"Row: {name}, {', '.join(row.values())}.")
            facts[name] = {verb: (thing, [header, index]) for verb, thing in row.items()}
    draft.ask_about(facts, {})
    return draft.world


def amendment(rng: random.Random, split: Split, num_documents: int, similar: float) -> World:
    """Everybody's first statement, then amendments; corrections follow either."""
    changes = rng.randint(1, max(1, num_documents // 4))
    count = max(1, num_documents - 2 * changes)
    draft = Draft(rng, split, count, similar)
    first, last = {}, {}
    verbs = {name: rng.choice(list(VERBS)) for name in draft.people}
    statements = [(name, f"{name} {verbs[name]} a {{}}.") for name in draft.people]
    statements += [(name, f"From now on {name} {verbs[name]} a {{}}.") for name in rng.choices(draft.people, k=changes)]
    corrected = set(rng.sample(range(len(statements)), min(changes, len(statements))))
    for number, (name, statement) in enumerate(statements):
        thing = draft.thing()
        last[name] = (thing, [draft.add("Note", statement.format(thing))])
        if number in corrected:
            thing = draft.thing()
            last[name] = (thing, [*last[name][1], draft.add("Note", f"The last note is wrong: it is a {thing}.")])
        first.setdefault(name, last[name])
    for name, (thing, gold) in last.items():
        before, needed = first[name]
        if thing != before:
            draft.ask(f"What does {name} {VERBS[verbs[name]]} now?", thing, [*needed, *gold])
            draft.ask(f"What did {name} {VERBS[verbs[name]]} at first?", before, [*needed, *gold])
        elif len(needed) > 1:
            draft.ask(f"What does {name} {VERBS[verbs[name]]} now?", thing, needed)
    return draft.world


def imports(rng: random.Random, split: Split, num_documents: int, similar: float) -> World:
    draft = Draft(rng, split, num_documents, similar)
    defined: list[tuple[str, str, str, list[int]]] = []  # file, name in it, value, the files needed to know it
    for index, file in enumerate(draft.people):
        lines, new = [], []
        if index == 0 or rng.random() < 0.4:
            for name in rng.sample(DISHES, 2):
                thing = draft.thing()
                lines.append(f"let {name} = {thing};")
                new.append((file, name, thing, [index]))
        else:
            other, name, thing, gold = rng.choice([one for one in defined if len(one[3]) < 3])
            lines.append(f"from {other} import {name};")
            new.append((file, name, thing, [*gold, index]))
            draft.ask(f"What is {name} in {file}?", thing, new[0][3], hops=len(gold))
        draft.add(f"File {file}", *lines)
        defined += new
    return draft.world if draft.world.single_hop else imports(rng, split, num_documents, similar)


def examples(rng: random.Random, split: Split, num_documents: int, similar: float) -> World:
    lengths = sizes(rng, num_documents, 2, 4)
    draft = Draft(rng, split, 1, similar)
    outputs = {word: draft.thing() for word in rng.sample(DISHES, len(lengths))}
    inputs = [word for word, length in zip(outputs, lengths, strict=True) for _ in range(length)]
    rng.shuffle(inputs)
    for word in inputs:
        either = rng.sample([outputs[word], draft.thing()], 2)
        draft.add("Example", f"Input: {word}. Output: {' or '.join(either)}.")
    for word, thing in outputs.items():
        first = inputs.index(word)
        draft.ask(f"Input: {word}. Output?", thing, (first, inputs.index(word, first + 1)))
    return draft.world


def conversation(rng: random.Random, split: Split, num_documents: int, similar: float) -> World:
    lengths = sizes(rng, num_documents // 2, 1, 4)  # number of questions, each with its answer
    draft = Draft(rng, split, 2 * len(lengths), similar)
    facts: dict[str, Facts] = {}
    for number, length in enumerate(lengths):
        speakers = draft.people[2 * number : 2 * number + 2]
        for name in speakers:
            facts[name] = {}
        for _ in range(length):
            asks, answers = rng.sample(speakers, 2)
            verb, thing = rng.choice([verb for verb in VERBS if verb not in facts[answers]]), draft.thing()
            asked = draft.add(asks, f"What do you {VERBS[verb]}?")
            facts[answers][verb] = (thing, [asked, draft.add(answers, f"A {thing}.")])
    draft.ask_about(facts, {})
    return draft.world


def order(rng: random.Random, split: Split, num_documents: int, similar: float) -> World:
    draft = Draft(rng, split, num_documents, similar)
    brought = [draft.thing() for _ in draft.people]
    for name, thing in zip(draft.people, brought, strict=True):
        draft.add("Note", f"{name} came with a {thing}.")
    everyone = range(num_documents)
    draft.ask("Who came first?", draft.people[0], everyone)
    draft.ask("Who came last?", draft.people[-1], everyone)
    for index, following in pairwise(everyone):
        name, after = draft.people[index], draft.people[following]
        draft.ask(f"Who came right after {name}?", after, (index, following))
        draft.ask(f"Who came right before {after}?", name, (index, following))
        draft.ask(f"What had the one who came right after {name}?", brought[following], (index, following), hops=2)
    return draft.world


def cut(rng: random.Random, split: Split, num_documents: int, similar: float) -> World:
    """Every question is about a fact that a cut separates from the name."""
    draft = Draft(rng, split, num_documents, similar)
    words: list[str] = []
    facts = []  # name, verb, thing, the index of the name's first word and of the thing's last one
    for name in draft.people:
        subject, start, pronoun = name, len(words), rng.choice(("She", "He"))
        for verb in draft.verbs(rng.randint(1, 3)):
            thing = draft.thing()
            words += f"{subject} {verb} a {thing}.".split()
            facts.append((name, verb, thing, start, len(words) - 1))
            words += filler(rng).split() if rng.random() < 0.5 else []
            subject = pronoun
    cuts = sorted(rng.sample(range(1, len(words)), num_documents - 1))
    for start, end in pairwise([0, *cuts, len(words)]):
        draft.world.documents.append(("Part", " ".join(words[start:end])))
    for name, verb, thing, start, end in facts:
        gold = range(sum(place <= start for place in cuts), sum(place <= end for place in cuts) + 1)
        if len(gold) > 1:
            draft.ask(f"What does {name} {VERBS[verb]}?", thing, gold)
    return draft.world if draft.world.single_hop else cut(rng, split, num_documents, similar)


@dataclasses.dataclass(frozen=True)
class Family:
    """make(rng, split, num_documents, similar) returns a world with single-hop questions, plus two-hop ones if `hops`
    has 2 and there are enough documents. num_documents is at least 2; `similar` is the share of people who share a
    first name or surname with another."""

    make: Make
    hops: tuple[int, ...] = (1,)


LEANING = {
    "alone": Family(alone, (1, 2)),
    "pronoun": Family(pronoun, (1, 2)),
    "description": Family(description),
    "table": Family(table),
    "amendment": Family(amendment),
    "import": Family(imports, (1, 2)),
    "examples": Family(examples),
    "conversation": Family(conversation),
    "order": Family(order, (1, 2)),
    "cut": Family(cut),
}
FAMILIES = {"people": Family(make_world, (1, 2)), **LEANING}


def kinds() -> Iterator[tuple[str, int, Make]]:
    """For each kind of question: its name, its hops, and the function that makes its worlds."""
    for name, family in LEANING.items():
        for hops in family.hops:
            yield f"{name}-{hops}-hop" if hops > 1 else name, hops, family.make


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="questions of each kind; default: %(default)s")
    parser.add_argument("--documents", type=int, nargs=2, default=(10, 20), metavar=("LEAST", "MOST"))
    parser.add_argument("--split", choices=get_args(Split), default="test", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="folder for the files")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name, hops, make in kinds():
        made = records(args.seed, args.split, args.count, hops, documents=tuple(args.documents), make=make)
        text = "".join(json.dumps(record) + "\n" for record in made)
        (args.out / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
