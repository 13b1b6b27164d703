"""Chunks registered ahead of use: each is computed by its own request, whose answer is discarded."""

import asyncio
import logging
from array import array
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from sglang_lazy.chunks.catalog import MIN_DIGITS
from sglang_lazy.core.keys import tokens_digest
from sglang_lazy.core.labels import Label
from sglang_lazy.core.policy import Policy
from sglang_lazy.core.segments import parse_segment
from sglang_lazy.policies import get_policy
from sglang_lazy.serving.plans import Plan
from sglang_lazy.serving.prompts import Prompts
from sglang_lazy.serving.salts import check_cache_salt
from sglang_lazy.serving.turns import Turns

MAX_CHUNKS = 1000
"""The maximum number of chunks in one registration."""
CAPACITY, MAX_REASON = 10_000, 500
"""The number of failures to remember, and the characters of each reason: 6 MB in all."""
AT_ONCE = 32
"""How many registered chunks a server has in its queue at a time."""
BACKLOG, PER_CHUNK = 1 << 25, 1000
"""How many tokens of registered chunks may wait in a server, and as how many tokens a chunk counts in addition, for
what goes with it: 200 MiB in all."""
RETRY_S = 5
"""After how many seconds to send a registration again that a server had no room for."""

logger = logging.getLogger(__name__)


class Busy(ValueError):
    """Too many registered chunks wait: answered with a 429."""


class Chunk(NamedTuple):
    """A chunk to be computed.  digest: `tokens_digest`, hexadecimal.  tokens: int32.  label: None without one."""

    digest: str
    tokens: array
    label: Label | None = None

    @property
    def id(self) -> str:
        return self.digest[:MIN_DIGITS]

    @property
    def title(self) -> str:
        """What the log calls it."""
        return f"{self.id} ({self.label.name})" if self.label and self.label.name else self.id

    @property
    def size(self) -> int:
        """What it takes of the backlog."""
        return PER_CHUNK + len(self.tokens)


class Registration(NamedTuple):
    """chunks: the distinct ones.  requested: how many there were.  policy: the one that they are for."""

    chunks: list[Chunk]
    requested: int
    policy: Policy


def parse_registration(prompts: Prompts, body: Any, salt: str | None) -> Registration:
    """The registration in the body of a request.

    body: `chunks`, a list of texts or of objects with `text` or `input_ids` and a label, and `link`. Raises ValueError,
    naming the chunk, on bad input.
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
    policy = prompts.policy(body.get("link"))
    if not policy.reuses:
        raise ValueError(f"link {str(policy)!r} computes no chunks: name another")
    if policy.preamble == "lead":
        raise ValueError(f"link {str(policy)!r}: its chunks depend on the prompt, so they cannot be computed ahead")
    read = [_chunk(prompts, index, chunk, salt, policy) for index, chunk in enumerate(chunks)]
    distinct = {chunk.digest: chunk for chunk in read} | {chunk.digest: chunk for chunk in read if chunk.label}
    return Registration([*distinct.values()], len(read), policy)


def _chunk(prompts: Prompts, index: int, chunk: Any, salt: str | None, policy: Policy) -> Chunk:
    value = {"type": "chunk", "text": chunk} if isinstance(chunk, str) else chunk
    if isinstance(value, Mapping):
        value = {"type": "chunk", **value}
    try:
        segment = parse_segment(value, prompts.server.vocab_size)
        if not segment.is_chunk:
            raise ValueError("expected a chunk")
        prompt = prompts.with_trained_tokens(prompts.tokenize([segment], salt), policy)
    except ValueError as error:
        raise ValueError(f"chunks[{index}]: {error}") from None
    ((start, end),) = prompt.chunks
    tokens = array("i", prompt.input_ids[start:end])
    return Chunk(tokens_digest(tokens).hex(), tokens, segment.label)


def prompt_for(tokens: Sequence[int], policy: Policy, salt: str | None) -> tuple[list[int], Plan]:
    """The prompt that computes a chunk as `policy` needs it: the chunk, and one token of text."""
    return [*tokens, tokens[-1]], Plan.of(((0, len(tokens)),), computing(policy), salt, ahead=True)


def computing(policy: Policy) -> Policy:
    """The policy that computes whole chunks as `policy` needs them, and recomputes nothing."""
    return get_policy("base" if policy.preamble == "neutral" else "block")


class Registrations:
    """The progress of registrations: the chunks that wait to be computed, and the last `capacity` failures.

    backlog: how much may wait, see `Chunk.size`. A tenant may have no more waiting than there is room left for others.
    """

    def __init__(self, capacity: int = CAPACITY, backlog: int = BACKLOG):
        self.capacity, self.backlog = capacity, backlog
        self._waiting: dict[tuple[str | None, str], list[str]] = {}  # digests, by tenant and id
        self._sizes: Counter[str | None] = Counter()  # of what waits, by tenant
        self._failed: OrderedDict[tuple[str | None, str], tuple[str, str]] = OrderedDict()  # digest and reason

    def begin(self, tenant: str | None, chunks: Sequence[tuple[str, int]]) -> None:
        """Record that chunks are to be computed, and forget earlier failures.  chunks: the digest and size of each.

        Raises Busy, and records none, if there is no room for them now, and ValueError if there never is.
        """
        size = sum(size for _, size in chunks)
        if 2 * size > self.backlog:
            raise ValueError("the chunks are too long for one registration: send fewer at a time")
        if self._sizes[tenant] + size > self.backlog - self._sizes.total() - size:
            raise Busy("too many registered chunks are waiting: try again later")
        self._sizes[tenant] += size
        for digest, _ in chunks:
            key = tenant, digest[:MIN_DIGITS]
            self._waiting.setdefault(key, []).append(digest)
            self._failed.pop(key, None)

    def end(self, tenant: str | None, digest: str, size: int, reason: str | None) -> None:
        """Record the end of a registration.  reason: why the chunk was not computed, or not pinned; None if it was."""
        key = tenant, digest[:MIN_DIGITS]
        self._waiting[key].remove(digest)
        if not self._waiting[key]:
            del self._waiting[key]
        self._sizes -= Counter({tenant: size})  # drops tenants without any
        if reason is not None:
            self._failed[key] = digest, reason[:MAX_REASON]
            if len(self._failed) > self.capacity:
                self._failed.popitem(last=False)

    def get(self, tenant: str | None, name: str) -> dict[str, str] | None:
        """The field `registration` of `GET /chunks/{id}`.  name: the chunk's id, or more digits of its digest."""
        key = tenant, name[:MIN_DIGITS]
        if any(digest.startswith(name) for digest in self._waiting.get(key, ())):
            return {"state": "waiting"}
        digest, reason = self._failed.get(key, ("", ""))
        return {"state": "failed", "reason": reason} if digest.startswith(name) else None

    def forget(self, tenant: str | None, name: str) -> bool:
        """Forget the failure of a chunk. Returns whether there was one."""
        key = tenant, name[:MIN_DIGITS]
        return self._failed.get(key, ("", ""))[0].startswith(name) and bool(self._failed.pop(key))


class WorkerRegistrations:
    """The registrations of a server, as used by one of several workers. If it ends, the ones it has begun fail."""

    def __init__(self, all_of_them: Registrations):
        self._all = all_of_them
        self._begun: Counter[tuple[str | None, str, int]] = Counter()
        self.get, self.forget = all_of_them.get, all_of_them.forget

    def begin(self, tenant: str | None, chunks: Sequence[tuple[str, int]]) -> None:
        self._all.begin(tenant, chunks)
        self._begun.update((tenant, *chunk) for chunk in chunks)

    def end(self, tenant: str | None, digest: str, size: int, reason: str | None) -> None:
        self._begun -= Counter([(tenant, digest, size)])
        self._all.end(tenant, digest, size, reason)

    def close(self) -> None:
        """Called when the worker has ended."""
        for begun in self._begun.elements():
            self._all.end(*begun, "the tokenizer worker that registered it has ended")


async def compute(
    chunks: Sequence[Chunk],
    run: Callable[[Sequence[int]], Awaitable[None]],
    progress: Registrations,
    tenant: str | None,
    turns: Turns,
) -> tuple[list[str], list[dict[str, str]]]:
    """Compute each of the chunks, which have begun, with `run`, in turn with those of other tenants.

    Returns the ids of those computed, and the others with reasons.  progress: records the end of each.
    """

    async def one(chunk: Chunk) -> str | None:
        reason: str | None = "an internal error: see the server's log"
        try:
            async with turns.turn(tenant):
                await run(chunk.tokens)
            reason = None
        except ValueError as error:
            reason = str(error)
            logger.warning("sglang-lazy: chunk %s could not be registered: %s", chunk.title, reason)
        finally:
            progress.end(tenant, chunk.digest, chunk.size, reason)
        return reason

    errors = await asyncio.gather(*map(one, chunks))
    ids = [chunk.id for chunk in chunks]
    done = [name for name, error in zip(ids, errors, strict=True) if error is None]
    return done, [{"id": name, "reason": error} for name, error in zip(ids, errors, strict=True) if error is not None]
