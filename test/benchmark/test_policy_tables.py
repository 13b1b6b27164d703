"""Tables of policies by data set, of the gap that they leave, and of served tokens, on data with known answers."""

import json

import pytest

from benchmark.policies.report import carriers
from benchmark.report.mixtures import mixtures
from benchmark.report.policies import policies_answers, policies_means
from benchmark.report.remaining import POLICIES, policies_changes, policies_remaining
from benchmark.report.served import policies_margins, policies_served


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


def test_changed_answers(tmp_path):
    """Of four prompts one answer is the same, one worse, one worth nothing any more, and one better."""
    answers = {
        "full": [("x", 0.5), ("x", 0.5), ("x", 0.4), ("x", 0.0)],
        "base": [("x", 0.5), ("y", 0.3), ("z", 0.0), ("y", 1.0)],
    }
    rows = [
        {"policy": name, "group": "a", "id": str(i), "answer": answer, "f1": f1}
        for name, of in answers.items()
        for i, (answer, f1) in enumerate(of)
    ]
    rows.append({"policy": "epic:tokens=16", "group": "a", "id": "0"})  # has not answered greedily
    text = policies_changes([write(tmp_path / "results.jsonl", rows)])
    assert cells(text) == [["`base`", "4", "1", "2, -15.0", "1", "1, +25.0"]]


def test_answers_of_a_study(tmp_path):
    """A policy that missed a prompt is left out of the main table, and sets the prompts of its study's."""
    scores = {"full": (0.5, 0.25), "block": (0.0, 0.25), "packet": (0.25, 0.5), "trained full": (0.75,)}
    rows = [
        {"policy": name, "group": "ab"[i], "id": "0", "share": 0, "nll": i + (name == "block"), "own_kl": len(name)}
        | {"em": 0.0, "f1": f1}
        for name, of in scores.items()
        for i, f1 in enumerate(of)
    ]
    file = write(tmp_path / "results.jsonl", rows)

    def found(study):
        rows = cells(policies_answers([file], study))
        return [[name, n, *(cell.split(" ")[0] for cell in rest)] for name, n, _, *rest in rows]

    assert found("") == [
        ["`full`", "2", "37.5%", "", "", "50.0%", "25.0%"],
        ["`block`", "2", "12.5%", "33.3%", "-25.0", "0.0%", "25.0%"],
        ["`packet`", "2", "37.5%", "100.0%", "+0.0", "25.0%", "50.0%"],
    ]
    assert found("weights") == [
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


def test_remaining_gap(tmp_path):
    """Gaps of 8, 1, 1 and 0 under every policy: the first prompt has 80% of them, the last has none."""
    prompts = [("b", 900, 1, 8), ("a", 1500, 3, 1), ("a", 1500, 12, 1), ("a", 900, 2, 0)]
    rows = [
        {"policy": name, "group": group, "id": number, "prompt_tokens": length, "answer_tokens": answer}
        | {"nll": 0.5 + gap * (name != "full")}
        for name in ("full", *POLICIES)
        for number, (group, length, answer, gap) in enumerate(prompts)
    ]
    text = policies_remaining([write(tmp_path / "results.jsonl", rows)])
    assert [row[:3] for row in cells(text)] == [
        ["mean gap", "", "2.500"],
        ["prompts that have 80% of it", "", "1 (25%)"],
        ["prompts without a gap", "", "1 (25%)"],
        ["set: a", "3 (75%)", "20%"],
        ["set: b", "1 (25%)", "80%"],
        ["prompt: 1 to 1,000 tokens", "2 (50%)", "80%"],
        ["prompt: 1,001 to 2,000 tokens", "2 (50%)", "20%"],
        ["gold answer: 1 token", "1 (25%)", "80%"],
        ["gold answer: 2 to 4 tokens", "2 (50%)", "10%"],
        ["gold answer: 11 to 512 tokens", "1 (25%)", "10%"],
    ]


def test_served_tokens(tmp_path):
    """Of four steps the server missed the oracle's token at two, plain PyTorch at one, where margins are below 0.1."""
    cold = {"phase": "cold", "margins": [0.02, 2.5], "deficits": [0.02, 0], "plain_deficits": [0.02, 0]}
    rows = [
        {"policy": "block", **cold},
        {"policy": "base", "phase": "cold", "margins": [0.01, 0.3], "deficits": [0.05, 0], "plain_deficits": [0, 0]},
    ]
    file = write(tmp_path / "served.jsonl", rows)
    assert cells(policies_served([file])) == [
        ["`block`", "2", "50.0%", "50.0%", "0.02", "0.02"],
        ["`base`", "2", "50.0%", "0.0%", "0.05", "0"],
        ["all", "4", "50.0%", "25.0%", "0.05", "0.02"],
    ]
    assert cells(policies_margins([file])) == [
        ["0 to 0.01", "0", "", "", "0", "0"],
        ["0.01 to 0.03", "2", "100.0%", "50.0%", "0.05", "0.02"],
        ["0.03 to 0.1", "0", "", "", "0", "0"],
        ["0.1 to 0.3", "0", "", "", "0", "0"],
        ["over 0.3", "2", "0.0%", "0.0%", "0", "0"],
    ]
    again = {"policy": "block", **cold, "phase": "warm", "deficits": [0, 0]}
    assert cells(policies_served([write(tmp_path / "both.jsonl", [*rows, again])]))[2:] == [
        ["all, cold", "4", "50.0%", "25.0%", "0.05", "0.02"],
        ["all, warm", "2", "0.0%", "50.0%", "0", "0.02"],
        ["all", "6", "33.3%", "33.3%", "0.05", "0.02"],
    ]


def test_mixtures(tmp_path):
    """A wrong answer is named by its document's distance from the right one; sums leave out questions of `table`."""
    rows = [
        {"policy": "block", "group": "order", "em": 1.0, "right": 1, "document": 1},
        {"policy": "block", "group": "cut", "em": 0.0, "right": 1, "document": None},
        {"policy": "lead", "group": "order", "em": 0.0, "right": 1, "document": 3},
        {"policy": "lead", "group": "cut", "em": 0.0, "right": 1, "document": 0},
    ]
    text = mixtures([write(tmp_path / "leads.jsonl", rows)])
    assert text.splitlines()[0] == "| chunks | all, 2 | order, 1 | cut, 1 | wrong |"
    assert cells(text) == [
        ["nothing: `block`", "1", "1", "0", "in none: 1"],
        ["BOS and instruction: `base:preamble=lead`", "0", "0", "0", "+2: 1, -1: 1"],
    ]
    rows += [{**row, "group": "table"} for row in rows[::2]]
    text = mixtures([write(tmp_path / "more.jsonl", rows)])
    assert text.splitlines()[0] == "| chunks | all but table, 2 | order, 1 | cut, 1 | table, 1 | wrong |"
    assert [row[1:] for row in cells(text)] == [
        ["1", "1", "0", "1", "in none: 1"],
        ["0", "0", "0", "0", "+2: 1, -1: 1"],
    ]
