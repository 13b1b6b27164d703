"""The study of leads: what is computed alone and what behind the lead, against the policies' oracle."""

import json
import sys

import pytest
import torch

from benchmark.policies import leads
from benchmark.policies.leads import ALONE, Mixed
from benchmark.quality.worlds import records
from oracle.policies import PolicyOracle
from oracle.scenarios import Dice


@pytest.mark.parametrize("name", ALONE)
def test_mixed(tiny_model, name):
    dice = Dice(3)
    lead = dice.text(6)
    one, two = dice.chunk(9), dice.chunk(5)
    segments = [lead, one, two, dice.text(4)]
    oracle, mixed = PolicyOracle(tiny_model), Mixed(tiny_model)
    mixed.alone = ALONE[name]
    found = mixed.fill(segments, lead.ids)
    alone, behind = oracle.fill(segments), oracle.fill(segments, lead.ids)
    tokens = {"keys alone": range(14), "values alone": (), "first keys alone": (0, 9)}[name]
    for (keys, values), mine, its in zip(found, alone, behind, strict=True):
        for token in range(14):
            torch.testing.assert_close(keys[:, :, token], (mine if token in tokens else its)[0][:, :, token])
        torch.testing.assert_close(values, (mine if name == "values alone" else its)[1])
    assert not torch.allclose(alone[1][0][:, :, 0], behind[1][0][:, :, 0], atol=1e-3)
    assert not torch.allclose(alone[1][1], behind[1][1], atol=1e-3)


def test_lines_and_table(tiny_model, tmp_path, monkeypatch, capsys):
    """A line for each prompt and variant, with the document that has the right answer; the table counts all prompts."""
    questions, out = tmp_path / "worlds.jsonl", tmp_path / "out.jsonl"
    made = {record["id"]: record for record in records(0, "test", 2, 1, documents=(2, 4))}
    questions.write_text("".join(json.dumps(record) + "\n" for record in made.values()))
    monkeypatch.setattr(sys, "argv", ["", "--model", tiny_model, "--questions", str(questions), "--out", str(out)])
    leads.main()
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert {line["id"] for line in lines} == set(made) and len(lines) == 2 * 8
    for line in lines:
        record = made[line["id"]]
        assert record["answers"][0] in record["docs"][line["right"]]["text"]
    assert capsys.readouterr().out.count(" of 2 |") == 8
