"""The samples of retrieval questions as prompts made of text and chunks."""

import json
from pathlib import Path

from sglang_lazy.verify.prompts import INSTRUCTION, document_text, question_text

DATA = Path(__file__).parent / "data"
SAMPLE = DATA / "2wiki_sample.jsonl"
WORLDS = DATA / "worlds_sample.jsonl"
"""Questions that the trained model knows how to answer."""


def load_sample(path: Path = SAMPLE) -> list[dict]:
    """The requests of a sample: `docs`, each with `title` and `text`, `question` and `answers`."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def without_chunks(segments: list[dict]) -> list[dict]:
    """The same prompt, token for token, in which every segment is ordinary text."""
    return [{**segment, "type": "text"} for segment in segments]


def all_texts(requests: list[dict]) -> list[str]:
    """Every text of `requests`, to train a tokenizer on."""
    documents = {doc["id"]: document_text(doc) for request in requests for doc in request["docs"]}
    return [INSTRUCTION, *documents.values(), *map(question_text, requests)]
