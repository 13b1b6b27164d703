"""The limit on the chunks of a request, as known before the request is read."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException
from sglang.srt.entrypoints import http_server

from sglang_lazy.core.segments import ChunkLimit, TooManyChunks
from sglang_lazy.serving.requests import chunk_limit


def limit_of(body: Mapping[str, Any]) -> ChunkLimit:
    """The limit on the chunks of each prompt in the JSON of a request."""
    state = http_server.get_global_state()
    return chunk_limit(body.get("link"), math.inf if state is None else state.tokenizer_manager.context_len)


@contextlib.contextmanager
def taking_chunks() -> Iterator[None]:
    """A context for validators that take chunks out of a body: too many are answered with a 400 at once. As an error of
    validation, it would be reported together with the whole body."""
    try:
        yield
    except TooManyChunks as error:
        raise HTTPException(HTTPStatus.BAD_REQUEST, str(error)) from None
