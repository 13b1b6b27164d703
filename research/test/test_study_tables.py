"""Tables of studies: the gap that policies leave, and served tokens, on data with known answers."""

import json

from research.report.mixtures import mixtures
from research.report.remaining import POLICIES, policies_changes, policies_remaining
from research.report.served import policies_margins, policies_served
from research.report.studies import policies_by


def write(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def cells(text):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]


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


def test_by_data_set(tmp_path):
    """Halfway from block to full in NLL, all the way in KL."""
    rows = [
        {"policy": policy, "group": group, "id": "1", "share": 0.25, "nll": nll, "own_kl": own_kl}
        for policy, nll, own_kl in (("full", 1, 0), ("block", 3, 1), ("base", 2, 0))
        for group in "ab"
    ]
    text = policies_by([write(tmp_path / "results.jsonl", rows)], "set")
    assert cells(text) == [["`base`", *["50% (50% to 50%)"] * 2, *["100% (100% to 100%)"] * 2]]
