"""Why chunks of the last prompts were not cached: what is known of the same chunk, or of one that is nearly the same.

No text is kept, but fingerprints of the chunks that were used last, by tenant. A prompt whose chunks are all cached and
known costs a look for each; others are examined after their answers, one chunk at a time.
"""

import asyncio
import hashlib
import logging
from array import array
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sglang_lazy.chunks.catalog import MIN_DIGITS
from sglang_lazy.serving.fingerprints import ENDS, NORMALIZATIONS, Fingerprint, TokenTexts, fingerprint
from sglang_lazy.serving.server import Server

MAX_CHUNKS, MAX_MISSES, MAX_TERMS = 10_000, 20_000, 8
"""How many chunks, misses, and conditions of a chunk to remember: 40 MB in all."""
BACKLOG = 1 << 20
"""How many tokens of chunks may wait to be examined, which takes a fifth of a second. Of others nothing is learnt."""

_LIKE = "chunk {like} was used before, and has the same text but for "
_SIMILAR = "chunk {like} was used before, and has much of the same text, but "
WORDS = {
    "computing": "another prompt was computing it at the same time",
    "deleted": "it was deleted, and this prompt is the first with it since then",
    "evicted": "it was cached before, and is no longer: it was evicted or flushed, or this rank has never had it",
    "adapter": "it was cached with another LoRA adapter, or with none",
    "preamble": "it was cached behind another preamble, or none: the prompts' policies or leading texts differ",
    "tenant": "another tenant has it, and tenants share nothing",
    "white space": _LIKE + "white space at its ends",
    "spacing": _LIKE + "white space",
    "case": _LIKE + "upper and lower case",
    "numbers": _LIKE + "numbers or dates",
    "beginning": _SIMILAR + "another beginning",
    "end": _SIMILAR + "another end",
    "both ends": _SIMILAR + "another beginning and end, as a template around a text makes them",
    "inside": _SIMILAR + "other words inside",
    "new": "no chunk like it was used before",
    "unknown": "the server has not looked: too many new chunks came at a time, or too many since",
}
"""Reasons, and what they mean."""

logger = logging.getLogger(__name__)


class Terms(NamedTuple):
    """The conditions of a chunk's KV besides its tenant.

    adapter: its id, None without one.  preamble: a policy's.  lead: a hash of the leading text if that is the preamble.
    """

    adapter: str | None = None
    preamble: str = "none"
    lead: bytes = b""

    @classmethod
    def of(cls, adapter: str | None, preamble: str, lead: Sequence[int]) -> "Terms":
        """lead: the tokens before the first chunk."""
        digest = hashlib.blake2b(array("q", lead), digest_size=8).digest() if preamble == "lead" else b""
        return cls(adapter, preamble, digest)


class Answered(NamedTuple):
    """A prompt with chunks that has been answered.

    rid: None if nobody will ask about it.  tenant: `tenant_of` its namespace.  input_ids: its tokens.
    chunks: its chunk report.  began, ended: seconds since the epoch.
    """

    rid: str | None
    tenant: Hashable
    terms: Terms
    input_ids: Sequence[int]
    chunks: Sequence[Mapping[str, Any]]
    began: float
    ended: float


class Miss(NamedTuple):
    """Why a chunk was not cached.

    reason: one of `WORDS`.  like: the id of the chunk that is nearly the same, None without one.
    elsewhere: whether another tenant has used it, which its own tenant must not learn.
    """

    reason: str
    like: str | None = None
    elsewhere: bool = False


class _Known:
    """A chunk that prompts have used.  since: when it was computed first, by its conditions."""

    __slots__ = ("deleted", "name", "print", "since")

    def __init__(self, name: str, made: Fingerprint):
        self.name, self.print = name, made
        self.since, self.deleted = dict[Terms, float](), False

    def add(self, terms: Terms, now: float) -> None:
        self.deleted = False
        self.since.setdefault(terms, now)
        if len(self.since) > MAX_TERMS:
            del self.since[next(iter(self.since))]

    def reason(self, terms: Terms, began: float) -> str:
        """Why a prompt that began then did not find it."""
        if terms not in self.since:
            return "preamble" if any(one.adapter == terms.adapter for one in self.since) else "adapter"
        if self.since[terms] >= began:
            return "computing"
        return "deleted" if self.deleted else "evicted"


class Misses:
    """What is known of the chunks of the last prompts."""

    def __init__(self, server: Server):
        self._server = server
        self._texts: TokenTexts | None = None
        self._known: OrderedDict[tuple[Hashable, str], _Known] = OrderedDict()
        self._owners: OrderedDict[str, Hashable] = OrderedDict()  # the last tenant that has used a chunk
        self._alike: dict[int, _Known] = {}  # by the hashes of their texts and windows
        self._misses: OrderedDict[tuple[Hashable, str], dict[str, Miss]] = OrderedDict()  # by tenant and rid, and chunk
        self._num_misses = 0
        self._waiting, self._num_waiting = deque[Answered](), 0
        self._work = self._examine()
        self._busy: asyncio.AbstractEventLoop | None = None  # the event loop that examines chunks now

    def note(self, prompt: Answered) -> None:
        """Have a prompt's chunks examined, if they are missing or not known. Called in the event loop."""
        known, tenant = self._known, prompt.tenant
        chunks = [chunk for chunk in prompt.chunks if not chunk["hit"] or (tenant, chunk["id"]) not in known]
        if not chunks:
            return
        size = sum(chunk["tokens"] for chunk in chunks)
        if self._num_waiting + size > BACKLOG:
            return
        self._waiting.append(prompt._replace(chunks=chunks))
        self._num_waiting += size
        if self._busy is not (loop := asyncio.get_running_loop()):
            self._busy = loop
            loop.call_soon(self._step, loop)

    def forget(self, tenant: str | None, names: Iterable[str]) -> None:
        """Chunks have been deleted.  names: their ids, or more digits of their digests."""
        for name in names:
            if (known := self._known.get((tenant, name[:MIN_DIGITS]))) is not None:
                known.deleted = True

    async def of(self, tenant: Hashable, rid: str) -> Mapping[str, Miss]:
        """Why chunks of a prompt were not cached, by their ids; empty if that is not known."""
        while any((one.tenant, one.rid) == (tenant, rid) for one in self._waiting):
            next(self._work)
            await asyncio.sleep(0)
        return self._misses.get((tenant, rid), {})

    # No task: an `Engine` runs its event loop only during calls, and would leave it pending at the end.
    def _step(self, loop: asyncio.AbstractEventLoop) -> None:
        """Examine one chunk, and have the next one examined once requests have had their turn."""
        if self._busy is not loop:
            return
        if not self._waiting:
            self._busy = None
            return
        next(self._work)
        loop.call_soon(self._step, loop)

    def _examine(self) -> Iterator[None]:
        """Examine the chunks of the prompts that wait, one at a time. A prompt waits until all of its are examined.
        Continued only while any waits."""
        while True:
            prompt = self._waiting[0]
            found: dict[str, Miss] = {}
            new: list[_Known] = []  # nothing of this prompt was used before it
            for chunk in prompt.chunks:
                try:
                    miss = self._learn(prompt, chunk, new)
                    if not chunk["hit"]:
                        found.setdefault(chunk["id"], miss)
                except Exception:  # whatever a model's own tokenizer may do
                    logger.exception("sglang-lazy: chunk %s could not be examined", chunk["id"])
                yield
            for known in new:
                self._alike |= dict.fromkeys(known.print.parts, known)
            self._waiting.popleft()
            self._num_waiting -= sum(chunk["tokens"] for chunk in prompt.chunks)
            if prompt.rid is not None and found:
                self._remember((prompt.tenant, prompt.rid), found)
            yield  # until there is another prompt

    def _remember(self, prompt: tuple[Hashable, str], found: dict[str, Miss]) -> None:
        self._num_misses += len(found) - len(self._misses.pop(prompt, ()))
        self._misses[prompt] = found
        while self._num_misses > MAX_MISSES:
            self._num_misses -= len(self._misses.popitem(last=False)[1])

    def _learn(self, prompt: Answered, chunk: Mapping[str, Any], new: list[_Known]) -> Miss:
        """Remember a chunk. Returns why it was missing, if it was.  new: it is added there if it is."""
        name, key = chunk["id"], (prompt.tenant, chunk["id"])
        elsewhere = self._owners.get(name, prompt.tenant) != prompt.tenant
        known = self._known.get(key)
        if known is not None:
            miss = Miss(known.reason(prompt.terms, prompt.began), None, elsewhere)
            self._known.move_to_end(key)
        else:
            tokens = prompt.input_ids[chunk["offset"] : chunk["offset"] + chunk["tokens"]]
            made = fingerprint(prompt.tenant, tokens, self._text(tokens))
            miss = Miss(*self._nearest(made), elsewhere)
            known = self._known[key] = _Known(name, made)
            new.append(known)
        known.add(prompt.terms, prompt.ended)
        self._owners[name] = prompt.tenant
        self._owners.move_to_end(name)
        if len(self._owners) > MAX_CHUNKS:
            self._owners.popitem(last=False)
        if len(self._known) > MAX_CHUNKS:
            _, oldest = self._known.popitem(last=False)
            for part in oldest.print.parts:
                if self._alike.get(part) is oldest:
                    del self._alike[part]
        return miss

    def _text(self, input_ids: Sequence[int]) -> str | None:
        tokenizer = self._server.tokenizer
        if tokenizer is None:
            return None
        if self._texts is None or self._texts.tokenizer is not tokenizer:
            self._texts = TokenTexts(tokenizer)
        return self._texts.text(input_ids)

    def _nearest(self, made: Fingerprint) -> tuple[str, str | None]:
        """What a new chunk is nearly the same as: the reason, and the other chunk's id."""
        for difference, part in zip(NORMALIZATIONS, made.texts, strict=False):
            if (found := self._alike.get(part)) is not None:
                return difference, found.name
        windows = set(made.windows)
        alike = {known for part in made.windows if (known := self._alike.get(part)) is not None}
        # Each window leads to the last chunk that has it, which may have no other, but boilerplate of its owner's.
        best = max(alike, key=lambda known: len(windows.intersection(known.print.windows)), default=None)
        if best is None or len(windows.intersection(best.print.windows)) < max(2, len(windows) // 4):
            return "new", None
        return ENDS[best.print.head == made.head, best.print.tail == made.tail], best.name
