"""The sample of retrieval questions as prompts made of text and chunks."""

import json
from pathlib import Path

from sglang_lazy.verify.prompts import INSTRUCTION, document_text, question_text

SAMPLE = Path(__file__).parent / "data" / "2wiki_sample.jsonl"


def load_sample() -> list[dict]:
    """The requests of the sample: `docs`, each with `title` and `text`, and `question`."""
    return [json.loads(line) for line in SAMPLE.read_text(encoding="utf-8").splitlines()]


def without_chunks(segments: list[dict]) -> list[dict]:
    """The same prompt, token for token, in which every segment is ordinary text."""
    return [{**segment, "type": "text"} for segment in segments]


def all_texts(requests: list[dict]) -> list[str]:
    """Every text of `requests`, to train a tokenizer on."""
    documents = {doc["id"]: document_text(doc) for request in requests for doc in request["docs"]}
    return [INSTRUCTION, *documents.values(), *map(question_text, requests)]
