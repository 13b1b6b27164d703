"""SQuAD's scores of an answer against gold answers, confidence intervals, and a test.

SQuAD compares in lower case, without punctuation and articles. The scores are computed by Hugging Face Transformers,
which SGLang pins.
"""

from collections.abc import Sequence
from typing import Literal


def exact_match(answer: str, gold: Sequence[str]) -> float:
    """1.0 if `answer` equals one of the `gold` answers, else 0.0."""
    from transformers.data.metrics.squad_metrics import compute_exact

    return float(max(compute_exact(one, answer) for one in gold))


def f1(answer: str, gold: Sequence[str]) -> float:
    """The best F1, over words, of `answer` against one of the `gold` answers, in 0..1."""
    from transformers.data.metrics.squad_metrics import compute_f1

    return float(max(compute_f1(one, answer) for one in gold))


def wilson(outcomes: Sequence[float]) -> tuple[float, float] | None:
    """Wilson's 95% interval of the share of ones among `outcomes`, each 0 or 1; None for fewer than two."""
    from scipy.stats import binomtest

    if len(outcomes) < 2:
        return None
    interval = binomtest(sum(outcomes), len(outcomes)).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)


def bootstrap(values: Sequence[float], center: Literal["mean", "median"] = "mean") -> tuple[float, float] | None:
    """The 95% percentile interval of the mean or median of `values`, from 2,000 seeded resamples; None for fewer than
    two values."""
    import numpy
    from scipy.stats import bootstrap

    if len(values) < 2:
        return None
    rng, statistic = numpy.random.default_rng(0), getattr(numpy, center)
    interval = bootstrap((values,), statistic, n_resamples=2000, method="percentile", rng=rng).confidence_interval
    return float(interval.low), float(interval.high)


def mostly(outcomes: Sequence[bool]) -> bool:
    """Whether significantly more than half of `outcomes` are true: one-sided sign test, 2.5%. Five are never enough."""
    from scipy.stats import binomtest

    return bool(outcomes) and bool(binomtest(sum(outcomes), len(outcomes), alternative="greater").pvalue < 0.025)
