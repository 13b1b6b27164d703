"""Tokens that a model was trained to see around chunks: where they are stored, and prompts with and without them."""

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_lazy.core.policy import Policy, TrainedTokens
from sglang_lazy.serving.tokenization import TokenizedPrompt

FILE = "lazy_tokens.json"
"""A file in the model's folder that has, by policy name, an object with the fields of `TrainedTokens`."""


@functools.lru_cache(maxsize=8)
def load(model_path: str, vocab_size: int) -> Mapping[str, TrainedTokens]:
    """The trained tokens of a model, by policy; empty if it has none. Raises ValueError for a malformed file."""
    path = Path(model_path) / FILE
    if not path.is_file():
        return {}
    try:
        return {name: _parse(fields, vocab_size) for name, fields in json.loads(path.read_text()).items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{FILE} of the model: {error}") from error


def _parse(fields: Mapping[str, Any], vocab_size: int) -> TrainedTokens:
    for name, ids in fields.items():
        if not isinstance(ids, list) or any(type(token) is not int or not 0 <= token < vocab_size for token in ids):
            raise ValueError(f"{name} must be a list of token ids below {vocab_size}")
    return TrainedTokens(**{name: tuple(ids) for name, ids in fields.items()})


def tokens_for(policy: Policy, model_path: str, vocab_size: int) -> TrainedTokens:
    """The trained tokens of a model for `policy`. Raises ValueError if it has none."""
    trained = load(model_path, vocab_size).get(policy.name, TrainedTokens())
    if not any(policy.around(trained, 0)):
        raise ValueError(f"link {policy.name}: this model was not trained for it, its folder has no tokens in {FILE}")
    return trained


def add_trained_tokens(prompt: TokenizedPrompt, policy: Policy, trained: TrainedTokens) -> TokenizedPrompt:
    """`prompt` with the tokens of `policy` around each chunk."""
    ids: list[int] = []
    chunks, position = [], 0
    for i, (start, end) in enumerate(prompt.chunks):
        before, behind, link = policy.around(trained, i)
        ids += prompt.input_ids[position:start]
        chunk_start = len(ids)
        ids += [*before, *prompt.input_ids[start:end], *behind]
        chunks.append((chunk_start, len(ids)))
        ids += link
        position = end
    return TokenizedPrompt(ids + prompt.input_ids[position:], tuple(chunks))


def remove_trained_tokens(
    input_ids: Sequence[int], chunks: Sequence[tuple[int, int]], policy: Policy, trained: TrainedTokens
) -> TokenizedPrompt:
    """The inverse of `add_trained_tokens`."""
    ids: list[int] = []
    bare, position = [], 0
    for i, (start, end) in enumerate(chunks):
        before, behind, link = policy.around(trained, i)
        ids += input_ids[position:start]
        chunk_start = len(ids)
        ids += input_ids[start + len(before) : end - len(behind)]
        bare.append((chunk_start, len(ids)))
        position = end + len(link)
    return TokenizedPrompt([*ids, *input_ids[position:]], tuple(bare))
