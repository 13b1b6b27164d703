"""Data-parallel ranks: each has its own cache, so a prompt goes to a rank that has its chunks.

SGLang's controller sends a request to the rank that it names, and distributes others by `--load-balance-method`.
"""

from collections import Counter
from collections.abc import AsyncGenerator, Hashable
from contextlib import aclosing
from typing import Any

from sglang_lazy.core.keys import digests
from sglang_lazy.port.serving.frontend import frontend_of
from sglang_lazy.serving.picker import Pick
from sglang_lazy.serving.plans import Plan

_PICK = "_sglang_lazy_pick"


def choose_rank(manager: Any, obj: Any, plan: Plan, input_ids: list[int]) -> None:
    """Choose the rank of a prompt that reuses chunks, unless the request names one. Does nothing with a single rank."""
    if manager.server_args.dp_size == 1:
        return
    running = Counter(getattr(state.obj, "routed_dp_rank", None) for state in manager.rid_to_state.values())
    named = obj.routed_dp_rank
    ranks = range(manager.server_args.dp_size) if named is None else (named,)
    names = _names(obj, plan, input_ids)
    sizes = {name: end - start for name, (start, end) in zip(names, plan.layout.chunks, strict=True)}
    pick = frontend_of(manager).picker.pick(sizes, {rank: running[rank] for rank in ranks})
    obj.routed_dp_rank = pick.worker
    setattr(obj, _PICK, (pick, names))


def learned(outputs: AsyncGenerator[dict, None], obj: Any) -> AsyncGenerator[dict, None]:
    """`outputs` of a request, learning from its chunk report which chunks its rank had."""
    chosen = getattr(obj, _PICK, None)
    return outputs if chosen is None else _learning(outputs, *chosen)


async def _learning(
    outputs: AsyncGenerator[dict, None], pick: Pick, names: list[Hashable]
) -> AsyncGenerator[dict, None]:
    async with aclosing(outputs):
        async for out in outputs:
            if (report := out["meta_info"].get("chunks")) is not None:
                pick.answered({name: chunk["hit"] for name, chunk in zip(names, report, strict=True)})
            yield out


def _names(obj: Any, plan: Plan, input_ids: list[int]) -> list[Hashable]:
    """Keys that identify each chunk's KV, as far as the HTTP process knows."""
    chunks, kind = plan.layout.chunks, plan.policy.preamble
    lead = input_ids[: chunks[0][0]] if kind == "lead" else ()
    namespace = (obj.extra_key, obj.cache_salt, obj.lora_id, kind, *lead)
    return [(digest, hash(namespace)) for digest in digests(input_ids, chunks)]
