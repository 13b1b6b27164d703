"""A streaming client that measures time to first token and reuse."""

import dataclasses
import json
import time

import requests

from sglang_lazy.testing.processes import ServerError
from sglang_lazy.testing.server import wait_for


@dataclasses.dataclass(frozen=True)
class Generation:
    """One finished request: the server's counts, and `ttft` in seconds on the client's clock."""

    text: str
    prompt_tokens: int
    prefix_tokens: int
    chunk_tokens: int
    ttft: float

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that had to be computed."""
        return self.prompt_tokens - self.prefix_tokens - self.chunk_tokens


class Client:
    """A client of one server, over one persistent connection."""

    def __init__(self, url: str, timeout: float = 120):
        self.url = url
        self.timeout = timeout
        self.session = requests.Session()

    def flush_cache(self) -> None:
        """Empty the KV cache, retrying while the server is busy."""
        if not wait_for(lambda: self.session.post(f"{self.url}/flush_cache", timeout=self.timeout).ok):
            raise ServerError("the server did not empty its cache: is another client using it?")

    def generate(self, prompt: dict, max_new_tokens: int, *, ignore_eos: bool = True) -> Generation:
        """Stream one greedy answer of `max_new_tokens` tokens, or fewer without `ignore_eos`.

        prompt: the fields of `/generate` with the prompt, for instance {"segments": [...]}.
        ignore_eos: continue after the end of sequence.
        """
        body = {
            **prompt,
            "stream": True,
            "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": ignore_eos},
        }
        message, ttft = None, None
        start = time.perf_counter()
        with self.session.post(f"{self.url}/generate", json=body, stream=True, timeout=self.timeout) as response:
            if not response.ok:
                raise ServerError(f"the server answered {response.status_code}: {response.text[:500]}")
            for line in response.iter_lines():
                if not line.startswith(b"data: ") or line == b"data: [DONE]":
                    continue
                ttft = ttft or time.perf_counter() - start
                message = json.loads(line[len(b"data: ") :])
                if "error" in message:
                    raise ServerError(f"the server answered: {message['error']}")
        if message is None or ttft is None:
            raise ServerError("the server closed the stream without an answer")
        meta = message["meta_info"]
        chunk_tokens = (meta.get("cached_tokens_details") or {}).get("chunk", 0)
        return Generation(
            text=message["text"],
            prompt_tokens=meta["prompt_tokens"],
            prefix_tokens=meta["cached_tokens"] - chunk_tokens,
            chunk_tokens=chunk_tokens,
            ttft=ttft,
        )
