"""Training with a model's own full attention as the teacher: the answers, and training all weights for the block
mask."""

import json
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from oracle.adapters import MODULES, merge
from oracle.block_mask import Oracle
from oracle.scenarios import Dice
from oracle.segments import text, token_ids
from research.policies import distill, evaluate, train_model
from research.quality.adapter import add_adapter, save_adapter
from research.quality.worlds import records


def test_answers_are_those_of_full_attention(tiny_model, monkeypatch):
    """Prompts of any length, answered in batches; an answer stops at end of sequence."""
    monkeypatch.setattr(distill, "ANSWERED_TOGETHER", 3)
    dice = Dice(4)
    prompts = [[dice.text(5), dice.chunk(length), dice.text(6)] for length in (30, 3, 50, 12, 40)]
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    expected = [Oracle(tiny_model).generate([text(token_ids(prompt))], 4)[0] for prompt in prompts]
    assert distill.greedy(model, prompts, 4) == expected
    model.generation_config.eos_token_id = end = expected[0][1]
    cut = [answer[: answer.index(end) + 1] if end in answer else answer for answer in expected]
    assert distill.greedy(model, prompts, 4) == cut


def test_loss_is_that_of_the_oracle(tiny_model):
    """Block mask and full mask in turn; under the full mask the untrained model has no loss yet."""
    dice, answer = Dice(3), [30, 40, 20]
    segments = [dice.text(5), dice.chunk(30), dice.text(3), dice.chunk(20), dice.text(1)]
    full, block = (
        Oracle(tiny_model).logprobs(prompt, answer[:-1]) for prompt in ([text(token_ids(segments))], segments)
    )
    teacher, student = (AutoModelForCausalLM.from_pretrained(tiny_model) for _ in range(2))
    found = train_model.losses(teacher, student, iter([(segments, answer)] * 2))
    expected = (full.exp() * (full - block)).sum(-1).mean().item()
    assert expected > 0.01
    assert next(found).item() == pytest.approx(expected, rel=1e-3)
    assert next(found).item() == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("lora", [False, True])
def test_training(lora, tiny_model, tmp_path, monkeypatch, capsys):
    """The loss under the block mask falls, and the resulting model or adapter can be evaluated."""
    questions, out = tmp_path / "worlds.jsonl", tmp_path / "trained"
    questions.write_text("".join(json.dumps(r) + "\n" for r in records(0, "test", 1, 1, documents=(3, 3))))
    arguments = ["--model", tiny_model, "--questions", str(questions)]
    steps = ["--steps", "15", "--batch", "2", "--new-tokens", "3"]
    steps += ["--lora", "4", "--learning-rate", "1e-2"] if lora else ["--learning-rate", "1e-3"]
    monkeypatch.setattr(sys, "argv", ["", *arguments, *steps, "--out", str(out)])
    train_model.main()
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert len(losses) == 15 and losses[-1] < 0.5 * losses[0]
    if not lora:
        assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.float32

    results = tmp_path / "results.jsonl"
    divergence = []
    for trained in ([], ["--adapter", str(out)] if lora else ["--model", str(out)]):
        monkeypatch.setattr(sys, "argv", ["", *arguments, *trained, "--policies", "block", "--out", str(results)])
        evaluate.main()
        divergence.append(json.loads(results.read_text().splitlines()[-1])["own_kl"])
    assert divergence[1] < divergence[0]

    monkeypatch.setattr(sys, "argv", ["", *arguments, *steps, "--out", str(out)])
    with pytest.raises(SystemExit, match="exists"):
        train_model.main()


def test_a_saved_adapter_holds_what_was_trained(tiny_model, tmp_path):
    """Read back, the adapter adds to the model's weights nothing before training, and exactly what was trained after
    it."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    ids = torch.tensor([Dice(8).ids(20)])
    plain = model(ids).logits
    parameters = add_adapter(model, 4)
    assert len(parameters) == 2 * len(MODULES) * model.config.num_hidden_layers
    assert torch.equal(model(ids).logits, plain)
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(torch.randn_like(parameter) * 0.05)
    save_adapter(model, tmp_path / "adapter")
    again = AutoModelForCausalLM.from_pretrained(tiny_model)
    merge(again, tmp_path / "adapter")
    assert (model(ids).logits - plain).abs().max() > 0.1
    torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    changed = [name for name, weight in again.named_parameters() if not torch.equal(weight, before[name])]
    assert {name.split(".")[-2] for name in changed} == set(MODULES)


def test_models_without_projections_are_refused():
    for model, rank, reason in (
        (torch.nn.Linear(2, 2), 4, "no layers named q_proj"),
        (torch.nn.Linear(2, 2), 0, "rank"),
    ):
        with pytest.raises(ValueError, match=reason):
            add_adapter(model, rank)
