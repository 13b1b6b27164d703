"""The description of the `/chunks` routes in `/openapi.json`: bodies, answers and errors.

The routes check bodies themselves: `Engine` takes the same ones, and their errors name the chunk at fault.
"""

from http import HTTPStatus
from typing import (
    Any,
    Literal,
    NotRequired,  # pydantic refuses that of typing before Python 3.12
)

from pydantic import ConfigDict
from typing_extensions import TypedDict

from sglang_lazy.core.names import MAX_NAME
from sglang_lazy.serving.chunk_lists import MAX_TTL
from sglang_lazy.serving.registration import MAX_CHUNKS


class Answer(TypedDict):
    """An answer, or a part of one, that has these fields and no others."""

    # Where pydantic looks for it; to mypy, a TypedDict assigns nothing.
    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]


class CachedChunk(Answer):
    id: str
    digest: str
    tokens: int
    state_bytes: NotRequired[int]
    draft_bytes: NotRequired[int]
    state: Literal["pending", "fetching", "host", "loading", "resident"]
    tiers: list[Literal["device", "host"]]
    hits: int
    users: int
    last_use: float | None
    idle_seconds: NotRequired[float]
    pinned: bool
    pinned_until: float | None
    preamble: bool
    cache_salt: str | None
    lora_path: str | None
    dp_rank: int
    name: str | None
    metadata: dict[str, Any] | None


class ChunkPage(Answer):
    total: int
    next: str | None
    chunks: list[CachedChunk]


class WaitingRegistration(Answer):
    state: Literal["waiting"]


class FailedRegistration(Answer):
    state: Literal["failed"]
    reason: str


class ChunkStatus(Answer):
    chunks: list[CachedChunk]
    registration: WaitingRegistration | FailedRegistration | None


class SkippedChunk(Answer):
    id: str
    reason: str


class Changes(Answer):
    requested: int
    skipped: list[SkippedChunk]


class AcceptedChunks(Changes):
    accepted: list[str]


class RegisteredChunks(Changes):
    affected: list[str]


class DeletedChunk(Answer):
    id: str
    state: Literal["deleted", "in use"]


class DeletedChunks(Changes):
    affected: list[DeletedChunk]


class PinnedChunk(Answer):
    id: str
    pinned: bool
    pinned_until: float | None


class PinnedChunks(Changes):
    affected: list[PinnedChunk]


def _object(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "required": [*required], "properties": properties}


def _or_null(**schema: Any) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


_TEXT = {"type": "string", "minLength": 1}
_TOKENS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_KIND = {"const": "chunk"}
_TTL = _or_null(type="number", exclusiveMinimum=0, maximum=MAX_TTL)
_LABEL = {"name": _or_null(type="string", minLength=1, maxLength=MAX_NAME), "metadata": _or_null(type="object")}
_CHUNK = {
    "anyOf": [
        _TEXT,
        _object(("text",), text=_TEXT, type=_KIND, **_LABEL),
        _object(("input_ids",), input_ids=_TOKENS, type=_KIND, **_LABEL),
    ]
}
_REGISTRATION = _object(
    ("chunks",),
    chunks={"type": "array", "minItems": 1, "maxItems": MAX_CHUNKS, "items": _CHUNK},
    link=_or_null(**_TEXT),
    cache_salt=_or_null(**_TEXT),
    lora_path=_or_null(**_TEXT),
    wait={"type": "boolean", "default": False},
    pin={"type": "boolean", "description": "By default, whether there is a ttl field."},
    ttl=_TTL,
)
_PIN = _object(pin={"type": "boolean", "default": True}, ttl=_TTL) | {"minProperties": 1}


def _described(answer: Any, errors: tuple[HTTPStatus, ...] = (), body: Any = None, **others: Any) -> dict[str, Any]:
    """Arguments of a route's decorator.  others: answers by status, beside the usual one."""
    models = {HTTPStatus.OK: answer, **{HTTPStatus[name]: model for name, model in others.items()}}
    responses: dict[int, Any] = {int(status): {"model": model} for status, model in models.items()}
    for error in (HTTPStatus.BAD_REQUEST, HTTPStatus.UNAUTHORIZED, *errors):
        responses[int(error)] = {"description": error.phrase}
    if body is None:
        return {"responses": responses}
    content = {"application/json": {"schema": body}}
    return {"responses": responses, "openapi_extra": {"requestBody": {"required": True, "content": content}}}


LIST = _described(ChunkPage, (HTTPStatus.FORBIDDEN,))
REGISTER = _described(RegisteredChunks, (HTTPStatus.TOO_MANY_REQUESTS,), _REGISTRATION, ACCEPTED=AcceptedChunks)
GET = _described(ChunkStatus, (HTTPStatus.NOT_FOUND,))
PATCH = _described(PinnedChunks, (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT), _PIN)
DELETE = _described(DeletedChunks, (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT))
DELETE_SEVERAL = _described(DeletedChunks)
