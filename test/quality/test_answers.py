"""Metrics against values computed by hand."""

import pytest
from answers import bootstrap_interval, exact_match, f1, rouge_l, wilson_interval


@pytest.mark.parametrize(
    ("prediction", "answers", "right"),
    [
        ("The Eiffel Tower.", ["eiffel tower"], 1),
        ("an  apple", ["Apple!"], 1),
        ("1889", ["1888", "1889"], 1),
        ("tower", ["eiffel tower"], 0),
        ("", ["x"], 0),
        ("theatre", ["atre"], 0),  # an article is a word
    ],
)
def test_exact_match(prediction, answers, right):
    assert exact_match(prediction, answers) == right


@pytest.mark.parametrize(
    ("prediction", "answers", "value"),
    [
        ("the eiffel tower", ["Eiffel Tower"], 1.0),
        ("eiffel tower in paris", ["eiffel tower"], 2 * 0.5 * 1 / 1.5),
        ("a tower", ["eiffel tower", "the tower"], 1.0),  # the best of the answers
        ("no no no yes", ["no no"], 2 * 0.5 * 1 / 1.5),  # words count as often as they occur
        ("paris", ["london"], 0.0),
        ("", [""], 0.0),
    ],
)
def test_f1(prediction, answers, value):
    assert f1(prediction, answers) == pytest.approx(value)


def test_rouge_l():
    """Longest common subsequence 3 of 4 and 6 words: precision 3/4, recall 1/2."""
    assert rouge_l("the cat sat down", ["the black cat sat on mats"]) == pytest.approx(2 * 0.75 * 0.5 / 1.25)
    assert rouge_l("cats", ["dogs", "cat"]) == 1.0  # stems


def test_wilson_interval():
    """Newcombe, "Two-sided confidence intervals for the single proportion" (1998), table I, method 3."""
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson_interval(15, 148) == pytest.approx((0.0624, 0.1605), abs=1e-4)
    assert wilson_interval(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert wilson_interval(20, 20)[1] == pytest.approx(1)


def test_bootstrap_interval():
    """Of 0 and 1 in equal numbers: about 1.96 standard errors to each side, and the same every time."""
    values = [0.0, 1.0] * 200
    low, high = bootstrap_interval(values)
    assert (low, high) == bootstrap_interval(values)
    assert low == pytest.approx(0.5 - 1.96 * 0.025, abs=0.01) and high == pytest.approx(0.5 + 1.96 * 0.025, abs=0.01)
    assert bootstrap_interval([0.3] * 5) == pytest.approx((0.3, 0.3))
