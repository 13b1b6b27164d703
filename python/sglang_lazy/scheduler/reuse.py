"""What an answer reports of the tokens that its prompt has reused."""

from typing import Any

from sglang_lazy.core.state import LinkedRequest


def reused_tokens(state: LinkedRequest, num_cached: int, unused: int, is_finished: bool) -> dict[str, Any]:
    """A linked request's reused tokens by source, as results report them.

    num_cached: all that were not computed.  unused, is_finished: see `hits_by_chunk`.
    """
    host, storage = state.num_loaded_tokens(fetched=False), state.num_loaded_tokens(fetched=True)
    return {
        "device": num_cached - host - storage,
        "host": host,
        **({"storage": storage} if storage else {}),
        "chunk": state.num_reused_tokens,
        **hits_by_chunk(state, unused, is_finished),
        **({"prompt": len(state.prompt.chunks[0].prompt_ids)} if state.prompt.cross else {}),
    }


def with_unused_hits(known: dict[str, Any] | None, unused: int, is_finished: bool) -> dict[str, Any] | None:
    """What SGLang reports of a request that reuses no chunk, `known`, with its hits.  unused: see `hits_by_chunk`."""
    if not unused:
        return known
    return {**(known or {"device": 0, "host": 0}), "chunk": 0, **hits_by_chunk(None, unused, is_finished)}


def hits_by_chunk(state: LinkedRequest | None, unused: int, is_finished: bool) -> dict[str, str]:
    """Which chunks of a prompt were cached, a bit mask; once it has been answered, also those that it reuses in part.

    Strings: with many chunks the mask exceeds the integers of a message.
    unused: the mask of chunks that were cached, and of which nothing is reused.
    """
    mask, parts = (0, []) if state is None else (state.hit_mask, state.partly_reused)
    hits = {"chunk_hits": f"{mask | unused:x}"}
    if is_finished:
        none = [(i, 0) for i in range(unused.bit_length()) if unused >> i & 1]
        hits["chunk_parts"] = ",".join(f"{i}:{n}" for i, n in [*parts, *none])
    return hits
