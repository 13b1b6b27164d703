"""Measure whether chunk reuse is good enough for a model and its prompts, and with which policy.

    from sglang_lazy.verify import Thresholds, verify

    report = verify(engine.generate, prompts, Thresholds(max_kl=0.1), policies=["block", "base+query:ratio=0.15"])
    print(report)

As a command: `python -m sglang_lazy.verify --help`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sglang_lazy.verify.cases import Prompt, parse_prompt
from sglang_lazy.verify.compare import compare
from sglang_lazy.verify.cost import Generate
from sglang_lazy.verify.metrics import Thresholds
from sglang_lazy.verify.policies import ALL
from sglang_lazy.verify.remote import connect
from sglang_lazy.verify.report import Report

__all__ = ["ALL", "Report", "Thresholds", "connect", "verify"]


def verify(
    generate: Generate,
    prompts: Iterable[Mapping[str, Any]],
    thresholds: Thresholds | None = None,
    *,
    policies: Sequence[str] | None = None,
    max_new_tokens: int = 32,
    stop: list[str] | None = None,
) -> Report:
    """Answer every prompt greedily with link full and under each policy, and compare.

    generate: `Engine.generate` of an engine with chunk reuse, or `connect(url)` for a running server.
    prompts: objects like the lines of the command's file: `segments` as in `/generate`, or `docs` (each with `title`
        and `text`) and `question`; optionally `answers`, a list of gold answers.
    thresholds: limits for the verdict; without any there is no verdict.
    policies: links, such as those in `ALL`; None for the server's default.
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
    links = _links(generate, parsed[0], policies)
    return Report.of(compare(generate, parsed, links, max_new_tokens=max_new_tokens, stop=stop), thresholds)


def _links(generate: Generate, prompt: Prompt, policies: Sequence[str] | None) -> list[str]:
    """The policies in the server's notation, each once."""
    params = {"temperature": 0, "max_new_tokens": 0}
    links: dict[str, None] = {}
    for policy in [None] if policies is None else policies:
        (result,) = generate(segments=[prompt.segments], link=policy, sampling_params=params)
        links[result["meta_info"]["link"]] = None
    if "full" in links:
        raise ValueError("link full is what policies are compared with: name others with --policies")
    return list(links)
