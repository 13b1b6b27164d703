"""Serves chunks from a tree with a host tier and storage below it, without a scheduler."""

import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from fakes.host_tree import Device, Tree, check
from fakes.storage import Storage
from sglang_lazy.chunks.store import ChunkState, ChunkStore
from sglang_lazy.core.keys import Namespace, as_int32, chunk_key
from sglang_lazy.core.prompt import ChunkSlice
from sglang_lazy.port.cache.storage import TensorBackend
from sglang_lazy.storage.chunk_objects import ChunkObjects
from sglang_lazy.storage.chunk_storage import ChunkStorage, Patience
from sglang_lazy.storage.report import StorageReport

A, B, C, D = (range(i, i + 4) for i in (1, 5, 9, 12))
_PLACES = {
    ChunkState.MISSING: None,
    ChunkState.FETCHING: "on its way",
    ChunkState.HOST: "host",
    ChunkState.LOADING: "device",
    ChunkState.RESIDENT: "device",
}
PATIENCE = Patience("timeout", base=2.0, per_ki_token=0.1, max=30.0)


def chunk_of(tokens: Iterable[int], **namespace: Any) -> ChunkSlice:
    ids = array("q", tokens)
    key = chunk_key(as_int32(ids), Namespace(**{"kind": "chunk", "extra_key": None, "cache_salt": None, **namespace}))
    return ChunkSlice(key, 0, ids, 0, len(ids), ((0, len(ids)),))


class Prompt(NamedTuple):
    """What a prompt refers to, and what storage was asked for when it came."""

    chunks: list[ChunkSlice]
    fetched: list[bool]


class Server:
    """Everything is checked after each step.

    num_states: of recurrent layers, on the device.
    slow: whether steps are taken while storage has not answered.  now: the time.
    """

    num_states = 0

    def __init__(
        self,
        storage: Storage,
        *,
        size: int = 60,
        host_size: int = 120,
        min_hits: int = 0,
        patience: Patience = PATIENCE,
        agree: Callable[[list[int]], list[int]] = lambda numbers: numbers,
        num_states: int | None = None,
        **weights: bytes | None,
    ):
        self.num_states = self.num_states if num_states is None else num_states
        self.tree = Tree(size, host_size, self.num_states, min_hits=min_hits, agree=agree)
        self.chunks = ChunkStore(self.tree, Device(self.tree), states=self.tree.states)
        self.slow, self.now = False, 0.0
        self.report, self.weights = StorageReport(token_size=1), {None: weights.pop("model", b"model"), **weights}
        states = None if self.tree.host.states is None else self.tree.host.states.memory
        objects = ChunkObjects(TensorBackend(storage), self.tree.memory, states)
        self.identified: list[str | None] = []
        self.storage = ChunkStorage(
            self.chunks, self.tree.host, objects, self._identity, agree, self.report, patience, lambda: self.now
        )
        self.tree.host.watchers.append(self.storage)
        self.chunks.host, self.chunks.storage = self.tree.host, self.storage

    def _identity(self, adapter: str | None) -> bytes | None:
        self.identified.append(adapter)
        return self.weights[adapter]

    def ask(self, *texts: Iterable[int], **namespace: Any) -> Prompt:
        """A prompt comes."""
        chunks = [chunk_of(tokens, **namespace) for tokens in texts]
        return Prompt(chunks, [self.chunks.find(chunk) is None and self.chunks.fetch(chunk) for chunk in chunks])

    def states(self, prompt: Prompt) -> list[str | None]:
        """Where each chunk is now."""
        return [_PLACES[self.chunks.state(chunk)] for chunk in prompt.chunks]

    def answer(self, prompt: Prompt) -> list[str | None]:
        """Compute a prompt once nothing is waited for; returns where each chunk was."""
        deadline = time.monotonic() + 60
        while "on its way" in self.states(prompt):
            assert time.monotonic() < deadline, "it hangs"
            self.step()
        found = [
            "storage" if state == "host" and fetched else state
            for state, fetched in zip(self.states(prompt), prompt.fetched, strict=True)
        ]
        self.compute(prompt.chunks)
        self.settle()
        return found

    def compute(self, chunks: Sequence[ChunkSlice]) -> None:
        """Have chunks on the device, and begin to copy them."""
        nodes = []
        for chunk in chunks:
            if (node := self.chunks.find(chunk)) is None:
                node = self.tree.compute(chunk.tokens, chunk.key.namespace)
                self.chunks.adopt(chunk, node)
            else:
                assert node.slots is not None or self.tree.host.load([node])
                self.tree.use(node, 0)
            self.tree.lock(node)
            nodes.append(node)
        for node in nodes:
            self.tree.unlock(node)
        self.chunks.back_up(nodes)

    def settle(self) -> None:
        """Step until nothing is being copied."""
        self.step()
        while self.tree.host.is_copying:
            self.step()

    def step(self) -> None:
        if not self.slow and self.storage.objects is not None:
            _finish(self.storage.objects)
        self.tree.host.poll()
        self.storage.poll()
        self.check()

    def check(self) -> None:
        fetches = self.storage.fetches
        held_states = [fetch.state for fetch in fetches if fetch.state is not None]
        check(self.tree, [fetch.slots for fetch in fetches], held_states)

    def served(self, *texts: Iterable[int], **namespace: Any) -> list[str | None]:
        return self.answer(self.ask(*texts, **namespace))

    def warm(self, *texts: Iterable[int]) -> None:
        """Have chunks on the device, the host and in storage."""
        for tokens in texts:
            self.served(tokens)
        self.step()

    def evict(self) -> None:
        """Empty the device."""
        self.tree.evict(self.tree.num_evictable)

    def flush(self) -> None:
        self.storage.reset()
        self.tree.reset()
        self.tree.allocator.clear()
        self.chunks.reset()
        self.check()

    def numbers(self) -> dict[str, int]:
        return self.report.numbers()

    @property
    def num_protected(self) -> int:
        """Tokens whose copies storage keeps."""
        return sum(len(node) for node in self.tree.nodes() if node.host is not None and node.host.readers)


def storage_with(*texts: Iterable[int], storage: Storage | None = None) -> Storage:
    """Storage (a new one by default) in which an earlier server has left these chunks."""
    storage = storage or Storage()
    server = Server(storage)
    server.warm(*texts)
    server.flush()
    return storage


def _finish(objects: ChunkObjects) -> None:
    """Wait for all calls. A flush would cancel some once one has failed."""
    deadline = time.monotonic() + 60
    while any(calls.num_ended < len(calls) for calls in (objects.written, objects.read)):
        assert time.monotonic() < deadline, "storage does not answer"
        time.sleep(1e-4)
