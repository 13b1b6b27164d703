"""Metrics of a policy with confidence intervals, and thresholds for them."""

import dataclasses
import math
import statistics
from collections.abc import Sequence

from sglang_lazy.core.config import BadSetting
from sglang_lazy.verify.cases import Prompt
from sglang_lazy.verify.compare import Comparison, common_beginning
from sglang_lazy.verify.cost import rotate_chunks
from sglang_lazy.verify.scores import bootstrap, exact_match, f1, mostly, wilson

NOISE = 0.05
"""Times that differ by less than this fraction count as equal."""

_LIMITS = {
    "agreement": ("min_agreement", ">="),
    "first_token_agreement": ("min_first_token_agreement", ">="),
    "kl_first_token": ("max_kl", "<="),
    "em_drop": ("max_em_drop", "<="),
    "f1_drop": ("max_f1_drop", "<="),
    "ttft_ms": ("budget_ms", "<="),
}
"""By metric, the field of `Thresholds` that limits it, and the comparison."""


@dataclasses.dataclass(frozen=True)
class Thresholds:
    """Limits for a policy to be good enough; None sets no limit.

    min_agreement, min_first_token_agreement: shares of prompts, 0..1. max_kl: mean KL of the first token, in nats.
    max_em_drop, max_f1_drop: points of 100 that a policy may lose against full. budget_ms: median time to the first
    token with the documents cached, in milliseconds. Raises BadSetting on impossible values.
    """

    min_agreement: float | None = None
    min_first_token_agreement: float | None = None
    max_kl: float | None = None
    max_em_drop: float | None = None
    max_f1_drop: float | None = None
    budget_ms: float | None = None

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            most = 1 if name.startswith("min_") else math.inf
            if value is not None and not 0 <= value <= most:
                raise BadSetting(name, f"must be at least 0{' and at most 1' if most == 1 else ''}, got {value}")

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raise BadSetting if a threshold cannot be measured with these prompts."""
        has_answers = any(prompt.answers for prompt in prompts)
        for name in ("max_em_drop", "max_f1_drop"):
            if getattr(self, name) is not None and not has_answers:
                raise BadSetting(name, "needs prompts with gold answers")
        if self.budget_ms is not None and all(rotate_chunks(prompt.segments) == prompt.segments for prompt in prompts):
            raise BadSetting("budget_ms", "needs prompts with at least two different chunks")


@dataclasses.dataclass(frozen=True)
class Metric:
    """A mean over prompts (for times, the median), its 95% interval (None for fewer than two prompts), and the verdict
    if it has a threshold."""

    value: float
    interval: tuple[float, float] | None
    threshold: str | None = None
    passed: bool | None = None


def times(comparisons: Sequence[Comparison], link: str) -> list[float]:
    """Milliseconds to the first token under a policy, or link full, of the prompts that were timed."""
    return [time for one in comparisons if (time := one.costs[link].ttft_ms) is not None]


def faster(comparisons: Sequence[Comparison], link: str, other: str) -> bool:
    """Whether `link` is measurably faster than `other`: by more than `NOISE`, in significantly more than half of the
    prompts (one-sided sign test, 2.5%), which takes at least six of them. Outliers have no more weight than others."""
    pairs = zip(times(comparisons, link), times(comparisons, other), strict=True)
    return mostly([time < (1 - NOISE) * other_time for time, other_time in pairs])


def measure(comparisons: Sequence[Comparison], link: str, thresholds: Thresholds) -> dict[str, Metric]:
    """The metrics of one policy by name; scores and times only if there are gold answers and measured times."""
    pairs = [(one.full, one.linked[link]) for one in comparisons]
    samples: dict[str, list[float]] = {
        "agreement": [full.tokens == linked.tokens for full, linked in pairs],
        "first_token_agreement": [full.tokens[:1] == linked.tokens[:1] for full, linked in pairs],
        "common_prefix": [common_beginning(full.tokens, linked.tokens) for full, linked in pairs],
        "kl_first_token": [linked.kl[0] for _, linked in pairs],
        "kl_answer": [sum(linked.kl) / len(linked.kl) for _, linked in pairs],
        "kl_mass": [one.mass for one in comparisons],
    }
    judged = [(one.prompt.answers, one.full, one.linked[link]) for one in comparisons if one.prompt.answers]
    if judged:
        for name, score in (("em", exact_match), ("f1", f1)):
            before = [100 * score(full.text, gold) for gold, full, _ in judged]
            after = [100 * score(linked.text, gold) for gold, _, linked in judged]
            samples[f"{name}_full"], samples[f"{name}_linked"] = before, after
            samples[f"{name}_drop"] = [left - right for left, right in zip(before, after, strict=True)]
    samples["recomputed"] = [one.costs[link].recomputed for one in comparisons]
    if measured := times(comparisons, link):
        samples["ttft_ms"] = measured
    return {name: _metric(name, values, thresholds) for name, values in samples.items()}


def _metric(name: str, values: list[float], thresholds: Thresholds) -> Metric:
    if name == "ttft_ms":
        value, interval = statistics.median(values), bootstrap(values, "median")
    else:
        value = sum(values) / len(values)
        interval = wilson(values) if name.endswith("agreement") else bootstrap(values)
    field, comparison = _LIMITS.get(name, (None, ""))
    limit = None if field is None else getattr(thresholds, field)
    if limit is None:
        return Metric(value, interval)
    passed = value >= limit if comparison == ">=" else value <= limit
    return Metric(value, interval, f"{comparison} {limit:g}", passed)
