"""Ids of stored responses. SGLang gives these to whoever knows an id: here one is valid only with the salt that it was
made for."""

import hmac
import secrets
import uuid

PREFIX = "resp_"
_NAME_LEN = 32
_SECRET = secrets.token_bytes(32)


def new_id(salt: str | None) -> str:
    """The id of a new response to a tenant."""
    name = uuid.uuid4().hex
    return f"{PREFIX}{name}{_signature(name, salt)}"


def is_of(salt: str | None, response_id: str) -> bool:
    """Whether this id was made for this tenant."""
    name = response_id.removeprefix(PREFIX)[:_NAME_LEN]
    return hmac.compare_digest(f"{PREFIX}{name}{_signature(name, salt)}".encode(), response_id.encode())


def _signature(name: str, salt: str | None) -> str:
    owner = "" if salt is None else f"/{salt}"
    return hmac.digest(_SECRET, f"{name}{owner}".encode(), "sha256").hex()[:_NAME_LEN]
