"""Prompts to compare answers on: segments, or retrieved documents and a question; optionally gold answers."""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sglang_lazy.core.segments import parse_segments
from sglang_lazy.verify.prompts import read_json_lines, retrieval_segments


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt: its segments as a request carries them, and its gold answers, possibly none."""

    segments: list[dict[str, Any]]
    answers: tuple[str, ...] = ()


def parse_prompt(value: Any) -> Prompt:
    """The prompt in a line of a file. Raises ValueError if it is not a prompt or has nothing to compare."""
    if not isinstance(value, Mapping):
        raise ValueError(f"expected an object with segments, or with docs and question, got {type(value).__name__}")
    if "segments" in value:
        segments = parse_segments(value["segments"])
    elif value.keys() >= {"docs", "question"}:
        segments = parse_segments(retrieval_segments(value))
    else:
        raise ValueError("there are neither segments nor docs and question")
    if not any(segment.is_chunk for segment in segments):
        raise ValueError("it has no chunk, so both policies are the same")
    if segments[-1].is_chunk:
        raise ValueError("it ends with a chunk: end it with text, as the last token of a prompt is always contextual")
    answers = value.get("answers") or ()
    if not isinstance(answers, list | tuple) or not all(isinstance(answer, str) for answer in answers):
        raise ValueError("answers must be a list of strings")
    return Prompt([_to_request(segment) for segment in segments], tuple(answers))


def _to_request(segment: Any) -> dict[str, Any]:
    content = {"input_ids": list(segment.input_ids)} if segment.text is None else {"text": segment.text}
    return {"type": "chunk" if segment.is_chunk else "text", **content}


def read_prompts(path: Path) -> Iterator[dict[str, Any]]:
    """The prompts in a JSON Lines file. Raises ValueError, naming the file and the line."""
    for number, value in read_json_lines(path):
        try:
            parse_prompt(value)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        yield value
