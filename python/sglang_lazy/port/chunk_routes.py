"""Routes that show a tenant its chunks."""

from http import HTTPStatus
from typing import Any

from fastapi import HTTPException, Query, Request
from sglang.srt.entrypoints import http_server
from sglang.srt.utils.auth import AuthLevel, auth_level

from sglang_lazy.port.control import ask
from sglang_lazy.serving.chunk_lists import DEFAULT_LIMIT, check_id, list_arguments, merged_page
from sglang_lazy.serving.requests import SALT_HEADER, check_cache_salt, salt_of

CHUNKS_ROUTE = "/chunks"


def _manager() -> Any:
    return http_server.get_global_state().tokenizer_manager


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
    pinned: bool | None = Query(None),
) -> dict[str, Any]:
    """One page of the caller's chunks.

        {"total": 2, "next": null, "chunks": [{
          "id": "9f0c…", "digest": "9f0c…", "tokens": 812, "state": "resident", "tiers": ["device", "host"],
          "hits": 4, "users": 1, "pinned": false, "last_use": 1763900000.1, "idle_seconds": 2.5,
          "preamble": false, "cache_salt": null, "dp_rank": 0}]}

    total: how many chunks match, on all pages.
    next: the `cursor` of the page that follows, null on the last one.
    id, digest: SHA-256 of the token ids as little-endian int32, its first 16 hexadecimal digits and all 64.
    state: missing, pending (being computed), fetching (from storage), host, loading (from there) or resident.
    tiers: where its KV is now, of "device" and "host".
    hits: prompts that found it cached, since it is.  users: requests that hold its KV now, also as the beginning of a
        longer chunk, and copies of it under way.
    last_use: seconds since the epoch, null before the first; idle_seconds is missing then.
    preamble: whether it was computed behind one (`base`). A text may be listed once for each.

    Query: `cache_salt` (or the header X-Cache-Salt) names the tenant; none is the shared namespace. `all=true` lists
    every tenant's, where the server has an admin key, and so the caller. `sort` is last_use, hits, tokens or created,
    `order` desc or asc, `limit` 1 to 1000; `state` and `pinned` filter.
    """
    try:
        arguments = list_arguments(sort, order, limit, cursor, state, pinned)
        tenant = check_cache_salt(salt_of(cache_salt, request.headers.get(SALT_HEADER)))
        if all and not _manager().server_args.admin_api_key:
            raise _refused(ValueError("all=true needs a server with --admin-api-key"), HTTPStatus.FORBIDDEN)
        answers = await ask(_manager(), "page", tenant=tenant, everybody=all, **arguments)
    except ValueError as error:
        raise _refused(error) from None
    return merged_page(answers, sort, arguments["descending"], limit)


@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def get_chunk(request: Request, chunk_id: str, cache_salt: str | None = None) -> dict[str, Any]:
    """The chunks with this id, as `list_chunks` shows them: one for each preamble and rank that it is cached with."""
    try:
        tenant = check_cache_salt(salt_of(cache_salt, request.headers.get(SALT_HEADER)))
        answers = await ask(_manager(), "get", tenant=tenant, prefix=check_id(chunk_id))
    except ValueError as error:
        raise _refused(error) from None
    chunks = [{**chunk, "dp_rank": rank} for rank, answer in enumerate(answers) for chunk in answer["chunks"]]
    if not chunks:
        raise _refused(ValueError(f"chunk {chunk_id} is unknown"), HTTPStatus.NOT_FOUND)
    return {"chunks": chunks}


@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def delete_chunk(request: Request, chunk_id: str, cache_salt: str | None = None) -> dict[str, Any]:
    """Take the KV of a chunk out of the cache; if requests hold it, when they have ended ("state": "in use").

        {"requested": 1, "affected": [{"id": "9f0c…", "state": "deleted"}], "skipped": []}

    What a longer chunk begins with stays with that one, and so does what has been written to storage.
    """
    try:
        tenant = check_cache_salt(salt_of(cache_salt, request.headers.get(SALT_HEADER)))
        answers = await ask(_manager(), "delete", tenant=tenant, ids=[check_id(chunk_id)])
    except ValueError as error:
        raise _refused(error) from None
    affected = [state for answer in answers for state in answer["affected"]]
    skipped = [skip for answer in answers for skip in answer["skipped"]]
    if ambiguous := [skip for skip in skipped if skip["reason"] != "unknown"]:
        raise _refused(ValueError(f"chunk {chunk_id}: {ambiguous[0]['reason']}"), HTTPStatus.CONFLICT)
    if not affected:
        raise _refused(ValueError(f"chunk {chunk_id} is unknown"), HTTPStatus.NOT_FOUND)
    in_use = [state for state in affected if state["state"] == "in use"]
    return {"requested": 1, "affected": (in_use or affected)[:1], "skipped": []}


def add_routes(app: Any) -> None:
    """Serve them, once."""
    if not any(getattr(route, "path", None) == CHUNKS_ROUTE for route in app.router.routes):
        app.get(CHUNKS_ROUTE)(list_chunks)
        app.get(CHUNKS_ROUTE + "/{chunk_id}")(get_chunk)
        app.delete(CHUNKS_ROUTE + "/{chunk_id}")(delete_chunk)
