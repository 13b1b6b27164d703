"""Too many chunks, which are found while a request is read."""

import contextlib
from collections.abc import Iterator
from http import HTTPStatus

from fastapi import HTTPException

from sglang_lazy.core.segments import TooManyChunks


@contextlib.contextmanager
def taking_chunks() -> Iterator[None]:
    """A context for validators that take chunks out of a body: too many are answered with a 400 at once. As an error of
    validation, it would be reported together with the whole body."""
    try:
        yield
    except TooManyChunks as error:
        raise HTTPException(HTTPStatus.BAD_REQUEST, str(error)) from None
