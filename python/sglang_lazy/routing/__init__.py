"""Chunk-aware routing in front of an existing router: prompts go to the worker that has their chunks.

    picker = Picker()
    chunks = chunks_in(body)
    pick = picker.pick(dict(chunks), loads)  # loads: requests in flight, by worker
    …                                        # ask pick.worker
    pick.answered(hits_by_chunk(chunks, answer))

    hashes = BlockHashes.load(tokenizer)     # where workers publish KV events:
    chunks = chunks_in(body, hashes)
    task = asyncio.create_task(follow(worker, picker, hashes))

`python -m sglang_lazy.routing` is the same as a middleware of the router `smg`; see docs/routing.md.
"""

from sglang_lazy.routing.block_hashes import BlockHashes
from sglang_lazy.routing.bodies import chunks_in, hits_by_chunk
from sglang_lazy.routing.events import follow
from sglang_lazy.serving.picker import Pick, Picker

__all__ = ["BlockHashes", "Pick", "Picker", "chunks_in", "follow", "hits_by_chunk"]
