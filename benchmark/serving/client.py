"""Streams `/generate` requests and records when every token arrived.

SGLang's own client takes the first non-empty text as the first token, and misses tokens without text or that end
within a character. This one uses the server's count of generated tokens.
"""

import dataclasses
import time

import aiohttp
import orjson

from sglang_lazy.testing import ServerError


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A finished request as the client saw it; times are `time.perf_counter` seconds.

    turn: its number in its conversation, from 1.
    """

    sent: float
    arrivals: list[tuple[float, int]]  # arrival of an event, output tokens so far: both strictly increasing
    output_ids: list[int]
    prompt_tokens: int
    cached_tokens: int  # prefixes and chunks
    chunk_tokens: int
    turn: int = 1

    @property
    def output_tokens(self) -> int:
        return self.arrivals[-1][1]


def new_session() -> aiohttp.ClientSession:
    """A session for any number of concurrent requests, without timeouts."""
    return aiohttp.ClientSession(
        # SGLang closes idle connections after 5 s: drop them earlier.
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2),
        timeout=aiohttp.ClientTimeout(total=None, sock_read=600),
        read_bufsize=1 << 22,  # an event is one line and repeats the answer so far
    )


def encode(prompt: dict, max_new_tokens: int) -> bytes:
    """The body of a streamed greedy request for exactly `max_new_tokens` tokens, encoded before the clock starts.

    prompt: the fields of `/generate` that hold the prompt.
    """
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    return orjson.dumps({**prompt, "stream": True, "sampling_params": sampling})


async def stream(session: aiohttp.ClientSession, url: str, body: bytes) -> Timeline:
    """Send one encoded request and read its answer to the end. Raises ServerError if it fails."""
    arrivals: list[tuple[float, int]] = []
    event: dict = {"meta_info": {}}
    sent = time.perf_counter()
    try:
        async with session.post(f"{url}/generate", data=body, headers={"Content-Type": "application/json"}) as response:
            if response.status != 200:
                raise ServerError(f"the server answered {response.status}: {(await response.text())[:500]}")
            async for line in response.content:
                now = time.perf_counter()
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                event = orjson.loads(line[len(b"data: ") :])
                if "error" in event:
                    raise ServerError(f"the server answered: {event['error']}")
                tokens = event["meta_info"]["completion_tokens"]
                if tokens > (arrivals[-1][1] if arrivals else 0):
                    arrivals.append((now, tokens))
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ServerError(f"the connection failed: {error!r}") from error
    meta = event["meta_info"]
    if not arrivals or (meta["finish_reason"] or {}).get("type") != "length":
        raise ServerError(f"the server aborted: {meta.get('finish_reason')}")
    chunk_tokens = (meta.get("cached_tokens_details") or {}).get("chunk", 0)
    return Timeline(sent, arrivals, event["output_ids"], meta["prompt_tokens"], meta["cached_tokens"], chunk_tokens)
