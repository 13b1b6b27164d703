"""Training of a Comb model against the frozen decoder's own answers under full attention."""

import dataclasses
import functools
import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer

from research.quality import comb_rows, recipe
from research.quality.comb import Comb, CrossLayer, save_comb
from research.quality.comb_rows import (
    CHUNK_FIELDS,
    TEXT_FIELDS,
    CombRecipe,
    Example,
    Rows,
    divide,
    make_examples,
    make_worlds,
    world_row,
)
from research.quality.divergence import kl_divergence
from research.quality.leaning import FAMILIES
from research.quality.llama import Layer, Llama, Mask, load_llama
from research.quality.packing import ANSWER, CONTEXT, FIELDS, Mix
from research.quality.recipe import Feed
from research.quality.training import Batch, Training, as_mask, by_question, compile_each, make_mask, to_batch

GROUPED = {"comb": 0, "comb, grouped": 1}
"""The share of evaluation worlds in which several documents share a chunk."""


class Parts(NamedTuple):
    """A step's rows on the device. full: the teacher's fields; chunks: CHUNK_FIELDS; texts: TEXT_FIELDS."""

    full: Batch
    chunks: Batch
    texts: Batch


class Masks(NamedTuple):
    """full: the teacher's mask; cross: which text token sees which chunk token."""

    full: Mask
    chunks: Mask
    texts: Mask
    cross: Mask


def to_parts(rows: Rows, device: torch.device) -> Parts:
    fields = (FIELDS, CHUNK_FIELDS, TEXT_FIELDS)
    return Parts(*(to_batch(part, device, names) for part, names in zip(rows, fields, strict=True)))


def make_masks(parts: Parts, flex: bool) -> Masks:
    """Chunk tokens see their whole chunk; text sees the text before it, as in packing.py, and all chunks of its world.

    Padding belongs to world 0 in both. Its text sees one token, so that every token sees something.
    """
    chunk_worlds, chunk_numbers = parts.chunks["worlds"], parts.chunks["chunks"]
    text_worlds, branches = parts.texts["worlds"], parts.texts["branches"]

    def within(b, h, q, k):
        return (chunk_worlds[b, q] == chunk_worlds[b, k]) & (chunk_numbers[b, q] == chunk_numbers[b, k])

    def causal(b, h, q, k):
        branch = (branches[b, k] == 0) | (branches[b, q] == branches[b, k])
        return (k <= q) & (text_worlds[b, q] == text_worlds[b, k]) & branch

    def across(b, h, q, k):
        world = text_worlds[b, q]
        return ((world > 0) & (world == chunk_worlds[b, k])) | ((world == 0) & (k == 0))

    (rows, num_chunks), num_text = chunk_worlds.shape, text_worlds.shape[1]
    full = {**parts.full, "chunks": torch.zeros_like(parts.full["chunks"])}
    device = text_worlds.device
    return Masks(
        make_mask(full, flex),
        as_mask(within, (rows, num_chunks, num_chunks), device, flex),
        as_mask(causal, (rows, num_text, num_text), device, flex),
        as_mask(across, (rows, num_text, num_chunks), device, flex),
    )


def student(comb: Comb, decoder: Llama, chunks: Batch, texts: Batch, masks: Masks) -> torch.Tensor:
    """The states of all text tokens, [rows, text_length, hidden_size]."""
    known = comb.encode(decoder, chunks["ids"], chunks["positions"], masks.chunks)
    return comb.states(decoder, texts["ids"], texts["positions"], masks.texts, known, masks.cross)


def distributions(comb: Comb, decoder: Llama, parts: Parts, masks: Masks) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of student and teacher after each text token, both [rows, text_length, vocab_size] fp32."""
    with torch.no_grad():
        states = decoder.states(parts.full["ids"], parts.full["positions"], masks.full)
        places = parts.texts["places"][..., None].expand(-1, -1, states.shape[-1])
        target = decoder.logits(states.gather(1, places)).float().log_softmax(-1)
    found = decoder.logits(student(comb, decoder, parts.chunks, parts.texts, masks))
    return found.float().log_softmax(-1), target


def losses(comb: Comb, decoder: Llama, parts: Parts, masks: Masks) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean loss over answers, KL(teacher || student) plus cross entropy, and the mean KL over questions."""
    found, target = distributions(comb, decoder, parts, masks)
    kl = kl_divergence(found, target)
    surprise = -found.gather(-1, parts.texts["targets"][..., None]).squeeze(-1)
    # Sums over all text: the host would have to wait for the size of a selection.
    kinds = parts.texts["kinds"]
    answer, question = (
        (each * (kinds == kind)).sum() / (kinds == kind).sum()
        for each, kind in ((kl + surprise, ANSWER), (kl, CONTEXT))
    )
    return answer, question


def mean_over_answers(parts: Parts, values: torch.Tensor) -> float:
    """The mean of `values` [rows, text_length] over the tokens that predict answer tokens."""
    return values[parts.texts["kinds"] == ANSWER].mean().item()


class CombTrainer(Training):
    """Trains an encoder and cross layers for the model at `recipe.start`, which is frozen and is the teacher."""

    recipe: CombRecipe
    model: Comb

    def __init__(
        self, recipe: CombRecipe, directory: Path, device: torch.device, flex: bool, examples: Sequence[Example] = ()
    ):
        """examples: those of `recipe.data`, if any; a tenth of them is held out."""
        self.flex = flex
        self.decoder = load_llama(Path(recipe.start)).to(device).requires_grad_(False)
        torch.manual_seed(recipe.seed)
        comb = Comb(self.decoder.shape, recipe.cross_layers).to(device)
        comb.start_from(self.decoder)
        super().__init__(recipe, comb, directory, device)
        self.tokenizer = Tokenizer.from_file(str(Path(recipe.start) / "tokenizer.json"))
        self.examples = random.Random(recipe.seed).sample(list(examples), len(examples))
        if flex:
            compile_each(self.decoder, Layer)
            compile_each(comb, (Layer, CrossLayer))

    @property
    def held_out(self) -> int:
        return -(-len(self.examples) // 10)

    def feed(self, workers: int) -> Feed:
        if self.recipe.data:
            make, prepare = make_examples, functools.partial(comb_rows.start_worker, self.examples[self.held_out :])
        else:
            make, prepare = make_worlds, functools.partial(recipe.start_worker, self.tokenizer.to_str())
        return Feed(functools.partial(make, self.recipe), prepare, range(self.step, self.recipe.steps), workers)

    def train_step(self, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        parts = to_parts(rows, self.device)
        with self.autocast():
            answer, question = losses(self.model, self.decoder, parts, make_masks(parts, self.flex))
        return self.update(answer, question)

    @torch.inference_mode()
    def evaluate(self, num_rows: int, documents: tuple[int, int]) -> dict[str, float]:
        """For test worlds: exact match of the decoder under full attention and of the Comb model, by family and hops.
        For held-out examples: how often their best tokens agree. For both, the mean KL over answers."""
        results: dict[str, float] = {"plain prompts are the decoder's": self.is_plain()}
        if self.recipe.data:
            comb_rows.start_worker(self.examples[: self.held_out])
            test = dataclasses.replace(self.recipe, rows=1, seed=-1)
            kl, same = zip(*(self.compare(make_examples(test, number)) for number in range(num_rows)), strict=True)
            return results | {"KL": mean(kl), "same best token": mean(same)}
        recipe.start_worker(self.tokenizer.to_str())
        for name in dict.fromkeys(self.recipe.families):
            for hops in FAMILIES[name].hops:
                mix = Mix(documents, (name,), self.recipe.questions, hops - 1, block_share=1, bos_share=1)
                for label, grouped in GROUPED.items():
                    found = [self.judge(f"{hops}/{number}", mix, grouped) for number in range(num_rows)]
                    kind = f"{name} {hops}-hop"
                    results[f"{label} {kind}"] = mean([one for right, _, _ in found for one in right])
                    results[f"full {kind}"] = mean([one for _, right, _ in found for one in right])
                    results[f"{label} {kind} KL"] = mean([kl for _, _, kl in found])
        return results

    def judge(self, seed: str, mix: Mix, grouped: float) -> tuple[list[bool], list[bool], float]:
        """Which of a row's answers the Comb model and its teacher get right, and the KL over answers."""
        rows = divide(world_row(random.Random(seed), mix, self.recipe, grouped, "test")[None], self.recipe)
        parts, found, target = self.both(rows)
        own, known = (by_question(parts.texts, logs.argmax(-1) == parts.texts["targets"]) for logs in (found, target))
        return own, known, mean_over_answers(parts, kl_divergence(found, target))

    def compare(self, rows: Rows) -> tuple[float, float]:
        """The KL over answers, and the share of equal best tokens."""
        parts, found, target = self.both(rows)
        same = target.argmax(-1) == found.argmax(-1)
        return mean_over_answers(parts, kl_divergence(found, target)), mean_over_answers(parts, same.float())

    def both(self, rows: Rows) -> tuple[Parts, torch.Tensor, torch.Tensor]:
        parts = to_parts(rows, self.device)
        with self.autocast():
            return parts, *distributions(self.model, self.decoder, parts, make_masks(parts, flex=False))

    @torch.inference_mode()
    def is_plain(self) -> bool:
        """Whether the frozen weights are, bit for bit, those of the model at `recipe.start`."""
        start = load_llama(Path(self.recipe.start)).state_dict()
        return all(torch.equal(weight.cpu(), start[name]) for name, weight in self.decoder.state_dict().items())

    def save_model(self) -> None:
        config = json.loads((Path(self.recipe.start) / "config.json").read_text(encoding="utf-8"))
        ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in config}
        save_comb(self.decoder, self.model, self.directory, torch.bfloat16, ids)
        for path in Path(self.recipe.start).glob("*"):
            if path.name.startswith("tokenizer") or path.name == "chat_template.jinja":
                shutil.copy(path, self.directory)


def mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 4)
