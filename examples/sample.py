"""Samples of retrieval questions, as prompts made of text and chunks."""

from pathlib import Path

from sglang_lazy.verify.prompts import read_json_lines

DATA = Path(__file__).parent / "data"
SAMPLE = DATA / "2wiki_sample.jsonl"
WORLDS = DATA / "worlds_sample.jsonl"
"""Questions that the trained model knows how to answer."""


def load_sample(path: Path = SAMPLE) -> list[dict]:
    """The requests of a sample: `docs`, each with `title` and `text`, `question` and `answers`."""
    return [request for _, request in read_json_lines(path)]


def without_chunks(segments: list[dict]) -> list[dict]:
    """The same prompt, token for token, with every segment as ordinary text."""
    return [{**segment, "type": "text"} for segment in segments]
