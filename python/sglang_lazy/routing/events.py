"""What a worker publishes of its cache (SGLang's `--kv-events-config`), told to a picker."""

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
from sglang_lazy.routing.picker import Picker

RETRY_S = 2.0

logger = logging.getLogger(__name__)


# mypy does not know that msgspec structs take class arguments.
class _Event(msgspec.Struct, array_like=True, tag=True, gc=False):  # type: ignore[call-arg]
    """SGLang's events as they are on the wire. Later fields are passed over."""


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
    """Tells `picker` what the messages of one worker say."""

    def __init__(self, worker: str, picker: Picker):
        self.worker, self.picker = worker, picker
        self._next: dict[int | None, int] = {}  # by rank, since each counts its own messages

    def take(self, message: Sequence[bytes]) -> None:
        """Raises ValueError or MsgspecError for a message that is malformed or does not follow the one before it."""
        _, number, payload = message
        batch, sequence = _decode(payload), int.from_bytes(number, "big")
        if sequence != self._next.get(batch.dp_rank, sequence):
            raise ValueError(f"message {self._next[batch.dp_rank]} was expected, {sequence} came")
        self._next[batch.dp_rank] = sequence + 1
        for event, after in itertools.pairwise([*batch.events, None]):
            self._tell(event, after, batch.dp_rank)

    def _tell(self, event: _Event | None, after: _Event | None, rank: int | None) -> None:
        """after: the next event. Of blocks stored one behind the other the last is told of: a chunk ends with it, if
        any does. All are removed by their names."""
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
    """Keep `picker` told what the server at the URL `worker` stores and removes, until cancelled.

    What it had before is not told. When it starts anew, or a message is lost, all that is known of it is forgotten.
    Returns, with an error in the log, if it publishes no events, does not let us know, or has another tokenizer.
    """
    while True:
        try:
            publisher = await _publisher(worker, hashes)
        except LookupError as error:
            logger.error("the KV events of %s are not followed: %s", worker, error)
            return
        except (aiohttp.ClientError, asyncio.TimeoutError, ValueError) as error:
            logger.warning("%s does not say where it publishes KV events: %r", worker, error)
        else:
            reason = await _listen(publisher, Listener(worker, picker))
            logger.warning("the KV events of %s broke off: %s", worker, reason)
            picker.forget(worker)
        await asyncio.sleep(RETRY_S)


async def _publisher(worker: str, hashes: BlockHashes) -> _Publisher:
    """Where the worker publishes. Raises LookupError if nothing can be learned there."""
    timeout = aiohttp.ClientTimeout(total=60)  # it tokenizes while it is busy, too
    async with aiohttp.ClientSession(timeout=timeout) as session:
        published = (await _json(session.get(f"{worker}/server_info"))).get("kv_events")
        sample = {"prompt": SAMPLE, "add_special_tokens": False}
        tokens = (await _json(session.post(f"{worker}/tokenize", json=sample)))["tokens"]
    if published is None:
        raise LookupError("it publishes none; start it with --kv-events-config")
    if published["block_size"] != 1:
        raise LookupError(f"its blocks have {published['block_size']} tokens")
    if tokens != hashes.sample:
        raise LookupError("its tokenizer is another")
    host, port = URL(worker).host_subcomponent, published["endpoint_port_base"]
    return _Publisher([f"tcp://{host}:{port + rank}" for rank in range(published["dp_size"])], published["topic"])


async def _json(request: contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]) -> Any:
    async with request as answer:
        if 400 <= answer.status < 500:
            raise LookupError(f"it answers {answer.url.path} with {answer.status}")
        answer.raise_for_status()
        return await answer.json()


async def _listen(publisher: _Publisher, listener: Listener) -> str:
    """Give the listener all messages, until one is lost; why it is."""
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
            await asyncio.sleep(0)  # a backlog keeps nobody waiting: polling it does not yield


@contextlib.contextmanager
def _subscribed(publisher: _Publisher) -> Iterator[tuple[zmq.asyncio.Socket, zmq.asyncio.Socket]]:
    """A socket with the publisher's messages, and one that tells when a connection of it ends."""
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
