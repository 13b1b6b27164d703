"""How right an answer is: exact match and F1 as SQuAD defines them, ROUGE-L, and confidence intervals.

Exact match and F1: Rajpurkar et al., "SQuAD: 100,000+ Questions for Machine Comprehension of Text" (EMNLP 2016), in
the form of the official evaluation of version 1.1. ROUGE-L is `rouge-score`'s, with stemming.
"""

import collections
import functools
import math
import random
import re
import string
from collections.abc import Sequence

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLE = re.compile(r"\b(a|an|the)\b")


def normalise(text: str) -> str:
    """Lower case, without punctuation, articles and superfluous white space."""
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, answers: list[str]) -> float:
    """1 if the normalised prediction is one of the normalised answers, else 0."""
    return float(normalise(prediction) in map(normalise, answers))


def f1(prediction: str, answers: list[str]) -> float:
    """Harmonic mean of precision and recall of words, with the answer that gives the most. 0 without common words."""
    return max(_f1(normalise(prediction).split(), normalise(answer).split()) for answer in answers)


def _f1(predicted: list[str], right: list[str]) -> float:
    common = sum((collections.Counter(predicted) & collections.Counter(right)).values())
    return 2 * common / (len(predicted) + len(right)) if common else 0.0


def rouge_l(prediction: str, answers: list[str]) -> float:
    """F-measure of the longest common subsequence of words, with the answer that gives the most."""
    return max(_rouge_scorer().score(answer, prediction)["rougeL"].fmeasure for answer in answers)


@functools.cache
def _rouge_scorer():
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"], use_stemmer=True)


def wilson_interval(successes: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval of a proportion (1927); z = 1.96 for 95%."""
    share, inverse = successes / count, z * z / count
    centre = (share + inverse / 2) / (1 + inverse)
    half = z / (1 + inverse) * math.sqrt(share * (1 - share) / count + inverse / (4 * count))
    return max(0.0, centre - half), min(1.0, centre + half)


def bootstrap_interval(values: Sequence[float], resamples: int = 1000, seed: int = 0) -> tuple[float, float]:
    """The 2.5th and 97.5th percentile of the means of seeded resamples."""
    rng = random.Random(seed)
    means = sorted(sum(rng.choices(values, k=len(values))) / len(values) for _ in range(resamples))
    return means[round(0.025 * (resamples - 1))], means[round(0.975 * (resamples - 1))]
