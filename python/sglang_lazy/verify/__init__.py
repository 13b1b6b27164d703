"""Is chunk reuse good enough for a model and its prompts? Answers with link full and block, compares, and judges.

    from sglang_lazy.verify import Thresholds, verify

    report = verify(engine.generate, prompts, Thresholds(min_agreement=0.95, max_kl=0.1))
    print(report)

As a command: `python -m sglang_lazy.verify --help`.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from sglang_lazy.verify.cases import parse_prompt
from sglang_lazy.verify.compare import Generate, compare
from sglang_lazy.verify.remote import connect
from sglang_lazy.verify.report import Report, Thresholds, summarize

__all__ = ["Report", "Thresholds", "connect", "verify"]


def verify(
    generate: Generate,
    prompts: Iterable[Mapping[str, Any]],
    thresholds: Thresholds | None = None,
    *,
    max_new_tokens: int = 32,
    stop: list[str] | None = None,
) -> Report:
    """Answer every prompt greedily with link full and with link block, and compare.

    generate: `Engine.generate` of an engine with chunk reuse, or `connect(url)` for a running server.
    prompts: objects like the lines of the command's file: `segments` as in `/generate`, or `docs` (each with `title`
        and `text`) and `question`; optionally `answers`, a list of gold answers.
    thresholds: what the verdict judges; without any there is no verdict.
    max_new_tokens, stop: where answers end.

    Raises ValueError, naming the prompt, for a prompt that cannot be compared, and for thresholds on exact match or F1
    without gold answers. Errors of `generate` pass through.
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
    thresholds.check(has_answers=any(prompt.answers for prompt in parsed))
    comparisons = compare(generate, parsed, max_new_tokens=max_new_tokens, stop=stop)
    return summarize(comparisons, thresholds)
