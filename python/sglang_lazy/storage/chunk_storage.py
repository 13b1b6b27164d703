"""Chunks in one of SGLang's storage backends, the tier below the host, under names that cover all their KV depends on.

SGLang's own storage names what it stores by tokens only, one object per token at page size 1, so it would mix up
weights, dtypes and namespaces.
"""

import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

import torch

from sglang_lazy.cache.host import HostKV
from sglang_lazy.cache.host_copy import HostWatcher
from sglang_lazy.cache.node import Node
from sglang_lazy.chunks.catalog import CachedChunk
from sglang_lazy.chunks.store import ChunkStore
from sglang_lazy.core.keys import ChunkKey
from sglang_lazy.core.prompt import ChunkSlice
from sglang_lazy.storage.calls import Calls, Ended
from sglang_lazy.storage.chunk_objects import ChunkObjects
from sglang_lazy.storage.report import StorageReport

logger = logging.getLogger(__name__)


class Patience(NamedTuple):
    """How long requests wait for a chunk, in seconds.

    policy: SGLang's `--hicache-storage-prefetch-policy`.
    base, per_ki_token: with `timeout`, for each chunk, and for each 1,024 tokens that are being read with it.
    max: the most of both together; no call of the backend is waited for any longer, whoever waits.
    """

    policy: Literal["best_effort", "timeout", "wait_complete"]
    base: float
    per_ki_token: float
    max: float

    def for_tokens(self, num_tokens: int) -> float:
        """For a chunk with which so many tokens are being read, its own among them."""
        linear = min(self.max, self.base + self.per_ki_token * num_tokens / 1024)
        return {"best_effort": 0.0, "timeout": linear, "wait_complete": math.inf}[self.policy]


class Fetch(NamedTuple):
    """The read of a chunk from storage.

    slots: of the host, where its KV goes.  state: that where its state goes, None without states.
    asked_at: when the read was requested.  patience: how many seconds requests wait for it.
    """

    chunk: ChunkSlice
    slots: torch.Tensor
    state: torch.Tensor | None
    asked_at: float
    patience: float


class ChunkStorage(HostWatcher):
    """Storage below the host tier: chunks copied to the host are stored as well, and those found in no other tier are
    fetched. A chunk that arrives when nobody waits for it any more is put on the host if it is still missing there.

    One of `host`'s watchers. All tensor-parallel ranks make the same calls.

    identity: returns a digest of the weights that KV depends on: the model's for None, else those of the adapter with
        this id; None if it is not loaded. Called again after each reset. Hashing the model reads all its weights, so it
        is done at once and by `identify`.
    agree: returns the smallest of each of these numbers among all ranks.
    clock: returns seconds.
    objects: None once storage has been detached.
    name: of the backend in SGLang's reports.
    """

    def __init__(
        self,
        store: ChunkStore,
        host: HostKV,
        objects: ChunkObjects,
        identity: Callable[[str | None], bytes | None],
        agree: Callable[[list[int]], list[int]],
        report: StorageReport,
        patience: Patience,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.objects: ChunkObjects | None = objects
        self.name = objects.backend.name
        self.report, self.patience, self.clock = report, patience, clock
        self._store, self._host, self._identity, self._agree = store, host, identity, agree
        self._states = host.states
        self._identified: dict[str | None, bytes | None] = {}
        self._late: dict[ChunkKey, Fetch] = {}
        self._num_writing = self._num_fetching = 0  # tokens
        self._behind = False
        self.identify()

    def identify(self) -> None:
        """Hash the model, unless that has been done since the last reset."""
        if self.objects is not None and None not in self._identified:
            self._identified[None] = self._identity(None)

    def mix_weights(self) -> None:
        """Store and fetch nothing until the next reset: the cache may have KV of other weights than the model's."""
        self._identified.clear()
        self._identified[None] = None

    def reset(self) -> None:
        """End what is under way. To be called before the tree is emptied: what is being written is protected there."""
        if self.objects is not None:
            self._drop_reads(self.objects)
            self._settle(self.objects)
        self._identified.clear()

    def detach(self) -> None:
        """Use storage no more. No request may run."""
        if (objects := self.objects) is None:
            return
        self._drop_reads(objects)
        self._settle(objects)
        self.objects = None
        objects.stop()
        objects.backend.close()

    def clear(self) -> bool:
        """Delete all that is in storage; returns whether that succeeded on all ranks. Reads in progress find nothing.
        Chunks that other tiers have stay there, and are stored when they are used again."""
        if (objects := self.objects) is None or not objects.backend.can_clear:
            return False
        self._drop_reads(objects)
        objects.written.cancel()
        settled, cleared = self._settle(objects), objects.backend.clear()
        self._agree([cleared])  # wait for all: another rank may have deleted a file first
        done = self._agree([settled and (cleared or objects.backend.clear())])
        for chunk in self._store.catalog:
            chunk.stored = None
        return all(done)

    def _drop_reads(self, objects: ChunkObjects) -> None:
        """Forget the reads in progress."""
        if self._num_fetching:
            objects.drop_reads()
        for fetch in self.fetches:
            self._free(fetch)
        self._store.fetching.clear()
        self._late.clear()
        self._num_fetching, self._behind = 0, False

    def _settle(self, objects: ChunkObjects) -> bool:
        """Finish the writes in progress, for as long as the backend makes progress, and forget the others. Returns
        whether there were no others."""
        settled = self._agree([objects.written.settle(self.patience.max)])
        self._take_written(objects)
        if all(settled):
            return True
        for _, node, num_tokens in (lost := objects.drop_writes()):
            self._let_go(node, num_tokens)
        self.report.unstored(len(lost))
        logger.error("sglang-lazy: the storage backend does not answer; %d chunks are not stored", len(lost))
        return False

    # From storage

    def fetch(self, chunk: ChunkSlice) -> bool:
        """Start reading a chunk that no other tier has; returns whether it is on its way to the host."""
        if self.objects is None:
            return False
        if chunk.key in self._store.fetching or chunk.key in self._late:
            return True
        if self._behind:
            return False
        name = self._name(chunk.key)
        if name is None or not self._may_hold(self._num_fetching + chunk.num_tokens, len(self.objects.read) + 1):
            return False
        if (slots := self._host.alloc(chunk.num_tokens)) is None:
            return False
        state = None if self._states is None else self._states.alloc()
        if state is None and self._states is not None:
            self._host.free(slots)
            return False
        self._num_fetching += len(slots)
        patience = self.patience.for_tokens(self._num_fetching + self._num_like_states(len(self.objects.read) + 1))
        self._store.fetching[chunk.key] = Fetch(chunk, slots, state, self.clock(), patience)
        self.objects.start_read(name, slots, state, chunk.key)
        return True

    def _num_like_states(self, count: int) -> int:
        """The number of tokens whose KV is as large as so many states."""
        return 0 if self._states is None else count * self._states.memory.token_bytes // self._host.memory.token_bytes

    def _free(self, fetch: Fetch) -> None:
        self._host.free(fetch.slots)
        if self._states is not None and fetch.state is not None:
            self._states.memory.slots.free(fetch.state)

    def poll(self) -> None:
        """Take the results that all ranks have. To be called at each step, after the host's."""
        if self.objects is None:
            return
        if self._num_writing:
            self._take_written(self.objects)
        if self._num_fetching:
            for call in self._ended(self.objects.read):
                fetch = self._late.pop(call.what, None) or self._store.fetching.pop(call.what)
                self._end_fetch(fetch, call)
        if self._store.fetching:
            self._stop_waiting(self.objects)
        if self._behind:
            self._behind = not all(self._agree([self.objects.read.can_run]))

    def _end_fetch(self, fetch: Fetch, call: Ended) -> None:
        self._num_fetching -= len(fetch.slots)
        wait = self.clock() - fetch.asked_at
        if call.succeeded:
            self.report.fetched(len(fetch.slots), call.seconds, wait)
        else:
            self.report.missed(wait)
        chunk, node = fetch.chunk, None
        if call.succeeded:
            node = self._host.adopt(chunk.tokens, chunk.key.namespace, fetch.slots, fetch.state)
        if node is None:  # or the tree has the chunk's beginning without a copy
            self._free(fetch)
        else:
            self._store.adopt(chunk, node).stored = True

    def _stop_waiting(self, objects: ChunkObjects) -> None:
        """Let requests compute the chunks that they have waited for long enough, on any rank."""
        now, fetches = self.clock(), list(self._store.fetching.items())
        waits = self._agree([now - fetch.asked_at < fetch.patience for _, fetch in fetches])
        late = [key for (key, _), still in zip(fetches, waits, strict=True) if not still]
        for key in late:
            self._late[key] = self._store.fetching.pop(key)
            self.report.late()
        if late and self.patience.policy == "timeout":
            objects.read.abandon(late)
            self._behind = True  # if no thread is left

    # To storage

    def copied(self, node: Node) -> None:
        chunk = self._store.chunk_at(node)
        if chunk is not None and not chunk.stored and self._host.reads(node):
            self._write(chunk, node)

    def back_up(self, nodes: Iterable[Node]) -> None:
        """Store what `nodes` have been used for: chunks that were copied to the host as beginnings of longer ones,
        before they were chunks themselves."""
        for node in nodes:
            chunk = self._store.chunk_at(node)
            if chunk is not None and chunk.stored is None and self._host.is_complete(node):
                self._write(chunk, node)

    def _write(self, chunk: CachedChunk, node: Node) -> None:
        if self.objects is None:
            return
        chunk.stored = False
        slots, name = self._host.slots_to(node), self._name(chunk.key)
        if name is None or not self._may_hold(self._num_writing + len(slots), len(self.objects.written) + 1):
            self.report.unstored()
            return
        self._host.protect(node)
        self._num_writing += len(slots)
        self.objects.start_write(name, slots, node.host.state, (chunk, node, len(slots)))

    def _take_written(self, objects: ChunkObjects) -> None:
        for call in self._ended(objects.written):
            chunk, node, num_tokens = call.what
            chunk.stored = call.succeeded
            self._let_go(node, num_tokens)
            if call.succeeded:
                self.report.stored(num_tokens, call.seconds)
            else:
                self.report.unstored()

    def _let_go(self, node: Node, num_tokens: int) -> None:
        self._host.release(node)
        self._num_writing -= num_tokens

    # Both

    @property
    def fetches(self) -> list[Fetch]:
        """The reads in progress."""
        return [*self._late.values(), *self._store.fetching.values()]

    def _may_hold(self, num_tokens: int, num_chunks: int) -> bool:
        """Whether reads may hold so many tokens of the host, and as many states as chunks, and writes as well: half of
        it, as in SGLang. A backend that hangs must not take all of it."""
        most = self._host.memory.slots.size // 2
        return num_tokens <= most and (self._states is None or num_chunks <= self._states.memory.slots.size // 2)

    def _ended(self, calls: Calls) -> list[Ended]:
        """The results that all ranks have; one succeeded if it did on all ranks. Ranks make the same requests in the
        same order."""
        calls.relieve(self.patience.max)
        if not all(self._agree([calls.num_ended])):
            return []
        return calls.take(self._agree(calls.outcomes()))

    def _name(self, key: ChunkKey) -> bytes | None:
        """SHA-256 of all that the chunk's KV depends on; of an adapter the weights, since ids and names do not last.
        None if the adapter has been unloaded."""
        kind, _, salt, variant, adapter = key.namespace
        digest = hashlib.sha256()
        for weights in (None,) if adapter is None else (None, adapter):
            if weights not in self._identified:
                self._identified[weights] = self._identity(weights)
            identified = self._identified[weights]
            if identified is None:
                return None
            digest.update(identified)
        digest.update(repr((kind, key.namespace.own_key, salt, variant)).encode() + key.tokens + key.check)
        return digest.digest()
