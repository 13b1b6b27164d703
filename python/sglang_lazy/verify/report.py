"""The report: policies side by side, and which one to use."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_lazy.verify.compare import Comparison
from sglang_lazy.verify.cost import Work
from sglang_lazy.verify.metrics import Metric, Thresholds, faster, measure, times

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
    recommended: the cheapest policy that passed, see `recommend`. None if none passed, or without thresholds.
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
        measured = {link: measure(comparisons, link, thresholds) for link in comparisons[0].linked}
        work = {link: Work.of(link, metrics["recomputed"].value) for link, metrics in measured.items()}
        _relieve(measured, work, comparisons)
        policies = {link: PolicyReport.of(metrics) for link, metrics in measured.items()}
        full_times = times(comparisons, "full")
        judged = any(policy.passed is not None for policy in policies.values())
        recommended = recommend([link for link, policy in policies.items() if policy.passed], work, comparisons)
        return cls(
            policies,
            statistics.median(full_times) if full_times else None,
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


def _relieve(
    measured: Mapping[str, dict[str, Metric]], work: Mapping[str, Work], comparisons: Sequence[Comparison]
) -> None:
    """Let a policy meet the budget if another one meets it with more work and is not measurably faster: then only noise
    separates their times."""
    within = [link for link, metrics in measured.items() if "ttft_ms" in metrics and metrics["ttft_ms"].passed]
    for link, metrics in measured.items():
        if "ttft_ms" in metrics and metrics["ttft_ms"].passed is False:
            busier = [other for other in within if work[other].exceeds(work[link])]
            if any(not faster(comparisons, other, link) for other in busier):
                metrics["ttft_ms"] = dataclasses.replace(metrics["ttft_ms"], passed=True)


def recommend(passed: Sequence[str], work: Mapping[str, Work], comparisons: Sequence[Comparison]) -> str | None:
    """The cheapest of the policies that passed: none is measurably faster and, of those for which this holds, none does
    less work.

    One that does more work than another is not considered, whatever times were measured: it would recompute for
    nothing. Of equals, the one that was named first.
    """
    needed = [link for link in passed if not any(work[link].exceeds(work[other]) for other in passed)]
    # Medians of pairs may go round in a circle, so perhaps each has a faster one.
    num_faster = {link: sum(faster(comparisons, other, link) for other in needed) for link in needed}
    return min(needed, key=lambda link: (num_faster[link], work[link]), default=None)


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
