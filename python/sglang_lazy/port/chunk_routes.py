"""Routes that show a tenant its chunks."""

import asyncio
import logging
from collections.abc import Sequence
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import HTTPException, Query, Request, Response
from fastapi.responses import ORJSONResponse
from sglang.srt.entrypoints import http_server
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.utils.auth import AuthLevel, auth_level

from sglang_lazy.chunks.catalog import MAX_LIMIT
from sglang_lazy.core.keys import chunk_id, tokens_digest
from sglang_lazy.policies import get_policy
from sglang_lazy.port.control import ask
from sglang_lazy.port.pin_routes import patch_chunk, pin_chunks
from sglang_lazy.serving.chunk_lists import (
    DEFAULT_LIMIT,
    check_id,
    list_arguments,
    merged_deletion,
    merged_page,
    pin_arguments,
    with_adapter_names,
)
from sglang_lazy.serving.known_chunks import known_chunks
from sglang_lazy.serving.registration import compute, parse_registration, prompt_for
from sglang_lazy.serving.requests import SALT_HEADER, check_cache_salt, salt_of, with_layout

CHUNKS_ROUTE = "/chunks"

logger = logging.getLogger(__name__)


def _manager() -> Any:
    return http_server.get_global_state().tokenizer_manager


def _adapters() -> dict[str, str]:
    """The ids of the LoRA adapters that are loaded, by name."""
    return {name: ref.lora_id for name, ref in _manager().lora_registry.get_all_adapters().items()}


def _refused(error: ValueError, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> HTTPException:
    return HTTPException(status, str(error))


@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def list_chunks(
    request: Request,
    cache_salt: str | None = None,
    all: bool = False,
    sort: str = "last_use",
    order: str = "desc",
    limit: int = DEFAULT_LIMIT,
    cursor: str | None = None,
    state: str | None = None,
) -> dict[str, Any]:
    """One page of the caller's chunks.

        {"total": 2, "next": null, "chunks": [{
          "id": "9f0c…", "digest": "9f0c…", "tokens": 812, "state": "resident", "tiers": ["device", "host"],
          "hits": 4, "users": 1, "last_use": 1763900000.1, "idle_seconds": 2.5,
          "pinned": true, "pinned_until": null, "preamble": false, "cache_salt": null, "lora_path": null,
          "dp_rank": 0}]}

    total: how many chunks match, on all pages.
    next: the `cursor` of the page that follows, null on the last one.
    id, digest: SHA-256 of the token ids as little-endian int32, its first 16 hexadecimal digits and all 64.
    state: missing, pending (being computed), fetching (from storage), host, loading (from there) or resident.
    tiers: where its KV is now, of "device" and "host".
    hits: prompts that found it cached, since it is.  users: requests that hold its KV now, also as the beginning of a
        longer chunk, and copies of it under way.
    last_use: seconds since the epoch, null before the first; idle_seconds is missing then.
    pinned, pinned_until: whether it is kept on the device, and when that ends, seconds since the epoch; null for never.
    preamble: whether it was computed behind one (`base`).  lora_path: the name of the adapter that computed it. A text
        may be listed once for each.

    Query: `cache_salt` (or the header X-Cache-Salt) names the tenant; none is the shared namespace. `all=true` lists
    every tenant's, where the server has an admin key, and so the caller. `sort` is last_use, hits, tokens or created,
    `order` desc or asc, `limit` 1 to 1000; `state` filters.
    """
    try:
        arguments = list_arguments(sort, order, limit, cursor, state)
        tenant = check_cache_salt(salt_of(cache_salt, request.headers.get(SALT_HEADER)))
        if all and not _manager().server_args.admin_api_key:
            raise _refused(ValueError("all=true needs a server with --admin-api-key"), HTTPStatus.FORBIDDEN)
        answers = await ask(_manager(), "page", tenant=tenant, everybody=all, **arguments)
    except ValueError as error:
        raise _refused(error) from None
    page = merged_page(answers, sort, arguments["descending"], limit)
    return {**page, "chunks": with_adapter_names(page["chunks"], _adapters())}


@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def get_chunk(request: Request, chunk_id: str, cache_salt: str | None = None) -> dict[str, Any]:
    """The chunks with this id, as `list_chunks` shows them: one for each preamble, adapter and rank that it is cached
    with."""
    try:
        tenant = check_cache_salt(salt_of(cache_salt, request.headers.get(SALT_HEADER)))
        answers = await ask(_manager(), "get", tenant=tenant, prefix=check_id(chunk_id))
    except ValueError as error:
        raise _refused(error) from None
    chunks = [{**chunk, "dp_rank": rank} for rank, answer in enumerate(answers) for chunk in answer["chunks"]]
    if not chunks:
        raise _refused(ValueError(f"chunk {chunk_id} is unknown"), HTTPStatus.NOT_FOUND)
    return {"chunks": with_adapter_names(chunks, _adapters())}


@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def delete_chunk(request: Request, chunk_id: str, cache_salt: str | None = None) -> dict[str, Any]:
    """Take the KV of a chunk out of the cache; if requests hold it, when they have ended ("state": "in use").

        {"requested": 1, "affected": [{"id": "9f0c…", "state": "deleted"}], "skipped": []}

    What a longer chunk begins with stays with that one, and so does what has been written to storage. A pin ends.
    """
    answer = await delete_chunks(request, [chunk_id], cache_salt)
    if answer["skipped"]:
        reason = answer["skipped"][0]["reason"]
        if reason != "unknown":
            raise _refused(ValueError(f"chunk {chunk_id}: {reason}"), HTTPStatus.CONFLICT)
        raise _refused(ValueError(f"chunk {chunk_id} is unknown"), HTTPStatus.NOT_FOUND)
    return answer


@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def delete_chunks(
    request: Request, id: Annotated[list[str], Query(max_length=MAX_LIMIT)], cache_salt: str | None = None
) -> dict[str, Any]:
    """The same for several: `DELETE /chunks?id=…&id=…`. `skipped` names the others, each with its reason."""
    manager = _manager()
    try:
        tenant = check_cache_salt(salt_of(cache_salt, request.headers.get(SALT_HEADER)))
        ids = list(dict.fromkeys(map(check_id, id)))
        answers = await ask(manager, "delete", tenant=tenant, ids=ids)
    except ValueError as error:
        raise _refused(error) from None
    return merged_deletion(ids, answers, lambda name: known_chunks(manager).remove(tenant, name))


@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def register_chunks(request: Request) -> Response:
    """Compute chunks ahead of use.

        {"chunks": ["a text", {"input_ids": [5, 6, 7]}], "link": "base", "cache_salt": "tenant-7", "wait": true,
         "lora_path": "an adapter's name", "pin": true, "ttl": 3600}

    Answers with 202 and `{"requested": 2, "accepted": [ids], "skipped": []}` while they are computed: `GET
    /chunks/{id}` says how far each is. With `wait`, when that is done, with 200 and `affected` in place of `accepted`;
    `skipped` names those that could not be computed or pinned, and why. For `pin` and `ttl` see `patch_chunk`.
    """
    manager = _manager()
    try:
        try:
            body = await request.json()
        except ValueError:
            raise ValueError("the body is no JSON") from None
        salt = salt_of(body.get("cache_salt") if isinstance(body, dict) else None, request.headers.get(SALT_HEADER))
        chunks, link = parse_registration(manager, body, salt)
        if (adapter := body.get("lora_path")) is not None and adapter not in _adapters():
            raise ValueError(f"no LoRA adapter {adapter!r:.80} is loaded")
        pins = {name: body[name] for name in ("pin", "ttl") if name in body}
        pin, ttl = pin_arguments(pins) if pins else (False, None)
        await ask(manager, "get", tenant=salt, prefix=chunk_id(tokens_digest(chunks[0])))  # refuses without reuse
    except ValueError as error:
        raise _refused(error) from None

    async def run(tokens: Sequence[int]) -> None:
        input_ids, layout = prompt_for(tokens, link, salt)
        params = with_layout({"temperature": 0, "max_new_tokens": 1}, layout, manager)
        one = GenerateReqInput(input_ids=input_ids, sampling_params=params, lora_path=adapter, log_metrics=False)
        async for _ in manager.generate_request(one):
            pass
        if pin:
            digest, only = tokens_digest(tokens).hex(), (get_policy(layout.link).preamble != "none", one.lora_id)
            for skip in (await pin_chunks(manager, salt, [digest], pin, ttl, only))[1]:
                reason = "evicted meanwhile" if skip["reason"] == "unknown" else skip["reason"]
                raise ValueError(f"computed, but not pinned: {reason}")

    requested = len(chunks)
    if not get_policy(link).trained:  # its tokens are not those of the text alone
        for tokens in chunks:
            known_chunks(manager).add(salt, tokens)
    chunks = list({tuple(tokens): tokens for tokens in chunks}.values())
    work = asyncio.ensure_future(compute(chunks, run))
    if body.get("wait"):
        affected, skipped = await asyncio.shield(work)
        return ORJSONResponse({"requested": requested, "affected": affected, "skipped": skipped})
    _under_way.add(work)
    work.add_done_callback(_end)
    accepted = [chunk_id(tokens_digest(tokens)) for tokens in chunks]
    answer = {"requested": requested, "accepted": accepted, "skipped": []}
    return ORJSONResponse(answer, status_code=HTTPStatus.ACCEPTED)


_under_way: set[asyncio.Future] = set()
"""Registrations that nobody waits for: an event loop alone would not keep them."""


def _end(work: asyncio.Future) -> None:
    _under_way.discard(work)
    if work.cancelled():
        return
    if work.exception() is not None:
        logger.error("sglang-lazy: a registration of chunks failed", exc_info=work.exception())
        return
    for skip in work.result()[1]:
        logger.warning("sglang-lazy: chunk %s could not be registered: %s", skip["id"], skip["reason"])


def add_routes(app: Any) -> None:
    """Serve them, once."""
    if not any(getattr(route, "path", None) == CHUNKS_ROUTE for route in app.router.routes):
        app.get(CHUNKS_ROUTE)(list_chunks)
        app.post(CHUNKS_ROUTE)(register_chunks)
        app.get(CHUNKS_ROUTE + "/{chunk_id}")(get_chunk)
        app.patch(CHUNKS_ROUTE + "/{chunk_id}")(patch_chunk)
        app.delete(CHUNKS_ROUTE + "/{chunk_id}")(delete_chunk)
        app.delete(CHUNKS_ROUTE)(delete_chunks)
