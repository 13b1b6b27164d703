"""Reads the chunks of requests, and hits in answers, from JSON bodies."""

import hashlib
import itertools
import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

from sglang_lazy.core.labels import LABEL_KEYS
from sglang_lazy.routing.block_hashes import BlockHashes
from sglang_lazy.serving.blocks import BLOCKS

_PROMPTS = ("segments", "system", "messages", "input")
"""Fields of bodies that may contain chunks."""
_CHUNKS = ("chunk", *BLOCKS)
_NOT_OF_THE_TEXT = LABEL_KEYS | {"cache_control"}
TOKENS_INSIDE = "packet"
"""The policy that puts trained tokens into chunks."""
MOST = 4096
"""The most chunks of a request to look at: servers refuse far fewer, and other requests would wait."""
NAMED_SIZE = 4000
"""Assumed size, in characters, of a chunk given by id, whose length is unknown here."""


def chunks_in(body: Any, hashes: BlockHashes | None = None) -> list[tuple[Hashable, int]]:
    """The chunks of a request in the order of its prompt, each with its size in characters.

    Equal chunks of one tenant and adapter have equal names. Chunks made from plain text (`chunk_separator`,
    `chunk_roles`) are not seen; malformed bodies, and those with more than `MOST` chunks, are left to the server.

    body: the JSON of `/generate` or of an OpenAI or Anthropic route.
    hashes: to name chunks as KV events do.
    """
    if not isinstance(body, Mapping) or body.get("link") == "full":
        return []
    namespace = _namespace(body)
    found = list(itertools.islice((block for field in _PROMPTS for block in _blocks(body.get(field))), MOST + 1))
    if len(found) > MOST:
        return []
    blocks = [(hashlib.blake2b(_text((namespace, block)).encode(), digest_size=16).digest(), block) for block in found]
    names = {} if hashes is None or any(namespace) else hashes.of(dict(blocks))
    return [(names.get(digest, digest), _size(block)) for digest, block in blocks]


def _namespace(body: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a chunk's KV depends on besides its tokens. All false for a shared chunk that is computed alone."""
    adapter = body.get("lora_path") or str(body.get("model")).partition(":")[2]
    first, _, rest = str(body.get("link")).partition("+")
    preamble = first if first.startswith("base") else None
    with_tokens_inside = (rest or first).partition(":")[0] == TOKENS_INSIDE
    return (body.get("cache_salt"), body.get("extra_key"), adapter, preamble, with_tokens_inside)


def _blocks(value: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, list):
        for element in value:
            yield from _blocks(element)
    elif isinstance(value, Mapping):
        if value.get("type") in _CHUNKS:
            yield {key: part for key, part in value.items() if key not in _NOT_OF_THE_TEXT}
        else:
            yield from _blocks(value.get("content"))
            yield from _blocks(value.get("output"))  # of a function, in the Responses API


def _size(block: Mapping[str, Any]) -> int:
    if "id" in block:
        return NAMED_SIZE
    text = block.get("text")
    return len(text) if isinstance(text, str) else len(_text(block))


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def hits_by_chunk(chunks: Sequence[tuple[Hashable, int]], line: bytes) -> dict[Hashable, bool]:
    """Which of a request's chunks were cached, according to a line of its answer: the whole JSON, or a stream's event.

    Empty if the line has no report on exactly these chunks, as in answers to batches.  chunks: from `chunks_in`.
    """
    if b'"chunks":' not in line:
        return {}
    try:
        answer = json.loads(line.removeprefix(b"data:"))
    except ValueError:
        return {}
    report = next(_reports(answer), ())
    if len(report) != len(chunks):
        return {}
    return {name: bool(one.get("hit")) for (name, _), one in zip(chunks, report, strict=True)}


def _reports(answer: Any) -> Iterator[list[dict[str, Any]]]:
    """The chunk reports in an answer, one per sample."""
    if isinstance(answer, list):
        for element in answer:
            yield from _reports(element)
    elif isinstance(answer, Mapping):
        meta_info = answer.get("meta_info")
        if isinstance(meta_info, Mapping) and isinstance(meta_info.get("chunks"), list):
            yield meta_info["chunks"]
        yield from _reports(answer.get("choices"))
