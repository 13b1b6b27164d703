"""ROUGE-L for summaries, from `rouge-score` with stemming."""

import functools


def rouge_l(prediction: str, answers: list[str]) -> float:
    """F-measure of the longest common subsequence of words, maximum over the answers."""
    return max(_scorer().score(answer, prediction)["rougeL"].fmeasure for answer in answers)


@functools.cache
def _scorer():
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"], use_stemmer=True)
