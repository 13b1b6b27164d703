"""Queries over all chunks, which ask the scheduler for one piece of them at a time, so that batches run in between."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

AskPiece = Callable[[Mapping[int, int] | None], Awaitable[Sequence[dict[str, Any]]]]
"""Returns the answers of `ChunkControl` for these `starts`, one from each data-parallel rank."""
Pieces = Sequence[tuple[int, dict[str, Any]]]
"""Answers, each with the data-parallel rank that gave it."""


async def all_pieces(ask: AskPiece) -> Pieces:
    """The pieces of all ranks."""
    pieces: list[tuple[int, dict[str, Any]]] = []
    starts: dict[int, int] | None = None
    while starts is None or starts:
        answered = [(rank, answer) for rank, answer in enumerate(await ask(starts)) if answer]
        pieces += answered
        starts = {rank: answer["next"] for rank, answer in answered if answer["next"] is not None}
    return pieces
