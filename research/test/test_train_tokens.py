"""Training the tokens of `packet` and `kvlink`: the prompts, what is trained, and what is saved."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from oracle.block_mask import load_model
from oracle.models.build import build
from oracle.policies import PolicyOracle, keep_all_but
from oracle.scenarios import Dice
from oracle.segments import chunk, text
from research.policies import evaluate, train_tokens
from research.policies.specs import around
from research.quality.worlds import records
from sglang_lazy.core.policy import TrainedTokens
from sglang_lazy.policies import get_policy
from sglang_lazy.serving.trained_tokens import load

IDS = [50, 51, 52, 53]


def test_prompts_include_the_tokens():
    one, two = chunk([1, 2]), chunk([3])
    head, question = text([7]), text([8, 9])
    packet, kvlink = TrainedTokens(before=(50,), behind=(51, 52)), TrainedTokens(link=(50, 51, 52))
    assert around([head, one, two, question], get_policy("packet"), packet) == [
        head,
        chunk([50, 1, 2, 51, 52]),
        chunk([50, 3, 51, 52]),
        question,
    ]
    assert around([one, two, question], get_policy("kvlink:tokens=2"), kvlink) == [
        one,
        text([50, 51]),
        two,
        text([52, 50, 8, 9]),
    ]


@pytest.mark.parametrize("link", ["packet", "kvlink:tokens=2"])
def test_loss_is_that_of_the_oracle(tiny_model, link):
    """The KL from full attention over the plain prompt to the policy's prompt with untrained token rows."""
    dice, answer = Dice(3), [30, 40, 20]
    segments = [dice.text(5), dice.chunk(30), dice.text(3), dice.chunk(20), dice.text(6)]
    oracle = PolicyOracle(tiny_model)
    policy, trained = get_policy(link), TrainedTokens(**train_tokens.fields(get_policy(link), IDS))
    trainer = train_tokens.Trainer(AutoModelForCausalLM.from_pretrained(tiny_model), IDS, [60, 61])
    served = around(segments, policy, trained)
    weight = oracle.model.get_input_embeddings().weight
    full = oracle.logprobs(
        segments[:-1] + [text(segments[-1].ids[:1])], [*segments[-1].ids[1:], *answer[:-1]], [(), ()]
    )
    with torch.no_grad():
        weight[IDS] = weight[[60, 61, 60, 61]]
    mine = oracle.logprobs(
        served[:-1] + [text(served[-1].ids[: len(served[-1].ids) - 5])],
        [*segments[-1].ids[1:], *answer[:-1]],
        keep_all_but(served, ()),
    )
    expected = (full.exp() * (full - mine)).sum(-1).mean()
    assert expected > 0.01
    assert trainer.loss(segments, answer, policy, trained).item() == pytest.approx(expected.item(), rel=1e-3)


@pytest.fixture
def tied_model(tiny_model, tmp_path):
    """The tiny model's folder with its output layer tied to its embedding, in several shards."""
    out = tmp_path / "tied"
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.lm_head.weight, model.config.tie_word_embeddings = model.model.embed_tokens.weight, True
    model.save_pretrained(out, max_shard_size=sum(p.nbytes for p in model.parameters()) // 2)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(out)
    assert len(list(out.glob("*.safetensors"))) > 1
    return str(out)


def scaled_trainer(model) -> train_tokens.Trainer:
    """Its rows are larger than any of the embedding, so that they would show in an output layer."""
    trainer = train_tokens.Trainer(model, IDS, [60, 61])
    with torch.no_grad():
        trainer.rows.mul_(3)
    return trainer


def test_training_leaves_a_tied_output_layer_alone(tied_model):
    """Loss and gradient are those of a model with an output layer of its own; without the tokens there are none."""
    answer, policy = [30, 40, 20], get_policy("packet")
    trained = TrainedTokens(**train_tokens.fields(policy, IDS))
    losses, gradients = [], []
    for tied in (True, False):
        model = AutoModelForCausalLM.from_pretrained(tied_model)
        if not tied:
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        trainer = scaled_trainer(model)
        assert (trainer.name, trainer.tied) == ("model.embed_tokens.weight", "lm_head.weight" if tied else None)
        trainer.loss([text(range(100, 120))], answer, policy, trained).backward()
        assert not trainer.rows.grad.any()
        loss = trainer.loss([chunk(range(100, 130)), chunk(range(130, 150)), text([90, 91])], answer, policy, trained)
        loss.backward()
        losses.append(loss.item())
        gradients.append(trainer.rows.grad)
    assert losses[0] == losses[1] > 0.01
    assert torch.equal(*gradients) and gradients[0].any(1).all()


def folder_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a model's folder; where there is an index, it names just these, each in its file."""
    shards = {path.name: load_file(path) for path in folder.glob("*.safetensors")}
    if (index := folder / "model.safetensors.index.json").is_file():
        places = {name: shard for shard, tensors in shards.items() for name in tensors}
        assert json.loads(index.read_text())["weight_map"] == places
    return {name: tensor for tensors in shards.values() for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", ["llama", "tied", "tied, stored twice", "qwen2-vl", "gemma3-vision", "gemma4"])
def test_without_trained_tokens_the_saved_model_is_the_old_one(model_dir, tied_model, tmp_path, name):
    """Logits of all tokens are unchanged, those of the trained ones too, whatever names and ties the model has."""
    path, out = Path(tied_model if name.startswith("tied") else build(name, model_dir)), tmp_path / "trained"
    if name == "tied, stored twice":
        save_file({"lm_head.weight": folder_tensors(path)["model.embed_tokens.weight"]}, path / "more.safetensors")
        train_tokens.edit(
            path / "model.safetensors.index.json",
            lambda known: known | {"weight_map": known["weight_map"] | {"lm_head.weight": "more.safetensors"}},
        )
    prompt = torch.tensor([list(range(100, 130))])
    model = load_model(str(path), torch.float32, "cpu")
    was_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert was_tied == (name not in ("llama", "qwen2-vl"))
    expected = model(prompt).logits
    trainer = scaled_trainer(model)
    train_tokens.save(path, out, trainer, get_policy("packet"), IDS)

    saved = load_model(str(out), torch.float32, "cpu")
    assert torch.equal(saved(prompt).logits, expected)
    assert torch.equal(saved.get_input_embeddings().weight[IDS], trainer.rows)
    before, after = folder_tensors(path), folder_tensors(out)
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(changed) == 1 and changed[0].endswith("embed_tokens.weight")
    assert (before[changed[0]] != after[changed[0]]).any(1).nonzero().flatten().tolist() == IDS
    added = {"lm_head.weight"} if was_tied and name != "tied, stored twice" else set()
    assert after.keys() - before.keys() == added
    expected, found = (json.loads((folder / "config.json").read_text()) for folder in (path, out))
    if was_tied:
        expected["tie_word_embeddings"] = False
        if "text_config" in expected:  # the one that SGLang's Gemma 4 reads
            expected["text_config"]["tie_word_embeddings"] = False
    assert found == expected


@pytest.mark.parametrize("link", ["packet", "kvlink:tokens=2"])
def test_training(tiny_model, tmp_path, monkeypatch, capsys, link):
    """The loss falls, only the tokens' rows change, and the folder can be served and evaluated under the policy."""
    questions, out = tmp_path / "worlds.jsonl", tmp_path / "trained"
    questions.write_text("".join(json.dumps(r) + "\n" for r in records(0, "test", 1, 1, documents=(3, 3))))
    arguments = ["--model", tiny_model, "--questions", str(questions)]
    steps = ["--policy", link, "--ids", *map(str, IDS), "--steps", "12", "--batch", "1", "--new-tokens", "3"]
    monkeypatch.setattr(sys, "argv", ["", *arguments, *steps, "--out", str(out)])
    train_tokens.main()
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert len(losses) == 12 and losses[-1] < 0.9 * losses[0]

    name = "model.embed_tokens.weight"
    before, after = load_file(f"{tiny_model}/model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before if key != name)
    changed = (before[name] != after[name]).any(1).nonzero().flatten().tolist()
    assert changed == IDS
    AutoModelForCausalLM.from_pretrained(out)

    known = load(str(out), len(AutoTokenizer.from_pretrained(out)))
    expected = TrainedTokens(before=(50, 51), behind=(52, 53)) if link == "packet" else TrainedTokens(link=tuple(IDS))
    assert known == {link.partition(":")[0]: expected}

    results = tmp_path / "results.jsonl"
    arguments[1] = str(out)
    monkeypatch.setattr(sys, "argv", ["", *arguments, "--policies", "block", link, "--out", str(results)])
    evaluate.main()
    full, block, trained = (json.loads(line) for line in results.read_text().splitlines())
    added = 3 * (4 if link == "packet" else 2)  # around three chunks
    assert full["prompt_tokens"] == block["prompt_tokens"] == trained["prompt_tokens"] - added
    assert block["own_kl"] != trained["own_kl"] and trained["share"] == 0


@pytest.mark.parametrize(
    "link, ids, message",
    [
        ("packet", ["50", "51"], "no other policy"),
        ("packet", ["55"], "at least two"),
        ("block", ["55", "56"], "--policy must be"),
        ("kvlink", ["50", "51"], "exists"),
    ],
)
def test_refusals(tiny_model, tmp_path, monkeypatch, link, ids, message):
    """Refused before training: ids of another policy, too few ids, other policies, an existing folder."""
    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(tiny_model, model)
    (model / "lazy_tokens.json").write_text(json.dumps({"kvlink": {"link": [50]}}))
    if message == "exists":
        out.mkdir()
    arguments = ["--model", str(model), "--questions", "none", "--policy", link, "--ids", *ids, "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["", *arguments])
    with pytest.raises(SystemExit, match=message):
        train_tokens.main()


def test_an_embedding_that_is_not_in_safetensors_is_refused(tiny_model, tmp_path, monkeypatch):
    """Before training: there would be no file to save the rows in."""
    model = shutil.copytree(tiny_model, tmp_path / "model")
    torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    arguments = ["--model", str(model), "--questions", "none", "--policy", "packet", "--ids", *map(str, IDS)]
    monkeypatch.setattr(sys, "argv", ["", *arguments, "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="no safetensors file in .* has model.embed_tokens.weight"):
        train_tokens.main()


def test_models_that_answer_with_the_embedding_in_sglang_are_refused(model_dir, tmp_path, monkeypatch):
    arguments = ["--model", build("gemma", model_dir), "--questions", "none", "--policy", "packet"]
    monkeypatch.setattr(sys, "argv", ["", *arguments, "--ids", *map(str, IDS), "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="no output layer for GemmaForCausalLM"):
        train_tokens.main()


def test_unused_special_tokens(tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<user>", "<spare>"]})
    tokenizer.chat_template = "<user>{{ messages }}"
    found = train_tokens.unused_special_tokens(tokenizer)
    assert tokenizer.convert_tokens_to_ids("<spare>") in found
    assert not {tokenizer.convert_tokens_to_ids("<user>"), tokenizer.bos_token_id, tokenizer.eos_token_id} & set(found)
