"""The recent agreement of each policy's answers with those under link full, and an alarm when it is too low."""

import logging
from collections import deque
from collections.abc import Callable

logger = logging.getLogger(__name__)

WINDOW = 200
"""The number of a policy's most recent comparisons that count."""

ENOUGH = 20
"""The minimum number of comparisons for an alarm."""

_MAX_LINKS = 64  # clients choose links, and each link adds time series

GAUGES = {
    "agreement": (f"Share of the last {WINDOW} answers compared that were as under link full.", ("link", "of")),
    "alarm": ("1 while agreement of answers is below --lazy-shadow-min-agreement, else 0.", ("link",)),
}
"""Help text and labels of each gauge."""


class RecentAgreement:
    """Agreement over a sliding window for each policy.

    minimum: share of identical answers below which there is an alarm, 0..1.
    publish: sets a gauge, from its name in `GAUGES`, its value, and its labels as keywords.
    """

    def __init__(self, minimum: float, publish: Callable[..., None]):
        self.minimum = minimum
        self._publish = publish
        self._recent: dict[str, deque[tuple[bool, bool]]] = {}
        self._low: set[str] = set()

    def add(self, link: str, answer: bool, first_token: bool) -> None:
        """Record a comparison under `link`: whether the whole answer was the same, and whether its first token was."""
        if link not in self._recent:
            if len(self._recent) == _MAX_LINKS:
                return
            self._recent[link] = deque(maxlen=WINDOW)
        recent = self._recent[link]
        recent.append((answer, first_token))
        answers, first_tokens = (sum(outcomes) / len(recent) for outcomes in zip(*recent, strict=True))
        if answers >= self.minimum:
            self._low.discard(link)
        elif len(recent) >= ENOUGH and link not in self._low:
            self._low.add(link)
            logger.warning(
                "sglang-lazy: under link %s, %.3f of the last %d answers compared are the same as under link full, "
                "less than --lazy-shadow-min-agreement %g",
                link,
                answers,
                len(recent),
                self.minimum,
            )
        self._publish("agreement", answers, link=link, of="answers")
        self._publish("agreement", first_tokens, link=link, of="first_tokens")
        self._publish("alarm", int(link in self._low), link=link)
