"""Chunks registered ahead of use: each is computed by a request of its own, whose answer nobody reads."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from sglang_lazy.core.keys import chunk_id, tokens_digest
from sglang_lazy.core.segments import PromptLayout, parse_segment
from sglang_lazy.policies import get_policy
from sglang_lazy.serving.requests import check_cache_salt, choose_link, tokenize, with_trained_tokens

MAX_CHUNKS = 1000
"""Of one registration."""
_AT_ONCE = 32
"""How many chunks of one registration stand in the queue together, so that others do not wait behind all of them."""


def parse_registration(manager: Any, body: Any, salt: str | None) -> tuple[list[list[int]], str]:
    """The tokens of each chunk, and the policy that they are for, in the body of a registration.

    body: `chunks`, a list of texts or of objects with `text` or `input_ids`, and `link`. Raises ValueError, naming the
    chunk, on bad input.
    """
    if not isinstance(body, Mapping):
        raise ValueError("the body must be an object")
    if unknown := sorted(body.keys() - {"chunks", "link", "cache_salt", "lora_path", "wait", "pin", "ttl"}):
        raise ValueError(f"unknown field {unknown[0]!r}")
    chunks = body.get("chunks")
    if not isinstance(chunks, list) or not 1 <= len(chunks) <= MAX_CHUNKS:
        raise ValueError(f"chunks must be a list of 1 to {MAX_CHUNKS} texts or objects")
    if not isinstance(body.get("lora_path"), str | None):
        raise ValueError("lora_path must be the name of an adapter")
    if not isinstance(body.get("wait", False), bool):
        raise ValueError("wait must be true or false")
    check_cache_salt(salt)
    link = choose_link(body.get("link"))
    policy = get_policy(link)
    if not policy.reuses:
        raise ValueError(f"link {link!r} computes no chunks: name another")
    if policy.preamble == "lead":
        raise ValueError(f"link {link!r}: its chunks depend on the prompt, so they cannot be computed ahead")
    return [_tokens(manager, index, chunk, salt, link) for index, chunk in enumerate(chunks)], link


def _tokens(manager: Any, index: int, chunk: Any, salt: str | None, link: str) -> list[int]:
    value = {"type": "chunk", "text": chunk} if isinstance(chunk, str) else chunk
    if isinstance(value, Mapping):
        value = {"type": "chunk", **value}
    try:
        segment = parse_segment(value, manager.model_config.vocab_size)
        if not segment.is_chunk:
            raise ValueError("expected a chunk")
        prompt = with_trained_tokens(manager, tokenize(manager, [segment], salt), link)
    except ValueError as error:
        raise ValueError(f"chunks[{index}]: {error}") from None
    ((start, end),) = prompt.chunks
    return prompt.input_ids[start:end]


def prompt_for(tokens: Sequence[int], link: str, salt: str | None) -> tuple[list[int], PromptLayout]:
    """The prompt that has a chunk computed as `link` wants it: the chunk, and a token of text."""
    base = "base" if get_policy(link).preamble == "neutral" else "block"
    return [*tokens, tokens[-1]], PromptLayout(((0, len(tokens)),), salt, base)


async def compute(
    chunks: Sequence[Sequence[int]], run: Callable[[Sequence[int]], Awaitable[None]]
) -> tuple[list[str], list[dict[str, str]]]:
    """Have `run` compute each distinct chunk; the ids of those that it did, and the others with their errors."""
    gate = asyncio.Semaphore(_AT_ONCE)

    async def one(tokens: Sequence[int]) -> str | None:
        async with gate:
            try:
                await run(tokens)
            except ValueError as error:
                return str(error)
        return None

    errors = await asyncio.gather(*map(one, chunks))
    ids = [chunk_id(tokens_digest(tokens)) for tokens in chunks]
    done = [name for name, error in zip(ids, errors, strict=True) if error is None]
    return done, [{"id": name, "reason": error} for name, error in zip(ids, errors, strict=True) if error is not None]
