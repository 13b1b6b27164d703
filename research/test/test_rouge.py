"""ROUGE-L against values computed by hand."""

import pytest

from research.quality.rouge import rouge_l


def test_rouge_l():
    """Longest common subsequence 3 of 4 and 6 words: precision 3/4, recall 1/2."""
    assert rouge_l("the cat sat down", ["the black cat sat on mats"]) == pytest.approx(2 * 0.75 * 0.5 / 1.25)
    assert rouge_l("cats", ["dogs", "cat"]) == 1.0  # equal after stemming
