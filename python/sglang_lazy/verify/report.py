"""Summarizes comparisons: metrics with intervals, thresholds, a verdict."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from sglang_lazy.verify.compare import Comparison
from sglang_lazy.verify.scores import bootstrap, exact_match, f1, wilson

_LABELS = {
    "agreement": "identical answers",
    "first_token_agreement": "identical first tokens",
    "common_prefix": "common beginning of the answers",
    "kl_first_token": "KL of the first token, nats",
    "kl_answer": "KL along the answer, nats",
    "kl_mass": "share of probability in the KL",
    "em_full": "exact match, full, %",
    "em_block": "exact match, block, %",
    "em_drop": "exact match lost, points",
    "f1_full": "F1, full, %",
    "f1_block": "F1, block, %",
    "f1_drop": "F1 lost, points",
}


@dataclasses.dataclass(frozen=True)
class Thresholds:
    """Limits for chunk reuse to be good enough; what is None is not judged.

    min_agreement, min_first_token_agreement: shares of prompts, 0..1. max_kl: mean KL of the first token, in nats.
    max_em_drop, max_f1_drop: points of 100 that block may lose against full. Raises ValueError on impossible values.
    """

    min_agreement: float | None = None
    min_first_token_agreement: float | None = None
    max_kl: float | None = None
    max_em_drop: float | None = None
    max_f1_drop: float | None = None

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            most = 1 if name.startswith("min_") else math.inf
            if value is not None and not 0 <= value <= most:
                raise ValueError(f"{name} must be at least 0{' and at most 1' if most == 1 else ''}, got {value}")

    def check(self, has_answers: bool) -> None:
        """Raise ValueError if a threshold needs gold answers and there are none."""
        for name in ("max_em_drop", "max_f1_drop"):
            if getattr(self, name) is not None and not has_answers:
                raise ValueError(f"{name} needs prompts with gold answers")

    def of(self, metric: str) -> tuple[str, float] | None:
        """The comparison (">=" or "<=") and the limit for `metric`, or None if it is not judged."""
        name = {"kl_first_token": "kl"}.get(metric, metric)
        for prefix, comparison in (("min_", ">="), ("max_", "<=")):
            limit = getattr(self, prefix + name, None)
            if limit is not None:
                return comparison, limit
        return None


@dataclasses.dataclass(frozen=True)
class Metric:
    """A mean over prompts, its 95% interval (None for fewer than two prompts), and the verdict if it is judged."""

    value: float
    interval: tuple[float, float] | None
    threshold: str | None = None
    passed: bool | None = None


@dataclasses.dataclass(frozen=True)
class Report:
    """metrics: by name; those of gold answers only if there are any. passed: None if nothing was judged."""

    metrics: dict[str, Metric]
    passed: bool | None
    comparisons: list[Comparison]

    def to_dict(self) -> dict[str, Any]:
        """The whole report, with every prompt's answers, ready for JSON."""
        return {"prompts": len(self.comparisons), **dataclasses.asdict(self)}

    def __str__(self) -> str:
        lines = [f"{len(self.comparisons)} prompts, answered greedily with link full and with link block", ""]
        lines.append(f"{'':32} {'measured':>9}  {'95% interval':>18}  threshold")
        for name, metric in self.metrics.items():
            interval = "" if metric.interval is None else "{:.4f} to {:.4f}".format(*metric.interval)
            verdict = "" if metric.threshold is None else f"{metric.threshold}  {'pass' if metric.passed else 'FAIL'}"
            lines.append(f"{_LABELS[name]:32} {metric.value:9.4f}  {interval:>18}  {verdict}".rstrip())
        verdict = {None: "No thresholds were set, so there is no verdict.", True: "PASS", False: "FAIL"}[self.passed]
        return "\n".join([*lines, "", verdict])


def summarize(comparisons: Sequence[Comparison], thresholds: Thresholds) -> Report:
    """The report: shares with Wilson's interval, other means with a bootstrap over prompts."""
    samples: dict[str, list[float]] = {
        "agreement": [one.full == one.block for one in comparisons],
        "first_token_agreement": [one.full[:1] == one.block[:1] for one in comparisons],
        "common_prefix": [one.common for one in comparisons],
        "kl_first_token": [one.kl[0] for one in comparisons],
        "kl_answer": [sum(one.kl) / len(one.kl) for one in comparisons],
        "kl_mass": [one.mass for one in comparisons],
    }
    judged = [one for one in comparisons if one.prompt.answers]
    if judged:
        for name, score in (("em", exact_match), ("f1", f1)):
            full, block = (
                [100 * score(getattr(one, text), one.prompt.answers) for one in judged]
                for text in ("full_text", "block_text")
            )
            samples[f"{name}_full"], samples[f"{name}_block"] = full, block
            samples[f"{name}_drop"] = [left - right for left, right in zip(full, block, strict=True)]
    metrics = {name: _metric(name, values, thresholds) for name, values in samples.items()}
    verdicts = [metric.passed for metric in metrics.values() if metric.passed is not None]
    return Report(metrics, all(verdicts) if verdicts else None, list(comparisons))


def _metric(name: str, values: list[float], thresholds: Thresholds) -> Metric:
    value = sum(values) / len(values)
    interval = wilson(values) if name.endswith("agreement") else bootstrap(values)
    threshold = thresholds.of(name)
    if threshold is None:
        return Metric(value, interval)
    comparison, limit = threshold
    passed = value >= limit if comparison == ">=" else value <= limit
    return Metric(value, interval, f"{comparison} {limit:g}", passed)
