"""The sample of retrieval questions as prompts made of text and chunks."""

import json
from pathlib import Path

SAMPLE = Path(__file__).parent / "data" / "2wiki_sample.jsonl"
INSTRUCTION = "Answer the question from the documents.\n\n"


def load_sample() -> list[dict]:
    """The requests of the sample: `docs`, each with `title` and `text`, and `question`."""
    return [json.loads(line) for line in SAMPLE.read_text(encoding="utf-8").splitlines()]


def document_text(doc: dict) -> str:
    return f"{doc['title']}\n{doc['text']}\n\n"


def question_text(request: dict) -> str:
    return f"Question: {request['question']}\nAnswer:"


def to_segments(request: dict) -> list[dict]:
    """The prompt as `/generate` takes it: an instruction, one chunk per document, the question."""
    return [
        {"type": "text", "text": INSTRUCTION},
        *({"type": "chunk", "text": document_text(doc)} for doc in request["docs"]),
        {"type": "text", "text": question_text(request)},
    ]


def without_chunks(segments: list[dict]) -> list[dict]:
    """The same prompt, token for token, in which every segment is ordinary text."""
    return [{**segment, "type": "text"} for segment in segments]


def all_texts(requests: list[dict]) -> list[str]:
    """Every text of `requests`, to train a tokenizer on."""
    documents = {doc["id"]: document_text(doc) for request in requests for doc in request["docs"]}
    return [INSTRUCTION, *documents.values(), *map(question_text, requests)]
