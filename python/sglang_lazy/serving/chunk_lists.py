"""Arguments of the `/chunks` routes, and answers merged from all data-parallel ranks."""

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import WithJsonSchema

from sglang_lazy.chunks.catalog import MAX_LIMIT, MIN_DIGITS, SORTS, STATES
from sglang_lazy.serving.scans import Scanned

DEFAULT_LIMIT = 100
MAX_TTL = 10**9
"""Seconds: 31 years."""


def _one_of(*values: str) -> Any:
    return WithJsonSchema({"type": "string", "enum": [*values]})


def list_arguments(
    sort: Annotated[str, _one_of(*SORTS)] = "last_use",
    order: Annotated[str, _one_of("asc", "desc")] = "desc",
    limit: Annotated[int, WithJsonSchema({"type": "integer", "minimum": 1, "maximum": MAX_LIMIT})] = DEFAULT_LIMIT,
    cursor: str | None = None,
    state: Annotated[str | None, _one_of(*STATES)] = None,
) -> dict[str, Any]:
    """The parsed query of `GET /chunks`. Raises ValueError for a bad value.

    The annotations serve only `/openapi.json`. In the result, `after` is the place of the previous page's last chunk,
    including its rank; None for the first page.
    """
    if sort not in SORTS:
        raise ValueError(f"sort must be one of {', '.join(SORTS)}, got {sort!r:.50}")
    if order not in ("asc", "desc"):
        raise ValueError(f"order must be asc or desc, got {order!r:.50}")
    if not 1 <= limit <= MAX_LIMIT:
        raise ValueError(f"limit must be between 1 and {MAX_LIMIT}, got {limit}")
    if state is not None and state not in STATES:
        raise ValueError(f"state must be one of {', '.join(STATES)}, got {state!r:.50}")
    after = None if cursor is None else _unpack(cursor, sort, order)
    return {"sort": sort, "descending": order == "desc", "limit": limit, "after": after, "state": state}


def arguments_of_ranks(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `ChunkControl.page` on every rank, except the tenant.  wanted: from `list_arguments`.

    They ask for one chunk more than the page has, to see whether another page follows. Each rank counts its places
    itself, so this page may have chunks of other ranks at the place where the previous page ended. The query therefore
    includes that place, and with it the previous page's last chunk.
    """
    if wanted["after"] is None:
        return {**wanted, "limit": wanted["limit"] + 1}
    value, serial, _ = wanted["after"]
    before = serial + 1 if wanted["descending"] else serial - 1
    return {**wanted, "after": (value, before), "limit": wanted["limit"] + 2}


def merged_page(scanned: Scanned, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """One page, merged from the answers of all data-parallel ranks to `arguments_of_ranks`.  wanted: as there."""
    sort, descending, limit, after = (wanted[name] for name in ("sort", "descending", "limit", "after"))
    rows = [
        ((*place, rank), {**chunk, "dp_rank": rank})
        for rank, answer in scanned
        for place, chunk in zip(answer["places"], answer["chunks"], strict=True)
    ]
    if after is not None:
        rows = [row for row in rows if (row[0] < after if descending else row[0] > after)]
    rows.sort(key=lambda row: row[0], reverse=descending)
    total = sum(answer["total"] for _, answer in scanned)
    page = rows[:limit]
    cursor = _pack(sort, "desc" if descending else "asc", page[-1][0]) if len(rows) > limit else None
    return {"total": total, "chunks": [chunk for _, chunk in page], "next": cursor}


def with_adapter_names(chunks: Sequence[dict[str, Any]], adapters: Mapping[str, str]) -> list[dict[str, Any]]:
    """Chunks as a scheduler describes them, with the name of each one's LoRA adapter in place of its id.

    adapters: ids by name. An adapter that is missing there, since it has just been unloaded, is shown by its id.
    """
    names = {adapter: name for name, adapter in adapters.items()}
    shown = []
    for chunk in chunks:
        adapter = chunk["adapter"]
        shown.append({**chunk, "lora_path": names.get(adapter, adapter)})
        del shown[-1]["adapter"]
    return shown


def merged_deletion(
    ids: Sequence[str], answers: Sequence[dict[str, Any]], forget: Callable[[str], bool]
) -> dict[str, Any]:
    """The answer to a deletion of these chunks, merged from the answers of all data-parallel ranks.

    forget: forgets an id that prompts may name; returns whether it was known.
    """
    reasons = {one["id"]: one["reason"] for answer in answers for one in answer["skipped"]}
    states: dict[str, str] = {}
    for one in (one for answer in answers for one in answer["affected"]):
        if states.get(one["id"]) != "in use":
            states[one["id"]] = one["state"]
    for name in ids:
        if reasons.get(name, "unknown") == "unknown" and forget(name):
            states.setdefault(name, "deleted")
    return {
        "requested": len(ids),
        "affected": [{"id": name, "state": states[name]} for name in ids if name in states],
        "skipped": [{"id": name, "reason": reasons[name]} for name in ids if name not in states],
    }


def check_id(chunk_id: str) -> str:
    """`chunk_id`, the first 16 or more hexadecimal digits of a digest. Raises ValueError for anything else."""
    if not MIN_DIGITS <= len(chunk_id) <= 64 or not set(chunk_id) <= set("0123456789abcdef"):
        raise ValueError(f"the id of a chunk has 16 to 64 hexadecimal digits, got {chunk_id!r:.80}")
    return chunk_id


def pin_arguments(body: Any) -> tuple[bool, float | None]:
    """`pin` and `ttl`, in seconds, in the body of a request that pins. Raises ValueError for bad ones."""
    if not isinstance(body, Mapping):
        raise ValueError("the body must be an object")
    if unknown := sorted(body.keys() - {"pin", "ttl"}):
        raise ValueError(f"unknown field {unknown[0]!r}")
    if not body:
        raise ValueError("give pin, ttl or both")
    pin, ttl = body.get("pin", True), body.get("ttl")
    if not isinstance(pin, bool):
        raise ValueError("pin must be true or false")
    if ttl is None:
        return pin, None
    if isinstance(ttl, bool) or not isinstance(ttl, int | float) or not 0 < ttl <= MAX_TTL:
        raise ValueError(f"ttl must be a number of seconds above 0 and at most {MAX_TTL}, or null")
    if not pin:
        raise ValueError("ttl is for a chunk that is pinned")
    return pin, float(ttl)


def _pack(sort: str, order: str, place: Sequence[float]) -> str:
    return base64.urlsafe_b64encode(json.dumps([sort, order, *place]).encode()).decode()


def _unpack(cursor: str, sort: str, order: str) -> tuple[float, int, int]:
    try:
        of_sort, of_order, value, serial, rank = json.loads(base64.urlsafe_b64decode(cursor.encode("ascii")))
        place = float(value), int(serial), int(rank)
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise ValueError(f"cursor {cursor!r:.80} is not one of this server's") from None
    if (of_sort, of_order) != (sort, order):
        raise ValueError("the cursor belongs to a list with a different sort or order")
    return place
