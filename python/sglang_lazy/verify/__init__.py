"""Measure whether chunk reuse is good enough for a model and its prompts, and with which policy.

    from sglang_lazy.verify import Thresholds, verify

    report = verify(engine.generate, prompts, Thresholds(max_kl=0.1), policies=["block", "base+query:ratio=0.15"])
    print(report)

As a command: `python -m sglang_lazy.verify --help`.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from sglang_lazy.verify.budget import within_budget
from sglang_lazy.verify.cases import Prompt, parse_prompt
from sglang_lazy.verify.compare import answer_in_full, answer_linked, compared, measure_costs, ways
from sglang_lazy.verify.cost import Generate
from sglang_lazy.verify.metrics import NOISE, Thresholds, times
from sglang_lazy.verify.policies import ALL
from sglang_lazy.verify.remote import connect
from sglang_lazy.verify.report import Report

__all__ = ["ALL", "Report", "Thresholds", "connect", "verify"]


def verify(
    generate: Generate,
    prompts: Iterable[Mapping[str, Any]],
    thresholds: Thresholds | None = None,
    *,
    policies: Sequence[str] | Literal["all"] | None = None,
    max_new_tokens: int = 32,
    stop: list[str] | None = None,
) -> Report:
    """Answer every prompt greedily with link full and under each policy, and compare.

    generate: `Engine.generate` of an engine with chunk reuse, or `connect(url)` for a running server.
    prompts: objects like the lines of the command's file: `segments` as in `/generate`, or `docs` (each with `title`
        and `text`) and `question`; optionally `answers`, a list of gold answers.
    thresholds: limits for the verdict; without any there is no verdict.
    policies: links; "all" for those of `ALL` that the server does not refuse; None for the server's default.
    max_new_tokens, stop: end answers.

    Raises ValueError for a prompt that cannot be compared, naming it; for thresholds that cannot be measured with these
    prompts; and for link full, the reference of the comparison. Errors of `generate` pass through.
    """
    parsed = []
    for index, prompt in enumerate(prompts):
        try:
            parsed.append(parse_prompt(prompt))
        except ValueError as error:
            raise ValueError(f"prompts[{index}]: {error}") from None
    if not parsed:
        raise ValueError("there are no prompts")
    thresholds = thresholds or Thresholds()
    thresholds.check(parsed)
    links, left_out = _links(generate, parsed[0], policies)
    greedy = {"temperature": 0, "max_new_tokens": max_new_tokens, "stop": stop or []}
    sent = ways(generate, ["full", *links])
    references = answer_in_full(sent["full"], parsed, greedy)
    linked = answer_linked({link: sent[link] for link in links}, references, greedy)
    comparisons = compared(references, linked, measure_costs(sent, parsed))
    if thresholds.budget_ms is None:
        return Report.of(comparisons, thresholds, left_out=left_out)
    ttft_ms = {link: statistics.median(times(comparisons, link)) for link in links}
    # Below the budget: of the times measured next, noise would lift half above what they are expected to be.
    chosen = within_budget(ttft_ms, (1 - NOISE) * thresholds.budget_ms)
    if new := [link for link in chosen if link not in links]:
        # All are measured again, beside the new ones: the load may have changed, and caches have the new order by now.
        sent = ways(generate, ["full", *links, *new])
        more = answer_linked({link: sent[link] for link in new}, references, greedy)
        linked = [before | after for before, after in zip(linked, more, strict=True)]
        comparisons = compared(references, linked, measure_costs(sent, parsed))
    return Report.of(comparisons, thresholds, chosen, left_out)


def _links(
    generate: Generate, prompt: Prompt, policies: Sequence[str] | Literal["all"] | None
) -> tuple[list[str], dict[str, str]]:
    """The policies in the server's notation, each once; of all, those that it refuses, with its reason."""
    if policies == "all":
        return _supported(generate, prompt)
    named: Sequence[str | None] = [None] if policies is None else policies
    links = list(dict.fromkeys(_notation(generate, prompt, policy) for policy in named))
    if "full" in links:
        raise ValueError("link full is what policies are compared with: name others with --policies")
    return links, {}


def _supported(generate: Generate, prompt: Prompt) -> tuple[list[str], dict[str, str]]:
    """Those of `ALL` that the server can run, and its reasons for refusing the others. Raises ValueError if there are
    only others."""
    _notation(generate, prompt, "full")  # raises what no policy is to blame for
    links, left_out = [], {}
    for policy in ALL:
        try:
            links.append(_notation(generate, prompt, policy))
        except ValueError as error:
            left_out[policy] = str(error)
    if not links:
        raise ValueError(f"the server refuses every policy, {policy} with: {left_out[policy]}")
    return links, left_out


def _notation(generate: Generate, prompt: Prompt, policy: str | None) -> str:
    """A policy in the server's notation. Raises ValueError if it refuses the prompt under this policy."""
    params = {"temperature": 0, "max_new_tokens": 0}
    return generate(segments=prompt.segments, link=policy, sampling_params=params)["meta_info"]["link"]
