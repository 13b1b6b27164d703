"""The largest parameter of a policy that stays within a latency budget."""

import pytest

from sglang_lazy.verify.budget import within_budget

MEASURED = {"block": 20.0, "base+query:ratio=0.05": 30.0, "base+query:ratio=0.15": 40.0, "base+query:ratio=0.25": 50.0}


@pytest.mark.parametrize(
    "budget, expected",
    [
        (29.9, {}),
        (30.0, {"base+query:ratio=0.05": 30}),
        (44.0, {"base+query:ratio=0.19": 44}),
        (44.05, {"base+query:ratio=0.19": 44}),
        (500, {"base+query:ratio=0.25": 50}),
    ],
)
def test_values_between_those_measured(budget, expected):
    """Values are rounded down and never leave the measured range."""
    (found,) = [within_budget(MEASURED, budget)]
    assert found.keys() == expected.keys()
    assert list(found.values()) == pytest.approx(list(expected.values()), abs=0.06)


def test_each_family_has_its_own_line():
    """Tokens are whole numbers; a policy measured only once has no line."""
    measured = {"epic:tokens=8": 20, "epic:tokens=16": 28, "base+epic:tokens=8": 30, "query:ratio=0.1": 1, **MEASURED}
    assert within_budget(measured, 25.5) == {"epic:tokens=13": pytest.approx(25)}


def test_times_that_do_not_grow_are_no_limit():
    """Noise can make the line fall; parameters measured above the budget stay excluded."""
    assert list(within_budget({"query:ratio=0.1": 21, "query:ratio=0.2": 20}, 22)) == ["query:ratio=0.2"]
    assert within_budget({"query:ratio=0.1": 21, "query:ratio=0.2": 20}, 10) == {}
