"""Prompts made of segments of token ids, and the two forms in which they are sent."""

import random

from benchmark.serving.models import ORDINARY_TOKENS


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return rng.choices(ORDINARY_TOKENS, k=count)


def chunk(tokens: list[int]) -> dict:
    return {"type": "chunk", "input_ids": tokens}


def text(tokens: list[int]) -> dict:
    return {"type": "text", "input_ids": tokens}


def as_chunks(segments: list[dict]) -> dict:
    return {"segments": segments}


def as_plain(segments: list[dict]) -> dict:
    """The same tokens as one plain prompt."""
    return {"input_ids": [token for segment in segments for token in segment["input_ids"]]}
