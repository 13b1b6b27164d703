"""What a picker needs of requests and answers, read from their JSON."""

import hashlib
import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

from sglang_lazy.routing.block_hashes import BlockHashes
from sglang_lazy.serving.blocks import BLOCKS

_PROMPTS = ("segments", "system", "messages", "input")
"""Fields of bodies in which chunks stand."""
_CHUNKS = ("chunk", *BLOCKS)
TOKENS_INSIDE = "packet"
"""The policy that puts tokens of the model's own into chunks."""
NAMED_SIZE = 4000
"""What a chunk that is named by its id counts, whose length nobody here knows: as so many characters."""


def chunks_in(body: Any, hashes: BlockHashes | None = None) -> list[tuple[Hashable, int]]:
    """The chunks of a request in the order of its prompt, each with its size in characters.

    body: the JSON of `/generate` or of an OpenAI or Anthropic route. Equal chunks, of one tenant and adapter, have
    equal names. Chunks made of plain text (`chunk_separator`, `chunk_roles`) are not seen, and whatever is malformed is
    left to the server to refuse.
    hashes: names those that KV events tell of as these do.
    """
    if not isinstance(body, Mapping) or body.get("link") == "full":
        return []
    namespace = _namespace(body)
    blocks = [
        (hashlib.blake2b(_text((namespace, block)).encode(), digest_size=16).digest(), block)
        for field in _PROMPTS
        for block in _blocks(body.get(field))
    ]
    names = {} if hashes is None or any(namespace) else hashes.of(dict(blocks))
    return [(names.get(digest, digest), _size(block)) for digest, block in blocks]


def _namespace(body: Mapping[str, Any]) -> tuple[Any, ...]:
    """What beside its tokens a chunk's KV depends on. All are false for one that is anybody's and computed alone."""
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
            yield {key: part for key, part in value.items() if key != "cache_control"}
        else:
            yield from _blocks(value.get("content"))


def _size(block: Mapping[str, Any]) -> int:
    if "id" in block:
        return NAMED_SIZE
    text = block.get("text")
    return len(text) if isinstance(text, str) else len(_text(block))


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def hits_by_chunk(chunks: Sequence[tuple[Hashable, int]], line: bytes) -> dict[Hashable, bool]:
    """Which of a request's chunks were cached, as a line of its answer says: all of the JSON, or an event of a stream.

    chunks: what `chunks_in` gave. Empty if the line says nothing, or not of these: answers to batches are passed over.
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
    """The reports on chunks in an answer, one for each of its samples."""
    if isinstance(answer, list):
        for element in answer:
            yield from _reports(element)
    elif isinstance(answer, Mapping):
        meta_info = answer.get("meta_info")
        if isinstance(meta_info, Mapping) and isinstance(meta_info.get("chunks"), list):
            yield meta_info["chunks"]
        yield from _reports(answer.get("choices"))
