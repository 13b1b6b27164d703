"""Prompts to compare answers on: segments, or retrieved documents and a question; gold answers where there are any."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sglang_lazy.core.segments import parse_segments

INSTRUCTION = "Answer the question from the documents.\n\n"


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt: its segments as a request carries them, and its gold answers, possibly none."""

    segments: list[dict[str, Any]]
    answers: tuple[str, ...] = ()


def parse_prompt(value: Any) -> Prompt:
    """The prompt in a line of a file. Raises ValueError for anything that is none, or that has nothing to compare."""
    if not isinstance(value, Mapping):
        raise ValueError(f"an object with segments, or with docs and question, is needed, got {type(value).__name__}")
    if "segments" in value:
        segments = parse_segments(value["segments"])
    elif value.keys() >= {"docs", "question"}:
        segments = parse_segments(retrieval_segments(value))
    else:
        raise ValueError("there are neither segments nor docs and question")
    if not any(segment.is_chunk for segment in segments):
        raise ValueError("there is no chunk in it, so both ways are the same")
    if segments[-1].is_chunk:
        raise ValueError(
            "it ends with a chunk: end it with text, as the beginning of the answer is then read in context"
        )
    answers = value.get("answers") or ()
    if not isinstance(answers, list | tuple) or not all(isinstance(answer, str) for answer in answers):
        raise ValueError("answers must be a list of strings")
    return Prompt([_to_request(segment) for segment in segments], tuple(answers))


def _to_request(segment: Any) -> dict[str, Any]:
    content = {"input_ids": list(segment.input_ids)} if segment.text is None else {"text": segment.text}
    return {"type": segment.kind, **content}


def read_prompts(path: Path) -> Iterator[dict[str, Any]]:
    """The prompts on the lines of a JSON Lines file. Raises ValueError that names the file and the line."""
    for number, value in read_json_lines(path):
        try:
            parse_prompt(value)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        yield value


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers from 1, and the objects on these lines. Raises ValueError that names the file and the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    for number, line in enumerate(lines, start=1):
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not JSON: {error}") from None
        if not isinstance(value, dict):
            raise ValueError(f"{path}, line {number}: an object is needed, got {type(value).__name__}")
        yield number, value


def document_text(doc: Mapping[str, str]) -> str:
    """A retrieved document as it stands in a prompt."""
    return f"{doc['title']}\n{doc['text']}\n\n"


def question_text(request: Mapping[str, Any]) -> str:
    """A retrieval request's question as it stands in a prompt."""
    return f"Question: {request['question']}\nAnswer:"


def earlier_exchanges(history: Any) -> list[str]:
    """Each earlier question of a chat with its answer, in the form of the question to come.

    history: messages, each with `role` and `text`. Raises ValueError for another shape, and unless user and agent take
    turns and the agent is last.
    """
    if not isinstance(history, list | tuple):
        raise ValueError(f"history must be a list, got {type(history).__name__}")
    try:
        roles = [message["role"] for message in history]
        texts = [message["text"] for message in history]
    except (KeyError, TypeError) as error:
        raise ValueError(f"history must be messages, each with role and text: {error!r}") from None
    if roles != ["user", "agent"] * (len(roles) // 2):
        raise ValueError(f"history must alternate user and agent, got {', '.join(map(str, roles))}")
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("the text of a message in history must be a string")
    exchanges = zip(texts[::2], texts[1::2], strict=True)
    return [f"{question_text({'question': asked})} {answer}\n\n" for asked, answer in exchanges]


def retrieval_segments(request: Mapping[str, Any]) -> list[dict[str, str]]:
    """The prompt of a retrieval request: an instruction, one text per earlier exchange, one chunk per document, the
    question.

    request: `docs`, each with `title` and `text`, `question`, and in a chat `history`, as `earlier_exchanges` takes it.
    Raises ValueError for another shape.
    """
    history = [{"type": "text", "text": exchange} for exchange in earlier_exchanges(request.get("history", []))]
    try:
        documents = [{"type": "chunk", "text": document_text(doc)} for doc in request["docs"]]
        question = {"type": "text", "text": question_text(request)}
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a request with docs, each with title and text, and question: {error!r}") from None
    return [{"type": "text", "text": INSTRUCTION}, *history, *documents, question]
