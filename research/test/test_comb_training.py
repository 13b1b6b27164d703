"""Training of Comb models: packed rows against single prompts, frozen weights, resuming, and saving."""

import copy
import dataclasses
import json
import math
import random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

from oracle.segments import chunk, text
from research.policies.comb import CombModel
from research.quality import comb_rows, recipe
from research.quality.comb import Comb, CrossLayer, load_comb, save_comb
from research.quality.comb_rows import CombRecipe, Example, divide, example_of, make_examples, make_worlds, world_row
from research.quality.comb_training import CombTrainer, losses, make_masks, student, to_parts
from research.quality.llama import Layer, Llama, Shape, load_llama, save_for_serving
from research.quality.packing import ANSWER, FIELDS
from research.quality.training import compile_each, train
from research.quality.vocabulary import BOS, EOS, PAD, VOCAB_SIZE, save_tokenizer, train_tokenizer

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
SHAPE = Shape(VOCAB_SIZE, 64, 96, 4, 4, 2, 16, 512)


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """A Llama with random weights, large enough that every token depends on what it sees."""
    torch.manual_seed(0)
    directory, tokenizer = tmp_path_factory.mktemp("stock"), train_tokenizer()
    model = Llama(SHAPE)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(6 if weight.dim() > 1 else 1)
    save_for_serving(model, directory, torch.bfloat16, bos=BOS, eos=EOS, pad=PAD)
    save_tokenizer(tokenizer, directory, 512)
    recipe.start_worker(tokenizer.to_str())
    return directory


@pytest.fixture(scope="module")
def settings(stock):
    return CombRecipe(
        SHAPE,
        families=("alone", "order"),
        steps=8,
        rows=2,
        length=400,
        learning_rate=3e-3,
        warm_up=2,
        first_documents=(2, 2),
        documents=(2, 4),
        questions=3,
        start=str(stock),
        cross_layers=(1, 3),
        chunk_length=300,
        text_length=200,
    )


@pytest.fixture(scope="module")
def opened(stock, settings) -> tuple[Llama, Comb]:
    """The model with its gates wide open, so that text depends on chunks."""
    decoder, comb = load_llama(stock), Comb(SHAPE, settings.cross_layers)
    comb.start_from(decoder)
    with torch.no_grad():
        for cross in comb.cross_layers:
            cross.cross_attn_attn_gate.fill_(0.7)
            cross.cross_attn_mlp_gate.fill_(-0.4)
            cross.cross_attn.q_norm.weight.uniform_(0.5, 1.5)
            cross.cross_attn.k_norm.weight.uniform_(0.5, 1.5)
    return decoder, comb


class Reference:
    """A Comb model in plain PyTorch, loaded from a checkpoint in public naming; one prompt at a time."""

    def __init__(self, directory):
        self.config = json.loads((directory / "config.json").read_text())
        self.text = self.config["text_config"]
        self.weights = {}
        for path in directory.glob("*.safetensors"):
            self.weights |= {name: weight.float() for name, weight in load_file(path).items()}

    def logits(self, before, chunks, after):
        """After each token of the text, [n, vocab_size]."""
        places, states = self.config["cross_attention_layers"], [self.encode(ids) for ids in chunks]
        x = self.weights["language_model.model.embed_tokens.weight"][[*before, *after]]
        causal = torch.ones(len(x), len(x)).tril().bool()
        for number in range(self.config["num_hidden_layers"] - len(places)):
            if number in places and chunks:
                layer = places.index(number)
                keys, values = (torch.cat(parts) for parts in zip(*(state[layer] for state in states), strict=True))
                x = self.cross(x, f"language_model.model.cross_layers.{layer}", keys, values)
            x = self.layer(x, f"language_model.model.layers.{number}", causal)
        return self.norm(x, "language_model.model.norm") @ self.weights["language_model.lm_head.weight"].T

    def encode(self, ids):
        x, found = self.weights["chunk_model.embed_tokens.weight"][list(ids)], []
        for layer in range(len(self.config["cross_attention_layers"])):
            x = self.layer(x, f"chunk_model.layers.{layer}", torch.ones(len(ids), len(ids)).bool())
            found.append([self.heads(x, f"chunk_model.{kind}_proj.{layer}") for kind in "kv"])
        return found

    def layer(self, x, name, mask):
        h = self.norm(x, f"{name}.input_layernorm")
        q, k, v = (self.heads(h, f"{name}.self_attn.{kind}_proj") for kind in "qkv")
        x = x + self.attend(self.turn(q), self.turn(k), v, mask) @ self.weights[f"{name}.self_attn.o_proj.weight"].T
        return x + self.mlp(self.norm(x, f"{name}.post_attention_layernorm"), f"{name}.mlp")

    def cross(self, x, name, keys, values):
        attention = f"{name}.cross_attn"
        q = self.norm(self.heads(self.norm(x, f"{name}.input_layernorm"), f"{attention}.q_proj"), f"{attention}.q_norm")
        k, mask = self.norm(keys, f"{attention}.k_norm"), torch.ones(len(x), len(keys)).bool()
        read = self.attend(q, k, values, mask) @ self.weights[f"{attention}.o_proj.weight"].T
        x = x + self.weights[f"{name}.cross_attn_attn_gate"].tanh() * read
        fed = self.mlp(self.norm(x, f"{name}.post_attention_layernorm"), f"{name}.mlp")
        return x + self.weights[f"{name}.cross_attn_mlp_gate"].tanh() * fed

    def mlp(self, x, name):
        gate, up, down = (self.weights[f"{name}.{kind}_proj.weight"] for kind in ("gate", "up", "down"))
        gated = x @ gate.T
        return (gated * gated.sigmoid() * (x @ up.T)) @ down.T

    def norm(self, x, name):
        return (
            x / (x.square().mean(-1, keepdim=True) + self.text["rms_norm_eps"]).sqrt() * self.weights[f"{name}.weight"]
        )

    def heads(self, x, name):
        """[n, heads, head_dim]."""
        return (x @ self.weights[f"{name}.weight"].T).unflatten(-1, (-1, self.text["head_dim"]))

    def turn(self, x):
        half = self.text["head_dim"] // 2
        speeds = torch.tensor([self.text["rope_theta"] ** (-pair / half) for pair in range(half)])
        turned = torch.view_as_complex(torch.stack([x[..., :half], x[..., half:]], -1).contiguous())
        turned = turned * torch.polar(torch.ones(len(x), half), torch.arange(len(x))[:, None] * speeds)[:, None]
        return torch.cat([turned.real, turned.imag], -1)

    def attend(self, q, k, v, mask):
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(self.text["head_dim"])
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v).flatten(1)


def rows_of(settings, grouped=0.5, seed=0):
    mix = dataclasses.replace(settings.mix(settings.steps), block_share=1)
    made = [world_row(random.Random(f"{seed}/{row}"), mix, settings, grouped) for row in range(settings.rows)]
    return divide(np.stack(made), settings)


def prompts_of(rows):
    """Each question of a row: the text before the chunks, the chunks, the question with its answer, and the answer's
    place."""
    for number, row in enumerate(rows.full):
        fields = dict(zip(FIELDS, row, strict=True))
        for world in range(1, fields["worlds"].max() + 1):
            mine = fields["worlds"] == world
            chunks = [
                fields["ids"][mine & (fields["chunks"] == n)].tolist()
                for n in range(1, fields["chunks"][mine].max() + 1)
            ]
            before = fields["ids"][mine & (fields["chunks"] == 0) & (fields["branches"] == 0)].tolist()
            for branch in range(1, fields["branches"][mine].max() + 1):
                where = np.flatnonzero(mine & (fields["branches"] == branch))
                yield before, chunks, fields["ids"][where].tolist(), number, where


def test_same_as_reference(opened, settings, tmp_path):
    """A question in a packed row has the logits of a plain model that reads the saved files, prompt by prompt; also
    with FlexAttention. Chunks are documents or runs of documents, and they matter."""
    decoder, comb = opened
    save_comb(decoder, comb, tmp_path, torch.float32, {})
    reference, rows = Reference(tmp_path), rows_of(settings)
    parts, sizes = to_parts(rows, CPU), set()
    with torch.inference_mode():
        states = student(comb, decoder, parts.chunks, parts.texts, make_masks(parts, flex=False))
        ours = decoder.logits(states)
        for before, chunks, after, number, where in prompts_of(rows):
            right = reference.logits(before, chunks, after)[len(before) : -1]
            found = ours[number, np.isin(parts.texts["places"][number], where[:-1])]
            torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)
            assert (right - reference.logits(before, chunks[1:], after)[len(before) : -1]).abs().max() > 0.1
            sizes.add(len(chunks))
    assert len(sizes) > 1


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_losses(opened, settings, stock, tmp_path):
    """Losses equal those of single prompts: the plain model's logits against Hugging Face's under full attention."""
    decoder, comb = opened
    save_comb(decoder, comb, tmp_path, torch.float32, {})
    reference, rows = Reference(tmp_path), rows_of(settings)
    teacher, kinds = AutoModelForCausalLM.from_pretrained(stock, dtype=torch.float32), FIELDS.index("kinds")
    answers, questions = [], []
    with torch.inference_mode():
        for before, chunks, after, number, where in prompts_of(rows):
            prompt = [*before, *(token for ids in chunks for token in ids), *after]
            target = teacher(torch.tensor([prompt])).logits[0, -len(after) : -1].log_softmax(-1)
            found = reference.logits(before, chunks, after)[len(before) : -1].log_softmax(-1)
            kl = (target.exp() * (target - found)).sum(-1)
            begin = next(index for index, place in enumerate(where) if rows.full[number, kinds, place] == ANSWER)
            questions.append(kl[:begin])
            answers.append(kl[begin:] - found[begin:].gather(-1, torch.tensor(after[begin + 1 :])[:, None])[:, 0])
        parts = to_parts(rows, CPU)
        for flex in (False, True):
            answer, question = losses(comb, decoder, parts, make_masks(parts, flex))
            assert answer.item() == pytest.approx(torch.cat(answers).mean().item(), rel=1e-4)
            assert question.item() == pytest.approx(torch.cat(questions).mean().item(), rel=1e-4)
    assert question > 0.01


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("flex", [False, True])
def test_layers_share_what_is_compiled(opened, settings, flex):
    """One graph each for the teacher's layers, the encoder's, the cross layers and the decoder's, reused for every
    step."""
    decoder, comb = copy.deepcopy(opened)
    counter = CompileCounter()
    steps = [to_parts(make_worlds(settings, step), CPU) for step in range(3)]
    with torch.set_grad_enabled(not flex):  # FlexAttention has no backward pass on CPUs
        plain = [losses(comb, decoder, parts, make_masks(parts, flex)) for parts in steps]
        compile_each(decoder, Layer, backend=counter, fullgraph=True)
        compile_each(comb, (Layer, CrossLayer), backend=counter, fullgraph=True)
        for parts, expected in zip(steps, plain, strict=True):
            torch.testing.assert_close(losses(comb, decoder, parts, make_masks(parts, flex)), expected)
            assert counter.frame_count == 4


def test_no_step_depends_on_tensor_values(opened, settings):
    """No size and no branch may depend on a tensor's values: fake tensors have none."""
    parts = to_parts(make_worlds(settings, 0), CPU)
    with FakeTensorMode(allow_non_fake_inputs=True):
        losses(*opened[::-1], parts, make_masks(parts, flex=False))


@pytest.mark.parametrize("together", [False, True])
def test_prompts(opened, settings, tmp_path, together):
    """An evaluated prompt has the plain model's logits and greedy answer, in any order of its chunks."""
    decoder, comb = opened
    save_comb(decoder, comb, tmp_path, torch.float32, {})
    model, reference = CombModel(tmp_path, decoder.state_dict(), "cpu"), Reference(tmp_path)
    before, chunks, after = [BOS, 70, 71], [[80, 81, 82, 83], [90, 91], [60] * 5], [72, 73, 74]
    answer = [100, 101, 102]
    for order in (chunks, chunks[::-1]):
        prompt = model.start([text(before), *map(chunk, order), text(after)], together)
        encoded = [[token for ids in order for token in ids]] if together else chunks
        right = reference.logits(before, encoded, [*after, *answer[:-1]])[-3:].log_softmax(-1)
        torch.testing.assert_close(prompt.score(answer), right, rtol=1e-4, atol=1e-4)
        says = prompt.greedy(3, end=-1)
        assert says == reference.logits(before, encoded, [*after, *says[:-1]])[-3:].argmax(-1).tolist()
        assert prompt.greedy(3, end=says[1]) == says[: says.index(says[1])]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention(opened, settings):
    decoder, comb = opened
    parts = to_parts(rows_of(settings), CPU)
    with torch.inference_mode():
        flex, explicit = (
            student(comb, decoder, parts.chunks, parts.texts, make_masks(parts, flex)) for flex in (True, False)
        )
    text = parts.texts["worlds"] > 0
    torch.testing.assert_close(flex[text], explicit[text], rtol=1e-4, atol=1e-4)


def test_closed_gates(stock, settings):
    """Before training, the states of text are bitwise those of the decoder reading the text alone."""
    decoder, comb = load_llama(stock), Comb(SHAPE, settings.cross_layers)
    comb.start_from(decoder)
    parts = to_parts(rows_of(settings), CPU)
    masks = make_masks(parts, flex=False)
    with torch.inference_mode():
        plain = decoder.states(parts.texts["ids"], parts.texts["positions"], masks.texts)
        assert torch.equal(student(comb, decoder, parts.chunks, parts.texts, masks), plain)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CPU has no queue that the host could wait for")
def test_the_host_does_not_wait_for_the_device(settings, tmp_path):
    """Throughout a compiled training step, from rows to updated weights."""
    trainer = CombTrainer(settings, tmp_path, torch.device("cuda"), flex=True)
    steps = [make_worlds(settings, step) for step in range(4)]
    trainer.train_step(steps[0])
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = [loss for rows in steps[1:] for loss in trainer.train_step(rows)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(loss.isfinite() for loss in found)


def after_training(settings, directory, minutes=1e9, **options):
    trainer = CombTrainer(settings, directory, CPU, flex=False, **options)
    trainer.resume()
    train(trainer, minutes, workers=1, log_every=4, evaluate_every=10**9, save_every=1e9, evaluate_rows=1)
    return trainer


@pytest.fixture(scope="module")
def trained(settings, tmp_path_factory):
    return after_training(settings, tmp_path_factory.mktemp("straight"))


def test_plain_prompts(trained, stock):
    """A trained model's decoder is still the stock model: on plain prompts it equals Hugging Face's bit for bit."""
    model = AutoModelForCausalLM.from_pretrained(stock, dtype=torch.float32)
    ids, kept = torch.tensor([[BOS, *range(40, 90)]]), {}
    right = model(ids).logits
    for path in trained.directory.glob("*.safetensors"):
        for name, weight in load_file(path).items():
            if name.startswith("language_model.") and "cross_layers" not in name:
                kept[name.removeprefix("language_model.")] = weight
    model.load_state_dict(kept, strict=True)
    assert torch.equal(model(ids).logits, right)


def test_gates_open(trained):
    for cross in trained.model.cross_layers:
        assert cross.cross_attn_attn_gate.abs() > 1e-4 and cross.cross_attn_mlp_gate.abs() > 1e-4


def test_log(trained):
    """Exact match and KL for each kind of question, with one document or several per chunk."""
    *_, last = (json.loads(line) for line in (trained.directory / "log.jsonl").read_text().splitlines())
    for kind in ("alone 1-hop", "alone 2-hop", "order 1-hop", "order 2-hop"):
        assert {f"full {kind}", f"comb {kind}", f"comb {kind} KL", f"comb, grouped {kind}"} <= last.keys()


def test_resume(trained, settings, tmp_path):
    """Training that stops and resumes gives bitwise the same weights as training that does not stop."""
    stopped = CombTrainer(settings, tmp_path, CPU, flex=False)
    for step in range(3):
        stopped.train_step(make_worlds(settings, step))
    stopped.save()
    resumed = after_training(settings, tmp_path)
    assert resumed.step == settings.steps
    for name, weight in trained.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name]), name
    with pytest.raises(ValueError, match="another recipe"):
        after_training(dataclasses.replace(settings, grouped=0.1), tmp_path)


def test_loss_falls(settings, tmp_path):
    """Repeating one batch brings the model closer to the teacher's distributions."""
    trainer = CombTrainer(dataclasses.replace(settings, steps=50), tmp_path, CPU, flex=False)
    rows = rows_of(settings)
    losses = [sum(trainer.train_step(rows)).item() for _ in range(40)]
    assert losses[-1] < 0.5 * losses[0]


def test_files(opened, tmp_path, monkeypatch):
    """Weights in several files are read back unchanged."""
    monkeypatch.setattr("research.quality.comb.SHARD", 400_000)
    decoder, comb = opened
    save_comb(decoder, comb, tmp_path, torch.float32, {})
    paths = list(tmp_path.glob("*.safetensors"))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(paths) > 2 and set(index.values()) == {path.name for path in paths}
    for saved, ours in zip(load_comb(tmp_path), (decoder, comb), strict=True):
        assert saved.state_dict().keys() == ours.state_dict().keys()
        assert all(map(torch.equal, saved.parameters(), ours.parameters()))


def test_examples(settings, stock, tmp_path):
    """Prompts from files: rows hold them whole, with chunks in another order or left out; a tenth is held out."""
    examples = [
        example_of([text([BOS, n]), chunk([n] * 5), chunk([n, 7, 8]), text([n, 9]), text([n, 10])], [n, EOS])
        for n in range(100, 120)
    ]
    assert examples[0] == Example((BOS, 100), ((100,) * 5, (100, 7, 8)), (100, 9, 100, 10), (100, EOS))
    settings = dataclasses.replace(settings, data=("some.jsonl",), steps=2)
    trainer = after_training(settings, tmp_path, examples=examples)
    held_out = {example.before[1] for example in trainer.examples[: trainer.held_out]}
    assert len(held_out) == 2
    comb_rows.start_worker(trainer.examples[trainer.held_out :])
    orders = set()
    for before, chunks, after, _, _ in prompts_of(make_examples(settings, 0)):
        assert before[1] not in held_out and after == [before[1], 9, before[1], 10, before[1], EOS]
        orders.add(tuple(map(len, chunks)))
    assert orders == {(5, 3), (3, 5), (5,), (3,)}
    *_, last = (json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines())
    assert {"KL", "same best token"} <= last.keys()


def test_bad_prompts():
    with pytest.raises(ValueError, match="text after"):
        example_of([text([1]), chunk([2])], [3])
    with pytest.raises(ValueError, match="cross layers"):
        Comb(SHAPE, (1, 4))
