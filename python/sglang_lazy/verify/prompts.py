"""The prompt template of retrieval questions, and their file format; examples and benchmarks use them, too."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

INSTRUCTION = "Answer the question from the documents.\n\n"


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield line numbers, from 1, and the objects on these lines. Raises ValueError, naming the file and the line."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    with file:
        for number, line in enumerate(file, start=1):
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {number}: not JSON: {error}") from None
            if not isinstance(value, dict):
                raise ValueError(f"{path}, line {number}: expected an object, got {type(value).__name__}")
            yield number, value


def document_text(doc: Mapping[str, str]) -> str:
    """A retrieved document, formatted for a prompt."""
    return f"{doc['title']}\n{doc['text']}\n\n"


def question_text(request: Mapping[str, Any]) -> str:
    """A retrieval request's question, formatted for a prompt."""
    return f"Question: {request['question']}\nAnswer:"


def earlier_exchanges(history: Any) -> list[str]:
    """Each earlier question of a chat with its answer, formatted like the question that follows.

    history: messages, each with `role` and `text`. Raises ValueError if it has another structure, or unless user and
    agent alternate and the agent is last.
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
    return [f"{question_text({'question': question})} {answer}\n\n" for question, answer in exchanges]


def retrieval_segments(retrieval: Mapping[str, Any]) -> list[dict[str, str]]:
    """The prompt of a retrieval request: an instruction, one text per earlier exchange, one chunk per document, and the
    question.

    retrieval: `docs`, each with `title` and `text`; `question`; and in a chat `history`, see `earlier_exchanges`.
    Raises ValueError if it has another structure.
    """
    history = [{"type": "text", "text": exchange} for exchange in earlier_exchanges(retrieval.get("history", []))]
    try:
        texts = [retrieval["question"], *(doc[key] for doc in retrieval["docs"] for key in ("title", "text"))]
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("not a string")
        documents = [{"type": "chunk", "text": document_text(doc)} for doc in retrieval["docs"]]
        question = {"type": "text", "text": question_text(retrieval)}
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a request with docs, each with title and text, and question: {error!r}") from None
    return [{"type": "text", "text": INSTRUCTION}, *history, *documents, question]
