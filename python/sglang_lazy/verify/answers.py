"""Scores of an answer against gold answers, as SQuAD defines them: lower case, no punctuation, no articles.

The formulas are those of Hugging Face transformers, which SGLang pins.
"""

from collections.abc import Sequence


def exact_match(answer: str, gold: Sequence[str]) -> float:
    """1.0 if `answer` equals one of the `gold` answers, else 0.0."""
    from transformers.data.metrics.squad_metrics import compute_exact

    return float(max(compute_exact(one, answer) for one in gold))


def f1(answer: str, gold: Sequence[str]) -> float:
    """The best F1, over words, of `answer` against one of the `gold` answers, in 0..1."""
    from transformers.data.metrics.squad_metrics import compute_f1

    return float(max(compute_f1(one, answer) for one in gold))
