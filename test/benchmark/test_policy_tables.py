"""Tables of policies, on data with known answers."""

import json

import pytest

from benchmark.report.means import carriers
from benchmark.report.policies import policies_answers, policies_means


def write(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def cells(text):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]


@pytest.mark.parametrize(
    "gaps, share, count",
    [([1, 1, 1, 1], 0.8, 4), ([1, 1, 1, 1], 0.75, 3), ([0, 9, 1], 0.8, 1), ([-2, 4, 1, 1], 0.8, 1), ([2, -1], 1, 1)],
)
def test_carriers(gaps, share, count):
    """The largest come first; a negative gap lowers what has to be reached."""
    assert carriers(gaps, share) == count


def test_answers_of_chosen_policies(tmp_path):
    """A policy that missed a prompt is left out of the main table, and sets the prompts where it is chosen."""
    scores = {"full": (0.5, 0.25), "block": (0.0, 0.25), "packet": (0.25, 0.5), "trained full": (0.75,)}
    rows = [
        {"policy": name, "group": "ab"[i], "id": "0", "share": 0, "nll": i + (name == "block"), "own_kl": len(name)}
        | {"em": 0.0, "f1": f1}
        for name, of in scores.items()
        for i, f1 in enumerate(of)
    ]
    file = write(tmp_path / "results.jsonl", rows)

    def found(pattern):
        rows = cells(policies_answers([file], pattern))
        return [[name, n, *(cell.split(" ")[0] for cell in rest)] for name, n, _, *rest in rows]

    assert found("") == [
        ["`full`", "2", "37.5%", "", "", "50.0%", "25.0%"],
        ["`block`", "2", "12.5%", "33.3%", "-25.0", "0.0%", "25.0%"],
        ["`packet`", "2", "37.5%", "100.0%", "+0.0", "25.0%", "50.0%"],
    ]
    assert found("packet|trained .+") == [
        ["`full`", "1", "50.0%", "", "", "50.0%"],
        ["`block`", "1", "0.0%", "0.0%", "-50.0", "0.0%"],
        ["`packet`", "1", "25.0%", "50.0%", "-25.0", "25.0%"],
        ["`trained full`", "1", "75.0%", "150.0%", "+25.0", "75.0%"],
    ]


def test_means_by_data_set(tmp_path):
    """Two prompts of one set and one of another; a policy that missed one of them is left out."""
    values = {"full": (1, 1, 1), "block": (2, 4, 9), "base": (2, 4)}
    prompts = (("a", "1"), ("a", "2"), ("b", "1"))
    rows = [
        {"policy": name, "group": group, "id": prompt, "nll": value, "own_kl": value - 1}
        for name, of in values.items()
        for (group, prompt), value in zip(prompts, of, strict=False)
    ]
    file = write(tmp_path / "results.jsonl", rows)
    text = policies_means([file], "nll")
    assert text.splitlines()[0] == "| policy | all 3 prompts | a, 2 | b, 1 |"
    assert cells(text) == [
        ["`full`", "1.000 (1.000 to 1.000)", "1.000", "1.000"],
        ["`block`", "5.000 (2.000 to 9.000)", "3.000", "9.000"],
    ]
    assert cells(policies_means([file], "kl")) == [["`block`", "4.000 (1.000 to 8.000)", "2.000", "8.000"]]
