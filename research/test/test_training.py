"""The training model against Hugging Face's, packed rows against single prompts, and resuming."""

import dataclasses
import json
import random
import sys

import numpy as np
import pytest
import torch

from oracle.adapters import merge
from oracle.block_mask import load_model, visibility
from oracle.policies import PolicyOracle, epic, keep_all_but, leading_text
from oracle.segments import chunk, text, token_ids
from research.quality.leaning import FAMILIES
from research.quality.llama import Llama, Shape, load_llama, save_for_serving
from research.quality.packing import ANSWER, FIELDS, IGNORED, Mix, make_row
from research.quality.recipe import Recipe, make_rows, start_worker
from research.quality.reference import Reference
from research.quality.train import MASKS, Trainer, exact_match, losses, main, make_mask, to_batch, train
from research.quality.vocabulary import BOS, EOS, PAD, VOCAB_SIZE, Encoder, train_tokenizer

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
SHAPE = Shape(VOCAB_SIZE, 64, 96, 2, 4, 2, 16, 512)
RECIPE = Recipe(SHAPE, steps=20, rows=2, length=256, warm_up=5, first_documents=(2, 2), documents=(2, 4), questions=3)


@pytest.fixture(scope="module")
def encode():
    return Encoder(train_tokenizer())


@pytest.fixture(scope="module")
def model():
    """A model with random weights, large enough that every token depends on what it sees."""
    torch.manual_seed(0)
    model = Llama(SHAPE).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(6 if weight.dim() > 1 else 1)
    return model


def batch_of(encode, *, families=("people",), seed=0, length=400, **shares):
    mix = Mix((2, 4), families, questions=3, **shares)
    rows = [make_row(random.Random(f"{seed}/{row}"), encode, mix, length) for row in range(2)]
    return to_batch(np.stack(rows), CPU)


def prompts_of(batch) -> list[tuple[list, list[int]]]:
    """Each question of a batch as a prompt of its own, answer included, and the indices of its tokens in the row; leads
    are left out."""
    found = []
    for row in range(len(batch["ids"])):
        worlds, chunks, branches = (batch[name][row] for name in ("worlds", "chunks", "branches"))
        for world in range(1, int(worlds.max()) + 1):
            for branch in range(1, int(branches[worlds == world].max()) + 1):
                mine = (worlds == world) & ((branches == 0) | (branches == branch))
                where = (mine & (chunks >= 0)).nonzero()[:, 0]
                segments, ids, kinds = [], batch["ids"][row][where], chunks[where]
                for start in range(len(where)):
                    if start == 0 or kinds[start] != kinds[start - 1]:
                        same = (kinds[start:] == kinds[start]).long().cumprod(0).sum()
                        make = chunk if kinds[start] else text
                        segments.append(make(ids[start : start + same].tolist()))
                found.append((segments, row, where))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_rows(encode, family):
    """Rows are full up to padding; positions restart with each prompt; answers end with end of sequence."""
    for seed in range(3):
        batch = batch_of(encode, families=(family,), lead_share=0.5, seed=seed, length=800)
        padding = batch["worlds"] == 0
        assert padding.float().mean() < 0.25
        assert (batch["kinds"][padding] == IGNORED).all()
        for segments, row, where in prompts_of(batch):
            assert batch["positions"][row][where].tolist() == list(range(len(where)))
            ids = token_ids(segments)
            assert ids[-1] == EOS and (ids[0] == BOS or BOS not in ids)
            kinds, targets = batch["kinds"][row][where], batch["targets"][row][where]
            assert targets[kinds == ANSWER].tolist() == ids[int((kinds == ANSWER).nonzero()[0]) + 1 :]


def test_same_as_hugging_face(model, encode, tmp_path):
    """In every packed row, each question's logits are those of Hugging Face's model over that question's own prompt
    under the oracle's explicit mask: the masks, positions, weights and shapes all agree."""
    save_for_serving(model, tmp_path, torch.float32, bos=BOS, eos=EOS, pad=PAD)
    theirs = load_model(str(tmp_path), torch.float32, "cpu")
    batch = batch_of(encode)
    with torch.inference_mode():
        ours = model(batch["ids"], batch["positions"], make_mask(batch, flex=False))
        kinds = set()
        for segments, row, where in prompts_of(batch):
            kinds |= {segment.kind for segment in segments}
            ids = torch.tensor([token_ids(segments)])
            mask = torch.zeros(ids.shape[1], ids.shape[1]).masked_fill(~visibility(segments), -1e30)[None, None]
            right = theirs(ids, attention_mask=mask, use_cache=False).logits[0]
            torch.testing.assert_close(ours[row, where], right, rtol=1e-4, atol=1e-4)
    assert kinds == {"text", "chunk"}


def policies_of(batch) -> list[tuple[list, tuple[int, ...], list[int], int, torch.Tensor]]:
    """Each question of a batch as a prompt with a policy: the prompt, answer included; the lead of its chunks; the
    places in the prompt that are recomputed; its row, and the indices of its text and recomputed tokens in it."""
    found = []
    for row in range(len(batch["ids"])):
        worlds, chunks, branches, kinds = (batch[name][row] for name in ("worlds", "chunks", "branches", "kinds"))
        for world, branch in {(w, b) for w, b in zip(worlds.tolist(), branches.tolist(), strict=True) if b}:
            where = ((worlds == world) & ((branches == 0) | (branches == branch))).nonzero()[:, 0]
            first = int((chunks[where] != 0).nonzero()[0])
            opening, end = where[:first], int((branches[where] == 0).sum())
            parts, lead, recomputed, start = [opening], (), [], first
            for number in range(1, int(chunks[where].max()) + 1):
                tokens = where[chunks[where].abs() == number]
                begin = int((kinds[tokens] != IGNORED).nonzero()[0])
                lead, tokens = tuple(batch["ids"][row][tokens[:begin]].tolist()), tokens[begin:]
                recomputed += [start + place for place, token in enumerate(tokens) if chunks[token] < 0]
                start += len(tokens)
                parts.append(tokens)
            parts.append(where[end:])
            makes = [text, *[chunk] * (len(parts) - 2), text]
            ids = [batch["ids"][row][part].tolist() for part in parts]
            segments = [make(part) for make, part in zip(makes, ids, strict=True) if part]
            found.append((segments, lead, recomputed, row, where[chunks[where] == 0]))
    return found


MIXES = {
    "block": ({}, {"block"}),
    "leads": ({"lead_share": 0.5}, {"block", "lead"}),
    "neutral": ({"lead_share": 1.0, "neutral_share": 1.0}, {"neutral"}),
    "recomputed": ({"recompute_share": 1.0}, {"block", "epic", "others"}),
    "all": (
        {"lead_share": 0.7, "neutral_share": 0.5, "recompute_share": 0.7},
        {"block", "lead", "neutral", "epic", "others"},
    ),
}
"""Shares of a mix, and what its worlds are like."""


@pytest.mark.parametrize("shares, expected", MIXES.values(), ids=MIXES)
def test_same_as_the_policy(model, encode, tmp_path, shares, expected):
    """In worlds under the block mask each question's logits, and those of recomputed tokens, are the policies' oracle's
    over that question's own prompt: with leads under `base`, with recomputed tokens as under `epic` and others."""
    save_for_serving(model, tmp_path, torch.float32, bos=BOS, eos=EOS, pad=PAD)
    policies = PolicyOracle(str(tmp_path))
    batch = batch_of(encode, block_share=1, length=1000, **shares)
    seen = set()
    with torch.inference_mode():
        ours = model(batch["ids"], batch["positions"], make_mask(batch, flex=False))
    for segments, lead, recomputed, row, where in policies_of(batch):
        kept = keep_all_but(segments, recomputed)
        right = policies.extend(segments, (), kept, lead).logits[0]
        torch.testing.assert_close(ours[row, where], right, rtol=1e-4, atol=1e-4)
        seen.add("neutral" if lead not in ((), leading_text(segments)) else "lead" if lead else "block")
        if recomputed:
            seen.add("epic" if any(kept == epic(segments, tokens) for tokens in range(1, 9)) else "others")
    assert seen == expected


def test_lead_share(encode):
    """About this share of the worlds under the block mask has leads, no others have; all else is the same."""
    with_leads = {False: 0, True: 0}
    for seed in range(12):
        plain, led = (batch_of(encode, lead_share=share, seed=seed, length=1500) for share in (0.0, 0.3))
        for row in range(2):
            for world in range(1, int(led["worlds"][row].max()) - 2):  # the last ones are made to fit
                mine, its = (batch["worlds"][row] == world for batch in (plain, led))
                leads = its & (led["chunks"][row] < 0)
                for name in FIELDS:
                    assert torch.equal(plain[name][row][mine], led[name][row][its & ~leads])
                if (plain["chunks"][row][mine] > 0).any():
                    with_leads[bool(leads.any())] += 1
                else:
                    assert not leads.any()
    assert sum(with_leads.values()) > 50
    assert 0.2 < with_leads[True] / sum(with_leads.values()) < 0.4


def test_recompute_share(encode):
    """About this share of the worlds under the block mask has recomputed tokens, from a few to half of a chunk's; all
    else is the same, the loss included."""
    recomputed, worlds = [], 0
    for seed in range(12):
        plain, mixed = (batch_of(encode, recompute_share=share, seed=seed, length=1500) for share in (0.0, 0.3))
        for row in range(2):
            for world in range(1, int(mixed["worlds"][row].max()) - 2):  # the last ones are made to fit
                mine, its = ((batch["worlds"][row] == world).nonzero()[:, 0] for batch in (plain, mixed))
                hidden = mixed["chunks"][row][its] < 0
                copies = hidden.roll(1)
                for name in FIELDS:
                    values, again = mixed[name][row][its], mixed[name][row][its[copies]]
                    original = values[hidden].abs()
                    if name in ("ids", "positions", "worlds", "branches"):
                        assert torch.equal(original, again)
                    else:
                        assert (again == {"targets": PAD, "kinds": IGNORED, "chunks": 0}[name]).all()
                    assert torch.equal(plain[name][row][mine], values[~copies].abs())
                in_chunks = int((plain["chunks"][row][mine] > 0).sum())
                worlds += in_chunks > 0
                if hidden.any():
                    recomputed.append(int(hidden.sum()) / in_chunks)
    assert worlds > 50 and 0.2 < len(recomputed) / worlds < 0.4
    assert 0 < min(recomputed) < 0.1 < max(recomputed) < 0.6


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_mask(encode, share):
    """The mask allows the pairs of tokens that reading the row, token by token, allows."""
    batch = batch_of(encode, lead_share=share, recompute_share=share, length=600)
    names = ("worlds", "chunks", "branches")
    for row, seen in enumerate(make_mask(batch, flex=False)[:, 0]):
        tokens = list(zip(*(batch[name][row].tolist() for name in names), strict=True))
        expected = torch.zeros_like(seen)
        for q, (world, own, branch) in enumerate(tokens):
            for k, (its_world, its, its_branch) in enumerate(tokens[: q + 1]):
                if its_world == world and its_branch in (0, branch):
                    expected[q, k] = its in (own, -own) if own else its >= 0
        assert torch.equal(seen, expected)
    assert bool((batch["chunks"] < 0).any()) == (share > 0)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention(model, encode):
    """FlexAttention's form of the mask gives the same result as the explicit one."""
    batch = batch_of(encode, lead_share=0.5, recompute_share=0.5)
    assert (batch["chunks"] < 0).any()
    with torch.inference_mode():
        flex, explicit = (model(batch["ids"], batch["positions"], make_mask(batch, flex)) for flex in (True, False))
    torch.testing.assert_close(flex, explicit, rtol=1e-4, atol=1e-4)


def test_exact_match(model, encode, tmp_path):
    """An answer counts as right if greedy decoding gives it; here answers are replaced by what the model says."""
    save_for_serving(model, tmp_path, torch.float32, bos=BOS, eos=EOS, pad=PAD)
    reference = Reference(str(tmp_path), torch.float32, "cpu")
    batch = batch_of(encode)
    prompts, expected = prompts_of(batch), []
    for number, (segments, row, where) in enumerate(prompts):
        start = int((batch["kinds"][row][where] == ANSWER).nonzero()[0]) + 1
        end = len(where)
        prompt = [*segments[:-1], text(segments[-1].ids[: len(segments[-1].ids) - (end - start)])]
        says = reference.answer(prompt, end - start)
        if number % 2 == 0 and len(says) == end - start:
            batch["ids"][row, where[start:]] = torch.tensor(says)
            batch["targets"][row, where[start - 1 : -1]] = torch.tensor(says)
        expected.append(says == batch["ids"][row][where][start:].tolist())
    assert exact_match(model, batch, make_mask(batch, flex=False)) == expected
    assert any(expected) and not all(expected)


def test_questions_of_a_row_are_independent(model, encode):
    """Another first question leaves the second one's logits as they are."""
    batch = batch_of(encode)
    changed = {name: values.clone() for name, values in batch.items()}
    first = (batch["worlds"] == 1) & (batch["branches"] == 1)
    changed["ids"][first] = 5
    with torch.inference_mode():
        one, other = (model(b["ids"], b["positions"], make_mask(b, flex=False)) for b in (batch, changed))
    torch.testing.assert_close(one[~first], other[~first])


def weights_after(recipe, directory, minutes=1e9):
    trainer = Trainer(recipe, directory, CPU, flex=False)
    trainer.resume()
    train(trainer, minutes, workers=1, log_every=10, evaluate_every=10**9, save_every=1e9, evaluate_rows=1)
    return trainer


def test_resume(tmp_path):
    """Training that stops and resumes gives bitwise the same weights as training that does not stop."""
    straight = weights_after(RECIPE, tmp_path / "straight")
    assert straight.step == RECIPE.steps
    stopped = weights_after(RECIPE, tmp_path / "legs", minutes=1e-9)
    assert stopped.step == 0
    trainer = Trainer(RECIPE, tmp_path / "legs", CPU, flex=False)
    trainer.resume()
    for _ in range(7):
        trainer.train_step(trainer_rows(trainer))
    trainer.save()
    resumed = weights_after(RECIPE, tmp_path / "legs")
    for name, weight in straight.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name]), name
    with pytest.raises(ValueError, match="another recipe"):
        weights_after(dataclasses.replace(RECIPE, seed=1), tmp_path / "legs")


def test_start(tmp_path):
    """Training starts from another model's weights, with all documents; its own checkpoint takes precedence."""
    known = Trainer(RECIPE, tmp_path / "known", CPU, flex=False)
    known.save()
    recipe = dataclasses.replace(RECIPE, start=str(tmp_path / "known"), grow=0.0, seed=1)
    assert recipe.mix(0) == recipe.mix(RECIPE.steps) == RECIPE.mix(RECIPE.steps) != RECIPE.mix(0)
    trainer = Trainer(recipe, tmp_path / "more", CPU, flex=False)
    trainer.resume()
    for name, weight in trainer.model.state_dict().items():
        assert torch.equal(weight, known.model.state_dict()[name].bfloat16().float()), name
    trainer.train_step(trainer_rows(trainer))
    trainer.save()
    again = Trainer(recipe, tmp_path / "more", CPU, flex=False)
    again.resume()
    assert again.step == 1 and all(map(torch.equal, again.model.parameters(), trainer.model.parameters()))


def test_an_adapter(tmp_path, encode):
    """Only the adapter is trained; it resumes, and is saved as the difference from the model it started from."""
    known = Trainer(RECIPE, tmp_path / "known", CPU, flex=False)
    known.save()
    recipe = dataclasses.replace(RECIPE, start=str(tmp_path / "known"), lora=4)
    trainer = Trainer(recipe, tmp_path / "adapter", CPU, flex=False)
    for _ in range(3):
        trainer.train_step(trainer_rows(trainer))
    trainer.save()
    again = Trainer(recipe, tmp_path / "adapter", CPU, flex=False)
    again.resume()
    assert again.step == 3
    model = load_llama(tmp_path / "known")
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    merge(model, tmp_path / "adapter")
    assert {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])} == {
        name for name in before if name.endswith("_proj.weight")
    }
    batch = batch_of(encode, length=200)
    logits = [one(batch["ids"], batch["positions"], make_mask(batch, flex=False)) for one in (again.model, model)]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)


def test_an_adapter_needs_its_model(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["", "--out", str(tmp_path), "--lora", "4"])
    with pytest.raises(SystemExit, match="--start"):
        main()


def test_families(tmp_path):
    """Rows have worlds of each family, and the log has exact match per kind of question and mask."""
    recipe = dataclasses.replace(RECIPE, families=("table", "order"), steps=1)
    trainer = weights_after(recipe, tmp_path)
    rows = [row for ids in trainer_rows(trainer)[:, FIELDS.index("ids")] for row in ids.tolist()]
    text = trainer.tokenizer.decode(rows)
    assert "Columns: name" in text and "came with a" in text
    *_, last = (json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines())
    kinds = ("table 1-hop", "order 1-hop", "order 2-hop")
    found = [f"{mask} {kind}" for mask in MASKS for kind in kinds]
    assert [key for key in last if "hop" in key] == found


def trainer_rows(trainer):
    start_worker(trainer.tokenizer.to_str())
    return make_rows(trainer.recipe, trainer.step)


def test_loss_falls(tmp_path, encode):
    """On one batch, repeated, both losses fall."""
    trainer = Trainer(dataclasses.replace(RECIPE, learning_rate=3e-3), tmp_path, CPU, flex=False)
    rows = trainer_rows(trainer)
    before = losses(trainer.model, to_batch(rows, CPU), make_mask(to_batch(rows, CPU), flex=False))
    for _ in range(RECIPE.steps):
        after = trainer.train_step(rows)
    assert after[0] < before[0] - 1 and after[1] < before[1] - 1
