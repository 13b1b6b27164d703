"""Routes through which tenants list and manage their chunks."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import Depends, Header, HTTPException, Path, Query, Request, Response
from fastapi.responses import ORJSONResponse

from sglang_lazy.chunks.catalog import MAX_LIMIT, MIN_DIGITS
from sglang_lazy.core.config import INFO_ROUTE, SALT_HEADER
from sglang_lazy.serving import chunk_calls, chunk_schemas
from sglang_lazy.serving.chunk_lists import check_id, list_arguments, pin_arguments
from sglang_lazy.serving.frontend import Frontend
from sglang_lazy.serving.keys import Scope, opened_by, sees_all_tenants
from sglang_lazy.serving.known_chunks import UnknownChunk
from sglang_lazy.serving.page import PAGE_ROUTE
from sglang_lazy.serving.registration import RETRY_S, Busy
from sglang_lazy.serving.salts import check_cache_salt, salt_of

CHUNKS_ROUTE = "/chunks"


def _refused(error: Exception | str, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> HTTPException:
    return HTTPException(HTTPStatus.NOT_FOUND if isinstance(error, UnknownChunk) else status, str(error))


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """A context, or a decorator, whose ValueErrors are answered as `_refused` says."""
    try:
        yield
    except ValueError as error:
        raise _refused(error) from None


def _tenant(
    http: Request,
    cache_salt: str | None = None,
    _described: Annotated[str | None, Header(alias=SALT_HEADER)] = None,
) -> str | None:
    return check_cache_salt(salt_of(cache_salt, http.headers))


Tenant = Annotated[str | None, Depends(_refusing()(_tenant))]


async def _frontend(http: Request) -> Frontend:
    return http.app.state.lazy_frontend()


Process = Annotated[Frontend, Depends(_frontend)]


def _everybody(http: Request, frontend: Process, all: bool = False) -> bool:
    if all and not sees_all_tenants(http, frontend.server.has_admin_key):
        reason = "all=true needs a server with --admin-api-key, and that key or one with the scope admin"
        raise _refused(reason, HTTPStatus.FORBIDDEN)
    return all


Everybody = Annotated[bool, Depends(_everybody)]
ChunkId = Annotated[str, Path(json_schema_extra={"pattern": f"^[0-9a-f]{{{MIN_DIGITS},64}}$"})]


async def _body(http: Request) -> Any:
    try:
        return await http.json()
    except ValueError:
        raise ValueError("the body is not JSON") from None


@opened_by(Scope.READ)
async def list_chunks(
    frontend: Process,
    tenant: Tenant,
    everybody: Everybody,
    arguments: Annotated[dict[str, Any], Depends(_refusing()(list_arguments))],
) -> dict[str, Any]:
    """One page of the caller's chunks.

        {"total": 2, "next": null, "chunks": [{
          "id": "9f0c…", "digest": "9f0c…", "tokens": 812, "state": "resident", "tiers": ["device", "host"],
          "hits": 4, "users": 1, "last_use": 1763900000.1, "idle_seconds": 2.5,
          "pinned": true, "pinned_until": null, "preamble": false, "cache_salt": null, "lora_path": null,
          "dp_rank": 0}]}

    total: how many chunks match, on all pages.
    next: the `cursor` of the page that follows, null on the last one.
    id, digest: SHA-256 of the token ids as little-endian int32: its first 16 hexadecimal digits, and all 64.
    state_bytes: with recurrent layers alone, the size of its states beside its KV.
    draft_bytes: with a model that drafts alone, the size of that model's KV of the chunk.
    state: pending (being computed), fetching (from storage), host, loading (from the host) or resident.
    tiers: where its KV is now, of "device" and "host".
    hits: prompts that found it cached since it was added.  users: requests that hold its KV now, even as the
        beginning of a longer chunk, and copies of it in progress.
    last_use: seconds since the epoch, null before the first use; idle_seconds is missing then.
    pinned, pinned_until: whether it is kept on the device, and until when, in seconds since the epoch; null for ever.
    preamble: whether it was computed after one (`base`).  lora_path: the name of the adapter that computed it. A text
        may be listed once for each.

    Query: `cache_salt` (or the header X-Cache-Salt) names the tenant; none is the shared namespace. `all=true` lists
    the chunks of all tenants; it needs a server with an admin key, sent by the caller. `sort` is last_use, hits, tokens
    or created, `order` desc or asc, `limit` 1 to 1000; `state` filters.
    """
    with _refusing():
        return await chunk_calls.list_chunks(frontend, tenant, everybody, arguments)


@opened_by(Scope.READ)
async def get_chunk(frontend: Process, chunk_id: ChunkId, tenant: Tenant) -> dict[str, Any]:
    """The chunks with this id, as `list_chunks` shows them: one for each preamble, adapter and rank.

    `registration` is null, `{"state": "waiting"}`, or `{"state": "failed", "reason": "…"}` if the last one failed.
    """
    with _refusing():
        return await chunk_calls.get_chunk(frontend, tenant, chunk_id)


@opened_by(Scope.CHUNKS)
async def delete_chunk(frontend: Process, chunk_id: ChunkId, tenant: Tenant) -> dict[str, Any]:
    """Remove the KV of a chunk from the cache; if requests hold it, after they have ended ("state": "in use").

        {"requested": 1, "affected": [{"id": "9f0c…", "state": "deleted"}], "skipped": []}

    KV shared with a longer chunk stays, and so do copies in storage. A pin ends.
    """
    return _one(chunk_id, await delete_chunks(frontend, [chunk_id], tenant))


def _one(chunk_id: str, answer: dict[str, Any]) -> dict[str, Any]:
    """The answer about one chunk. Raises HTTPException if it was skipped."""
    for skip in answer["skipped"]:
        if skip["reason"] == "unknown":
            raise _refused(f"chunk {chunk_id} is unknown, or not cached", HTTPStatus.NOT_FOUND)
        raise _refused(f"chunk {chunk_id}: {skip['reason']}", HTTPStatus.CONFLICT)
    return answer


@opened_by(Scope.CHUNKS)
async def delete_chunks(
    frontend: Process, id: Annotated[list[str], Query(max_length=MAX_LIMIT)], tenant: Tenant
) -> dict[str, Any]:
    """The same for several chunks: `DELETE /chunks?id=…&id=…`. `skipped` has the others, with reasons."""
    with _refusing():
        return await chunk_calls.delete_chunks(frontend, tenant, id)


@opened_by(Scope.CHUNKS)
async def patch_chunk(frontend: Process, http: Request, chunk_id: ChunkId, tenant: Tenant) -> dict[str, Any]:
    """Pin a cached chunk, which keeps its KV on the device, or end its pin.

        {"pin": true, "ttl": 3600}

    ttl: the pin ends this many seconds after it was set or a prompt last hit the chunk; hits may extend it to twice
        that. null or absent: it stays until it is ended. The last setting holds.

    Answers `{"requested": 1, "affected": [{"id": "9f0c…", "pinned": true, "pinned_until": 1763903600.1}], "skipped":
    []}`, or 409 if it cannot be pinned. Pins end early if a running request could not continue otherwise.
    """
    with _refusing():
        pin, ttl = pin_arguments(await _body(http))
        return _one(chunk_id, await frontend.pins.set(tenant, [check_id(chunk_id)], pin, ttl))


@opened_by(Scope.CHUNKS)
async def register_chunks(frontend: Process, http: Request) -> Response:
    """Compute chunks ahead of use.

        {"chunks": ["a text", {"input_ids": [5, 6, 7]}], "link": "base", "cache_salt": "tenant-7", "wait": true,
         "lora_path": "an adapter's name", "pin": true, "ttl": 3600}

    Answers at once with 202 and `{"requested": 2, "accepted": [ids], "skipped": []}`; `get_chunk` then tells each one's
    state, and why it failed. With `wait`, answers when all are computed, with 200 and `affected` instead of `accepted`;
    `skipped` has those that could not be computed or pinned, with reasons. For `pin` and `ttl` see `patch_chunk`.
    """
    try:
        body = await _body(http)
        salt = body.get("cache_salt") if isinstance(body, dict) else None
        salt, size = salt_of(salt, http.headers), len(await http.body())
        answer = await chunk_calls.register_chunks(frontend, salt, body, size)
    except Busy as error:
        status = HTTPStatus.TOO_MANY_REQUESTS
        refusal = {"object": "error", "message": str(error), "type": status.phrase, "param": None, "code": status.value}
        return ORJSONResponse(refusal, status, {"Retry-After": str(RETRY_S)})
    except ValueError as error:
        raise _refused(error) from None
    return ORJSONResponse(answer, status_code=HTTPStatus.ACCEPTED if "accepted" in answer else HTTPStatus.OK)


@opened_by(Scope.READ)
async def survey(frontend: Process, tenant: Tenant, everybody: Everybody) -> dict[str, Any]:
    """The numbers that the page `/lazy` shows of the caller's chunks; its size does not grow with their number.

        {"time": 1763900000.1, "memory": {"device": {"size": 65536, "free": 1200}, "host": null},
         "chunks": {"resident": {"chunks": 2, "tokens": 150}, "pinned": …, "locked": …, "evictable": …, "host": …,
                    "pending": 1, "fetching": 0},
         "hottest": […], "largest": […], "pinned": […], "history": […], "evicted": […], "prompts": […]}

    memory: tokens that the device and the host can hold, and how many are free; host is null without that tier. All
        tenants share it, so `free` is null for a tenant: shown only without a salt, or with `all=true`.
    chunks: numbers of chunks and their tokens, named like the gauges in docs/metrics.md.
    pending, fetching: chunks that are being computed, or fetched from storage.
    hottest, largest, pinned: up to 10 chunks each, as `list_chunks` shows them.
    history: see `Usage.history`.
    evicted: for each period of the last hour in which the caller's chunks left the device to make room, its beginning,
        and how many chunks and tokens.
    prompts: the last 12, newest first: `{"time", "link", "cache_salt", "num_chunks", "chunks": [{"id", "tokens",
        "hit"}]}`, where `chunks` has the first 40.

    With many chunks, a survey is some seconds old. Query: `cache_salt` and `all` as for `list_chunks`.
    """
    with _refusing():
        return await chunk_calls.survey(frontend, tenant, everybody)


@opened_by(Scope.READ)
async def uses(frontend: Process, chunk_id: ChunkId, tenant: Tenant, everybody: Everybody) -> dict[str, Any]:
    """The caller's last prompts that have a chunk, and the chunks that occur with it; see `Usage.uses`."""
    with _refusing():
        return chunk_calls.uses(frontend, tenant, everybody, chunk_id)


@opened_by(Scope.READ)
async def why(frontend: Process, rid: str, tenant: Tenant, everybody: Everybody) -> dict[str, Any]:
    """Why chunks of one of the caller's last prompts were not cached.

        {"rid": "5b1e…", "time": 1763900000.1, "link": "block", "cache_salt": null, "chunks": [
          {"id": "9f0c…", "tokens": 812, "hit": false, "reason": "white space", "like": {"id": "0c8e…"},
           "words": "chunk 0c8e… was used before, and has the same text but for white space at its ends"}]}

    rid: `meta_info.id` of the answer, or the id of an OpenAI answer.
    chunks: those of the prompt, in its order; only those that were not cached have the last three fields.
    reason, words: one of `misses.WORDS`, and what it means.
    like: the chunk that is nearly the same, null without one.
    """
    with _refusing():
        return await chunk_calls.why(frontend, tenant, everybody, rid)


async def lazy_info(frontend: Process) -> dict[str, Any]:
    """The server's configuration. Only servers that understand chunks have this route."""
    return {"config": dataclasses.asdict(frontend.config)}


def add_routes(app: Any, frontend: Callable[[], Frontend]) -> None:
    """Add the routes, once.  frontend: returns the state of this process."""
    app.state.lazy_frontend = frontend
    if not any(getattr(route, "path", None) == CHUNKS_ROUTE for route in app.router.routes):
        app.get(INFO_ROUTE)(lazy_info)
        app.get(CHUNKS_ROUTE, **chunk_schemas.LIST)(list_chunks)
        app.post(CHUNKS_ROUTE, **chunk_schemas.REGISTER)(register_chunks)
        app.get(CHUNKS_ROUTE + "/{chunk_id}", **chunk_schemas.GET)(get_chunk)
        app.patch(CHUNKS_ROUTE + "/{chunk_id}", **chunk_schemas.PATCH)(patch_chunk)
        app.delete(CHUNKS_ROUTE + "/{chunk_id}", **chunk_schemas.DELETE)(delete_chunk)
        app.delete(CHUNKS_ROUTE, **chunk_schemas.DELETE_SEVERAL)(delete_chunks)
        app.get(PAGE_ROUTE + "/survey")(survey)
        app.get(PAGE_ROUTE + "/uses/{chunk_id}")(uses)
        app.get(PAGE_ROUTE + "/why")(why)
