"""Keeps a picker informed by a worker's KV events (SGLang's `--kv-events-config`)."""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import aiohttp
import msgspec
import zmq
import zmq.asyncio
from yarl import URL

from sglang_lazy.routing.block_hashes import SAMPLE, BlockHashes
from sglang_lazy.serving.picker import Picker

RETRY_S = 2.0

logger = logging.getLogger(__name__)


# mypy does not know that msgspec structs take class arguments.
class _Event(msgspec.Struct, tag=True, gc=False):  # type: ignore[call-arg]
    """Base class of SGLang's events in their wire format; unknown fields are ignored."""


class BlockStored(_Event):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: Any
    block_size: int
    lora_id: Any
    medium: str | None = None


class BlockRemoved(_Event):
    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(_Event):
    pass


# As above.
class _Batch(msgspec.Struct, array_like=True):  # type: ignore[call-arg]
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    dp_rank: int | None = None


_decode = msgspec.msgpack.Decoder(_Batch).decode


class Listener:
    """Applies the messages of one worker to `picker`."""

    def __init__(self, worker: str, picker: Picker):
        self.worker, self.picker = worker, picker
        self._next: dict[int | None, int] = {}  # sequence numbers, which each rank counts by itself

    def take(self, message: Sequence[bytes]) -> None:
        """Apply a message. Raises ValueError or MsgspecError if it is malformed or out of sequence."""
        _, number, payload = message
        published, sequence = _decode(payload), int.from_bytes(number, "big")
        if sequence != self._next.get(published.dp_rank, sequence):
            raise ValueError(f"expected message {self._next[published.dp_rank]}, got {sequence}")
        self._next[published.dp_rank] = sequence + 1
        for event, after in itertools.pairwise([*published.events, None]):
            self._apply(event, after, published.dp_rank)

    def _apply(self, event: _Event | None, after: _Event | None, rank: int | None) -> None:
        """Apply one event. Of a chain of stored blocks only the last counts, since only there can a chunk end.

        after: the next event.
        """
        match event:
            case BlockStored(block_hashes=[*_, last], medium=medium):
                if not (isinstance(after, BlockStored) and (after.parent_block_hash, after.medium) == (last, medium)):
                    self.picker.stored(self.worker, (rank, medium), last)
            case BlockRemoved(block_hashes=names, medium=medium):
                self.picker.removed(self.worker, (rank, medium), names)
            case AllBlocksCleared():
                self.picker.forget(self.worker)


class _Publisher(NamedTuple):
    endpoints: list[str]
    topic: str


async def follow(worker: str, picker: Picker, hashes: BlockHashes) -> None:
    """Keep `picker` informed of what the server at the URL `worker` stores and removes, until cancelled.

    What it stored earlier is unknown. When it restarts or a message is lost, the picker forgets the worker. Logs an
    error and returns if the worker publishes no events, refuses to say where, or has another tokenizer.
    """
    while True:
        try:
            publisher = await _publisher(worker, hashes)
        except LookupError as error:
            logger.error("the KV events of %s are not followed: %s", worker, error)
            return
        except (TimeoutError, aiohttp.ClientError, ValueError) as error:
            logger.warning("%s does not report where it publishes KV events: %r", worker, error)
        else:
            reason = await _listen(publisher, Listener(worker, picker))
            logger.warning("the KV events of %s broke off: %s", worker, reason)
            picker.forget(worker)
        await asyncio.sleep(RETRY_S)


async def _publisher(worker: str, hashes: BlockHashes) -> _Publisher:
    """Where the worker publishes. Raises LookupError if its events are of no use."""
    timeout = aiohttp.ClientTimeout(total=60)  # a busy worker may take long to tokenize
    async with aiohttp.ClientSession(timeout=timeout) as session:
        published = (await _json(session.get(f"{worker}/server_info"))).get("kv_events")
        sample = {"prompt": SAMPLE, "add_special_tokens": False}
        tokens = (await _json(session.post(f"{worker}/tokenize", json=sample)))["tokens"]
    if published is None:
        raise LookupError("it publishes none; start it with --kv-events-config")
    if published["block_size"] != 1:
        raise LookupError(f"its blocks have {published['block_size']} tokens")
    if tokens != hashes.sample:
        raise LookupError("it has a different tokenizer")
    host, port = URL(worker).host_subcomponent, published["endpoint_port_base"]
    return _Publisher([f"tcp://{host}:{port + rank}" for rank in range(published["dp_size"])], published["topic"])


async def _json(request: contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]) -> Any:
    async with request as answer:
        if 400 <= answer.status < 500:
            raise LookupError(f"it answers {answer.url.path} with {answer.status}")
        answer.raise_for_status()
        return await answer.json()


async def _listen(publisher: _Publisher, listener: Listener) -> str:
    """Pass all messages to the listener until one is lost; returns the reason."""
    with _subscribed(publisher) as (socket, monitor):
        poller = zmq.asyncio.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        while True:
            ready = dict(await poller.poll())
            if socket in ready:
                try:
                    listener.take(await socket.recv_multipart())
                except (ValueError, msgspec.MsgspecError) as error:
                    return str(error)
            elif monitor in ready:
                return "the connection has ended"
            await asyncio.sleep(0)  # let others run during a backlog: polling one does not yield


@contextlib.contextmanager
def _subscribed(publisher: _Publisher) -> Iterator[tuple[zmq.asyncio.Socket, zmq.asyncio.Socket]]:
    """A socket with the publisher's messages, and one that signals when a connection ends."""
    with zmq.asyncio.Context.instance().socket(zmq.SUB) as socket:
        socket.ipv6 = True
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            socket.subscribe(publisher.topic)
            for endpoint in publisher.endpoints:
                socket.connect(endpoint)
            yield socket, monitor
        finally:
            socket.disable_monitor()
            monitor.close()
