"""Questions over documents: generated ones, real sets as JSON lines, and files in LongBench's format.

A real set has `docs` (each with `title` and `text`), `question`, `answers` and, in a chat, `history` on each line.
LongBench (Bai et al., 2023) has `input`, `context`, `answers` and `dataset`; a context is cut into its own passages
if it has any, and otherwise into pieces of equal length. No part of a context is dropped or reordered.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from research.quality.rouge import rouge_l
from research.quality.worlds import records
from sglang_lazy.verify.prompts import INSTRUCTION, question_text, read_json_lines, retrieval_segments
from sglang_lazy.verify.scores import f1

Score = Callable[[str, list[str]], float]

SUMMARISE = "Write a one-page summary of the documents.\n\n"
WORDS_PER_CHUNK = 300


@dataclasses.dataclass(frozen=True)
class Question:
    """A prompt and its correct answers.

    group: of questions averaged together. history: earlier exchanges, between the opening and the chunks. score: f1, or
    rouge_l for summaries.
    """

    id: str
    group: str
    opening: str
    chunks: list[str]
    closing: str
    answers: list[str]
    score: Score = f1
    max_new_tokens: int = 32
    history: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Task:
    """A LongBench dataset: its score, its limit on new tokens, and whether its context has passages."""

    score: Score
    max_new_tokens: int
    passages: bool = False


LONGBENCH = {
    "narrativeqa": Task(f1, 128),
    "qasper": Task(f1, 128),
    "multifieldqa_en": Task(f1, 64),
    "hotpotqa": Task(f1, 32, passages=True),
    "2wikimqa": Task(f1, 32, passages=True),
    "musique": Task(f1, 32, passages=True),
    "gov_report": Task(rouge_l, 512),
    "qmsum": Task(rouge_l, 512),
    "multi_news": Task(rouge_l, 512, passages=True),
}
_PASSAGE = re.compile(r"^(?=Passage \d+:\n)", re.MULTILINE)


def generated(count: int, hops: int, seed: int = 0) -> Iterator[Question]:
    """Held-out questions of the kind the small model is trained on."""
    for record in records(seed, "test", count, hops):
        yield from_documents(record, record["type"])


def read_questions(path: Path, limit: int | None = None) -> list[Question]:
    """The first `limit` questions of a file in either format, named by its name or by LongBench's.

    Raises ValueError naming the file and the line if a record has neither format, a dataset not in LONGBENCH, no
    answers, or a document without text.
    """
    questions = []
    for number, record in islice(read_json_lines(path), limit):
        try:
            if "docs" in record:
                question = from_documents(record, path.stem)
            else:
                question = from_longbench(record)
            if not question.answers or not all(question.chunks):
                raise ValueError("there must be answers, and no document may be empty")
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: in neither format: {error!r}") from None
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        questions.append(question)
    return questions


def from_documents(record: dict, group: str) -> Question:
    segments = retrieval_segments(record)
    opening, *history, closing = (segment["text"] for segment in segments if segment["type"] == "text")
    documents = [segment["text"] for segment in segments if segment["type"] == "chunk"]
    name = str(record.get("id", record["question"]))
    return Question(name, group, opening, documents, closing, record["answers"], history=tuple(history))


def from_longbench(record: dict) -> Question:
    dataset = record["dataset"].removesuffix("_e")
    task = LONGBENCH.get(dataset)
    if task is None:
        raise ValueError(f"unknown dataset {dataset!r}: expected one of {', '.join(LONGBENCH)}")
    chunks = split_passages(record["context"]) if task.passages else split_words(record["context"], WORDS_PER_CHUNK)
    if task.score is rouge_l:
        opening, closing = SUMMARISE, f"{record['input']}\n" * bool(record["input"]) + "Summary:"
    else:
        opening, closing = INSTRUCTION, question_text({"question": record["input"]})
    name = str(record.get("_id", record["input"]))
    return Question(name, dataset, opening, chunks, closing, record["answers"], task.score, task.max_new_tokens)


def split_passages(context: str) -> list[str]:
    """The pieces that begin with a line like "Passage 3:", each up to the next; text before the first is a piece too.

    The last piece gets the line break that separates it from the question.
    """
    pieces = [piece for piece in _PASSAGE.split(context) if piece]
    return [*pieces[:-1], pieces[-1].rstrip("\n") + "\n\n"]


def split_words(context: str, count: int) -> list[str]:
    """Pieces of `count` words, including white space; the last one ends like a passage."""
    words = re.findall(r"\s*\S+", context)
    pieces = ["".join(words[start : start + count]) for start in range(0, len(words), count)]
    return [*pieces[:-1], pieces[-1] + "\n\n"]
