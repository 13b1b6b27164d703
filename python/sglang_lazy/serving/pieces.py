"""What looks at all chunks asks the scheduler for one piece of them at a time, so that batches go on in between."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

AskPiece = Callable[[Mapping[int, int] | None], Awaitable[Sequence[dict[str, Any]]]]
"""The answers of `ChunkControl`, one of each data-parallel rank, for these `starts`."""
Pieces = Sequence[tuple[int, dict[str, Any]]]
"""What the ranks answered, each with its rank."""


async def all_pieces(ask: AskPiece) -> Pieces:
    """Ask until all ranks have come to an end."""
    pieces: list[tuple[int, dict[str, Any]]] = []
    starts: dict[int, int] | None = None
    while starts is None or starts:
        answered = [(rank, answer) for rank, answer in enumerate(await ask(starts)) if answer]
        pieces += answered
        starts = {rank: answer["next"] for rank, answer in answered if answer["next"] is not None}
    return pieces
