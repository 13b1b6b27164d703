"""Warnings to the operator about traffic that gains nothing from chunks, or that waits for pinned memory."""

import logging
import time
from array import array
from collections.abc import Callable
from typing import Any

from sglang_lazy.chunks.counts import Counts
from sglang_lazy.core.fills import Encoding, Fill
from sglang_lazy.core.state import linked

logger = logging.getLogger(__name__)

PERIOD = 600
"""Seconds between two warnings of one kind."""
WINDOW = 1000
"""Number of computed chunks over which to judge the traffic."""
FEW_HITS = WINDOW // 100
MANY_ALIKE = 32
"""This many chunks that share half of their tokens are taken for one template with a changing part."""
MIN_LEN = 64
"""Minimum tokens of chunks to compare: short ones may well begin or end alike."""
SAMPLES = 32
"""How many tokens to compare of each half."""
PATIENCE = 5
"""How many seconds pins may keep a prompt waiting without a warning."""


class Warnings:
    """Watches the traffic of one scheduler, at the cost of a few operations for each computed chunk.

    speaks: whether to log; false on all but one tensor-parallel rank.
    clock: in seconds.
    """

    def __init__(self, counts: Counts, clock: Callable[[], float] = time.monotonic):
        self.speaks = True
        self._counts, self._clock = counts, clock
        self._warned: dict[str, float] = {}
        self._blocked: tuple[str | None, float] = (None, 0.0)
        self._open_window()

    def _open_window(self) -> None:
        self._num_computed, self._num_hits = 0, self._counts.num_hits
        self._compared: set[bytes] = set()
        self._num_alike: dict[tuple, int] = {}

    def computed(self, fill: Fill | Encoding) -> None:
        """Note chunks that were missing and are computed."""
        if _is_ahead_of_use(fill):
            return
        for chunk in fill.chunks:
            if chunk.num_tokens >= MIN_LEN and chunk.key.tokens not in self._compared:
                self._compared.add(chunk.key.tokens)
                self._compare(chunk.tokens)
        self._num_computed += len(fill.chunks)
        if self._num_computed >= WINDOW:
            num_hits = self._counts.num_hits - self._num_hits
            if num_hits < FEW_HITS:
                self._warn(
                    "unused",
                    "%d chunks were computed while prompts found %d cached: send text that does not recur as text, or "
                    "use link full",
                    self._num_computed,
                    num_hits,
                )
            self._open_window()

    def _compare(self, tokens: array) -> None:
        # Rounded, so that chunks of almost the same length compare the same part.
        half = len(tokens) // 2
        half -= half % (1 << max(0, half.bit_length() - 4))
        step = half // SAMPLES or 1
        for where, part in (("first", tokens[:half:step]), ("last", tokens[: -half - 1 : -step])):
            alike = where, half, part.tobytes()
            count = self._num_alike[alike] = self._num_alike.get(alike, 0) + 1
            if count == MANY_ALIKE:
                self._warn(
                    "changing",
                    "%d chunks share their %s %d tokens, about half of each: if your template puts a date or a "
                    "question into the chunk, move it into text, as each variant is computed anew",
                    MANY_ALIKE,
                    where,
                    half,
                )

    def blocked(self, rid: str, num_short: float, num_pinned: int) -> None:
        """Note that the first prompt not admitted lacks `num_short` tokens of memory, while `num_pinned` are pinned."""
        now = self._clock()
        if num_pinned < num_short:
            self._blocked = (None, now)
        elif rid != self._blocked[0]:
            self._blocked = (rid, now)
        elif now - self._blocked[1] >= PATIENCE:
            self._warn(
                "pins",
                "a prompt has been waiting for memory for %.0f seconds: it lacks %d tokens, and %d are pinned; pin "
                "less, or let pins end (ttl)",
                now - self._blocked[1],
                num_short,
                num_pinned,
            )

    def _warn(self, kind: str, message: str, *args: Any) -> None:
        now = self._clock()
        if self.speaks and now - self._warned.get(kind, -PERIOD) >= PERIOD:
            self._warned[kind] = now
            logger.warning("sglang-lazy: " + message, *args)


def _is_ahead_of_use(fill: Fill | Encoding) -> bool:
    """Whether its prompt has almost nothing but chunks, because they are being registered or precomputed."""
    state = linked(fill.owner)
    return state is not None and sum(state.prompt.span_lens) <= 2
