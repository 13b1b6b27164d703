"""The report: policies side by side, and which one to use."""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from sglang_lazy.verify.compare import Comparison
from sglang_lazy.verify.metrics import NOISE, Metric, Thresholds, measure

_LABELS = {
    "agreement": "identical answers",
    "first_token_agreement": "identical first tokens",
    "common_prefix": "common beginning of the answers",
    "kl_first_token": "KL of the first token, nats",
    "kl_answer": "KL along the answer, nats",
    "kl_mass": "share of probability in the KL",
    "em_full": "exact match, full, %",
    "em_linked": "exact match, %",
    "em_drop": "exact match lost, points",
    "f1_full": "F1, full, %",
    "f1_linked": "F1, %",
    "f1_drop": "F1 lost, points",
    "recomputed": "chunk tokens recomputed, share",
    "ttft_ms": "first token, documents cached, ms",
}
_COLUMNS = {
    "agreement": "same answer",
    "first_token_agreement": "same token",
    "kl_first_token": "KL first",
    "kl_answer": "KL answer",
    "em_drop": "EM lost",
    "f1_drop": "F1 lost",
    "recomputed": "recomputed",
    "ttft_ms": "TTFT, ms",
}


@dataclasses.dataclass(frozen=True)
class PolicyReport:
    """metrics: by name, see `measure`. passed: whether all thresholds are met; None without any."""

    metrics: dict[str, Metric]
    passed: bool | None

    @classmethod
    def of(cls, metrics: dict[str, Metric]) -> "PolicyReport":
        verdicts = [metric.passed for metric in metrics.values() if metric.passed is not None]
        return cls(metrics, all(verdicts) if verdicts else None)

    @property
    def verdict(self) -> str:
        failed = [_COLUMNS[name] for name, metric in self.metrics.items() if metric.passed is False]
        return "" if self.passed is None else "pass" if self.passed else f"FAIL: {', '.join(failed)}"


@dataclasses.dataclass(frozen=True)
class Report:
    """The results for all policies.

    policies: by link. full_ttft_ms: median time to the first token with link full, None if nothing was timed.
    recommended: the cheapest policy that passed: the fastest with the documents cached and, of those equally fast, the
        one that recomputes least. None if none passed, or without thresholds.
    passed: whether any policy passed; None without thresholds.
    within_budget: the links chosen by the cost model, each among `policies`, and the times it expects in milliseconds;
        empty without a budget.
    left_out: the policies that the server cannot run, with its reason.
    """

    policies: dict[str, PolicyReport]
    full_ttft_ms: float | None
    recommended: str | None
    passed: bool | None
    within_budget: dict[str, float]
    left_out: dict[str, str]
    comparisons: list[Comparison]

    @classmethod
    def of(
        cls,
        comparisons: Sequence[Comparison],
        thresholds: Thresholds,
        within_budget: dict[str, float] | None = None,
        left_out: dict[str, str] | None = None,
    ) -> "Report":
        """The report on all policies in `comparisons`."""
        policies = {link: PolicyReport.of(measure(comparisons, link, thresholds)) for link in comparisons[0].linked}
        times = [one.full.ttft_ms for one in comparisons if one.full.ttft_ms is not None]
        judged = any(policy.passed is not None for policy in policies.values())
        recommended = recommend(policies)
        return cls(
            policies,
            statistics.median(times) if times else None,
            recommended,
            recommended is not None if judged else None,
            within_budget or {},
            left_out or {},
            list(comparisons),
        )

    def to_dict(self) -> dict[str, Any]:
        """The whole report, with every prompt's answers, ready for JSON."""
        return {"prompts": len(self.comparisons), **dataclasses.asdict(self)}

    def __str__(self) -> str:
        lines = [f"{len(self.comparisons)} prompts, answered greedily with link full and with each policy", ""]
        lines += _table(self.policies, self.full_ttft_ms)
        if len(self.policies) == 1:
            (policy,) = self.policies.values()
            lines += ["", *_details(policy.metrics)]
        if self.within_budget:
            lines += ["", "Largest values for the budget, by a line through the times of other values; expected:"]
            lines += [f"  {link}  {ms:.1f} ms" for link, ms in self.within_budget.items()]
        if self.left_out:
            lines += ["", "Left out, because the server refuses them:"]
            lines += [f"  {link}  {reason}" for link, reason in self.left_out.items()]
        return "\n".join([*lines, "", self._verdict()])

    def _verdict(self) -> str:
        if self.passed is None:
            return "No thresholds were set, so there is no verdict."
        if self.recommended is None:
            return "FAIL: none of these policies meets the thresholds."
        return f"PASS: --lazy-default-link {self.recommended}"


def recommend(policies: dict[str, PolicyReport]) -> str | None:
    """The cheapest of the policies that passed, see `Report.recommended`."""
    measured = _times(policies)
    times = {link: measured.get(link, 0.0) for link, policy in policies.items() if policy.passed}
    if not times:
        return None
    fastest = [link for link, time in times.items() if time <= (1 + NOISE) * min(times.values())]
    return min(fastest, key=lambda link: policies[link].metrics["recomputed"].value)


def _times(policies: dict[str, PolicyReport]) -> dict[str, float]:
    """Milliseconds to the first token by link, for policies with measured times."""
    return {link: policy.metrics["ttft_ms"].value for link, policy in policies.items() if "ttft_ms" in policy.metrics}


def _table(policies: dict[str, PolicyReport], full_ttft_ms: float | None) -> list[str]:
    """A row for each policy, and one for link full."""
    names = [name for name in _COLUMNS if name in next(iter(policies.values())).metrics]
    full = dict.fromkeys(names, "")
    if full_ttft_ms is not None:
        full["ttft_ms"] = f"{full_ttft_ms:.1f}"
    cells = [["policy", *(_COLUMNS[name] for name in names), ""], ["full", *full.values(), ""]]
    for link, policy in policies.items():
        values = [f"{policy.metrics[name].value:.{1 if name == 'ttft_ms' else 4}f}" for name in names]
        cells.append([link, *values, policy.verdict])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index in (0, len(row) - 1) else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def _details(metrics: dict[str, Metric]) -> list[str]:
    """A row for each metric, with its interval and threshold."""
    lines = [f"{'':34} {'measured':>9}  {'95% interval':>20}  threshold"]
    for name, metric in metrics.items():
        interval = "" if metric.interval is None else "{:.4f} to {:.4f}".format(*metric.interval)
        verdict = "" if metric.threshold is None else f"{metric.threshold}  {'pass' if metric.passed else 'FAIL'}"
        lines.append(f"{_LABELS[name]:34} {metric.value:9.4f}  {interval:>20}  {verdict}".rstrip())
    return lines
