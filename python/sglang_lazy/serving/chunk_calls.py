"""Chunk management for routes and `Engine`, with the answers of the routes.

tenant: the salt, checked by the caller; None for the shared namespace. All raise ValueError for bad input, and if the
server runs without chunk reuse.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

from sglang_lazy.chunks.catalog import MIN_DIGITS, tenant_of
from sglang_lazy.core.keys import tokens_digest
from sglang_lazy.serving.chunk_lists import (
    arguments_of_ranks,
    check_id,
    merged_deletion,
    merged_page,
    pin_arguments,
    with_adapter_names,
)
from sglang_lazy.serving.frontend import Frontend
from sglang_lazy.serving.known_chunks import UnknownChunk
from sglang_lazy.serving.labels import name_chunks, with_labels
from sglang_lazy.serving.misses import WORDS, Miss
from sglang_lazy.serving.registration import compute, parse_registration, prompt_for
from sglang_lazy.serving.scans import scan
from sglang_lazy.serving.threads import in_thread

MAX_DELETED = 100
"""The number of chunks that the scheduler deletes between two batches, which takes a few milliseconds."""

logger = logging.getLogger(__name__)


async def list_chunks(
    frontend: Frontend, tenant: str | None, everybody: bool, arguments: dict[str, Any]
) -> dict[str, Any]:
    """One page of a tenant's chunks, or of everybody's.  arguments: from `list_arguments`."""
    wanted = {"tenant": tenant, "everybody": everybody, **arguments_of_ranks(arguments)}
    scanned = await scan(lambda starts: frontend.server.ask("page", starts=starts, **wanted))
    page = merged_page(scanned, arguments)
    return {**page, "chunks": _shown(frontend, page["chunks"])}


async def survey(frontend: Frontend, tenant: str | None, everybody: bool) -> dict[str, Any]:
    """The numbers that the page `/lazy` shows of a tenant, or of everybody."""
    found = await frontend.surveys.get(
        (tenant, everybody),
        lambda starts: frontend.server.ask("survey", starts=starts, tenant=tenant, everybody=everybody),
    )
    now = time.time()
    prompts = frontend.usage.last(tenant, everybody)
    for prompt in prompts:
        name_chunks(frontend.labels, prompt["cache_salt"], prompt["chunks"])
    return {
        "time": now,
        **found,
        **{name: _shown(frontend, found[name]) for name in ("hottest", "largest", "pinned")},
        "history": frontend.usage.history(tenant, everybody, now),
        "prompts": prompts,
    }


def uses(frontend: Frontend, tenant: str | None, everybody: bool, name: str) -> dict[str, Any]:
    """The last prompts of a tenant, or of everybody, that have a chunk, and the chunks that occur with it."""
    found = frontend.usage.uses(tenant, everybody, check_id(name)[:MIN_DIGITS])
    for prompt in found["prompts"]:
        name_chunks(frontend.labels, prompt["cache_salt"], prompt["chunks"])
    if not everybody:
        name_chunks(frontend.labels, tenant, found["together"])
    return found


async def why(frontend: Frontend, tenant: str | None, everybody: bool, rid: str) -> dict[str, Any]:
    """Why the chunks of a recent prompt of a tenant's, or of anybody's, were not cached.  rid: its request's id.

    Raises UnknownChunk if there is no such prompt.
    """
    prompt = frontend.usage.find(tenant, everybody, rid)
    if prompt is None:
        raise UnknownChunk(f"none of the last prompts with chunks has the request id {rid!r:.100}")
    misses = await frontend.misses.of(tenant_of(prompt.namespace), rid)
    salt = prompt.namespace.cache_salt

    def told(name: str, tokens: int, hit: bool) -> dict[str, Any]:
        if hit:
            return {"id": name, "tokens": tokens, "hit": True}
        miss = misses.get(name, Miss("unknown"))
        reason = "tenant" if everybody and miss.elsewhere and miss.reason == "new" else miss.reason
        like: dict[str, Any] | None = None if miss.like is None else {"id": miss.like}
        if like is not None:
            name_chunks(frontend.labels, salt, [like])
        words = WORDS[reason].format(like=miss.like)
        return {"id": name, "tokens": tokens, "hit": False, "reason": reason, "like": like, "words": words}

    chunks = [told(*chunk) for chunk in prompt.chunks]
    name_chunks(frontend.labels, salt, chunks)
    return {"rid": rid, "time": prompt.time, "link": prompt.link, "cache_salt": salt, "chunks": chunks}


async def get_chunk(frontend: Frontend, tenant: str | None, name: str) -> dict[str, Any]:
    """The chunks with this id and the state of its registration. Raises UnknownChunk if there is neither."""
    answers = await frontend.server.ask("get", tenant=tenant, prefix=check_id(name))
    chunks = [{**chunk, "dp_rank": rank} for rank, answer in enumerate(answers) for chunk in answer["chunks"]]
    registration = frontend.registrations.get(tenant, name)
    if not chunks and registration is None:
        raise UnknownChunk(f"chunk {name} is unknown")
    return {"chunks": _shown(frontend, chunks), "registration": registration}


def _shown(frontend: Frontend, chunks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Chunks as schedulers describe them, with the names of their adapters and their labels."""
    return with_labels(frontend.labels, with_adapter_names(chunks, frontend.server.adapters))


async def delete_chunks(frontend: Frontend, tenant: str | None, ids: Sequence[str]) -> dict[str, Any]:
    """Remove the KV of chunks from the cache, and forget their ids."""
    ids = list(dict.fromkeys(map(check_id, ids)))
    answers = []
    for first in range(0, len(ids), MAX_DELETED):
        answers += await frontend.server.ask("delete", tenant=tenant, ids=ids[first : first + MAX_DELETED])

    frontend.misses.forget(tenant, ids)

    def forget(name: str) -> bool:
        frontend.labels.remove(tenant, name)
        failed = frontend.registrations.forget(tenant, name)
        return frontend.known.remove(tenant, name) or failed

    return merged_deletion(ids, answers, forget)


async def register_chunks(frontend: Frontend, tenant: str | None, body: Any, size: int = 0) -> dict[str, Any]:
    """Compute chunks ahead of use.  body: as of `POST /chunks`, which has `size` bytes.

    Raises Busy, a ValueError, if too many wait already.
    """
    chunks, requested, policy = await in_thread(size, parse_registration, frontend.prompts, body, tenant)
    if (adapter := body.get("lora_path")) is not None and adapter not in frontend.server.adapters:
        raise ValueError(f"no LoRA adapter {adapter!r:.80} is loaded")
    pins = {name: body[name] for name in ("pin", "ttl") if name in body}
    pin, ttl = pin_arguments(pins) if pins else (False, None)
    await frontend.server.ask("get", tenant=tenant, prefix=chunks[0].id)  # refuses without reuse

    async def run(tokens: Sequence[int]) -> None:
        input_ids, plan = prompt_for(tokens, policy, tenant)
        params = frontend.prompts.with_plan({"temperature": 0, "max_new_tokens": 1}, plan)
        adapter_id = await frontend.server.compute(input_ids, params, adapter)
        if pin:
            digest, only = tokens_digest(tokens).hex(), (plan.policy.preamble != "none", adapter_id)
            for skip in (await frontend.pins.set(tenant, [digest], pin, ttl, only))["skipped"]:
                reason = "evicted meanwhile" if skip["reason"] == "unknown" else skip["reason"]
                raise ValueError(f"computed, but not pinned: {reason}")

    progress = frontend.registrations
    frontend.labels.add(tenant, {chunk.id: chunk.label for chunk in chunks if chunk.label is not None})
    progress.begin(tenant, [(chunk.digest, chunk.size) for chunk in chunks])
    try:
        if not policy.trained:  # its tokens are not those of the text alone
            await in_thread(size, frontend.known.add_all, tenant, [chunk.tokens for chunk in chunks])
    except BaseException:
        for chunk in chunks:
            progress.end(tenant, chunk.digest, chunk.size, None)
        raise
    work = asyncio.ensure_future(compute(chunks, run, progress, tenant, frontend.turns))
    _under_way.add(work)
    work.add_done_callback(_end)
    if body.get("wait"):
        affected, skipped = await asyncio.shield(work)
        return {"requested": requested, "affected": affected, "skipped": skipped}
    return {"requested": requested, "accepted": [chunk.id for chunk in chunks], "skipped": []}


_under_way: set[asyncio.Future] = set()
"""Registrations that are being computed; event loops keep only weak references to tasks."""


def _end(work: asyncio.Future) -> None:
    _under_way.discard(work)
    if not work.cancelled() and work.exception() is not None:
        logger.error("sglang-lazy: a registration of chunks failed", exc_info=work.exception())
