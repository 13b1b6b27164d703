"""Loaders of question files, on made-up lines."""

import dataclasses
import json

import pytest

from research.quality.questions import generated, read_questions, split_passages, split_words
from research.quality.rouge import rouge_l
from sglang_lazy.verify.prompts import INSTRUCTION, retrieval_segments
from sglang_lazy.verify.scores import f1

PASSAGES = "Passage 1:\nAda\nAda was born in 1815.\nPassage 2:\nBob\nBob likes passage 3: rice.\n"


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def longbench(**fields):
    return {"input": "When?", "context": PASSAGES, "answers": ["1815"], "dataset": "hotpotqa", "_id": "a", **fields}


def test_documents(tmp_path):
    docs = [{"title": "Ada", "text": "Ada was born in 1815."}, {"title": "Bob", "text": "Bob likes rice."}]
    path = write(tmp_path / "set.jsonl", *({"docs": docs, "question": "When?", "answers": ["1815"]},) * 3)
    questions = read_questions(path, 2)
    assert len(questions) == 2
    question = questions[0]
    assert (question.group, question.id, question.score) == ("set", "When?", f1)
    assert question.opening == INSTRUCTION and question.closing == "Question: When?\nAnswer:"
    assert question.chunks == ["Ada\nAda was born in 1815.\n\n", "Bob\nBob likes rice.\n\n"]
    assert question.history == ()


def test_documents_in_a_chat(tmp_path):
    """Earlier turns stand between the instruction and the documents, as in `sglang_lazy.verify`."""
    history = [{"role": "user", "text": "Who?"}, {"role": "agent", "text": "Ada."}]
    record = {"docs": [{"title": "Ada", "text": "Born in 1815."}], "question": "When?", "answers": ["1815"]}
    plain, chat = read_questions(write(tmp_path / "set.jsonl", record, {**record, "history": history}))
    assert chat == dataclasses.replace(plain, history=("Question: Who?\nAnswer: Ada.\n\n",))
    texts = [chat.opening, *chat.history, *chat.chunks, chat.closing]
    assert texts == [segment["text"] for segment in retrieval_segments({**record, "history": history})]


def test_longbench(tmp_path):
    context = "one two\nthree " * 400
    path = write(
        tmp_path / "file.jsonl",
        longbench(),
        longbench(dataset="qasper_e", context=context),
        longbench(dataset="gov_report", context=context, input="", answers=["A report."]),
    )
    passages, pieces, summary = read_questions(path)
    assert (passages.group, pieces.group, summary.group) == ("hotpotqa", "qasper", "gov_report")
    assert [chunk.split("\n")[1] for chunk in passages.chunks] == ["Ada", "Bob"]
    assert "".join(passages.chunks) == PASSAGES + "\n"
    assert len(pieces.chunks) == 4 and "".join(pieces.chunks).split() == context.split()
    assert (passages.score, pieces.score, summary.score) == (f1, f1, rouge_l)
    assert (passages.max_new_tokens, pieces.max_new_tokens, summary.max_new_tokens) == (32, 128, 512)
    assert summary.closing == "Summary:" and "summary" in summary.opening


def test_split():
    """What precedes the first passage is kept; words keep their white space."""
    assert split_passages("Note.\n" + PASSAGES)[0] == "Note.\n"
    assert split_passages("no passage at all") == ["no passage at all\n\n"]
    assert split_words(" a b\n\nc  d e", 2) == [" a b", "\n\nc  d", " e\n\n"]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"question": "?"}, "line 1: in neither format: KeyError\\('dataset'\\)"),
        (longbench(dataset="trec"), "line 1: unknown dataset 'trec': expected one of narrativeqa"),
        (longbench(answers=[]), "line 1: there must be answers"),
        (
            {"docs": [{"title": "x"}], "question": "?", "answers": ["x"]},
            "line 1: not a request with docs, .* KeyError\\('text'\\)",
        ),
        (
            {"docs": [], "question": "?", "answers": ["x"], "history": [{"role": "user", "text": "Who?"}]},
            "bad.jsonl, line 1: history must alternate user and agent, got user",
        ),
    ],
)
def test_errors(tmp_path, record, message):
    with pytest.raises(ValueError, match=message):
        read_questions(write(tmp_path / "bad.jsonl", record))


def test_generated():
    questions = list(generated(3, hops=2))
    assert questions == list(generated(3, hops=2)) and len({question.id for question in questions}) == 3
    assert {question.group for question in questions} == {"2-hop"}
