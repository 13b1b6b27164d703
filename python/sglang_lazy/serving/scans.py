"""Scans of all chunks, which ask the scheduler for a few at a time, so that batches run in between."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

AskForNext = Callable[[Mapping[int, int] | None], Awaitable[Sequence[dict[str, Any]]]]
"""Returns the answers of `ChunkControl` for these `starts`, one from each data-parallel rank."""
Scanned = Sequence[tuple[int, dict[str, Any]]]
"""Answers, each with the data-parallel rank that gave it."""


async def scan(ask: AskForNext) -> Scanned:
    """All answers of all ranks."""
    scanned: list[tuple[int, dict[str, Any]]] = []
    starts: dict[int, int] | None = None
    while starts is None or starts:
        answered = [(rank, answer) for rank, answer in enumerate(await ask(starts)) if answer]
        scanned += answered
        starts = {rank: answer["next"] for rank, answer in answered if answer["next"] is not None}
    return scanned
