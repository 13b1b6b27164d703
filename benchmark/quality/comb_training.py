"""The training of a Comb model: its losses against the frozen decoder's own answers under full attention."""

import dataclasses
import functools
import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.nn import functional

from benchmark.quality import comb_rows, recipe
from benchmark.quality.comb import Comb, save_comb
from benchmark.quality.comb_rows import PARTS, CombRecipe, Example, Rows, divide, make_examples, make_worlds, world_row
from benchmark.quality.leaning import FAMILIES
from benchmark.quality.llama import Llama, Mask, load_llama
from benchmark.quality.packing import ANSWER, Mix
from benchmark.quality.recipe import Feed
from benchmark.quality.training import Batch, Training, as_mask, by_question, make_mask, to_batch

GROUPED = {"comb": 0, "comb, grouped": 1}
"""The share of an evaluation's worlds in which several documents are a chunk."""


class Parts(NamedTuple):
    """A step's rows on the device. full: the teacher's; chunks, texts: PARTS, each [rows, length] int64."""

    full: Batch
    chunks: Batch
    texts: Batch
    scored: torch.Tensor


class Masks(NamedTuple):
    """full: the teacher's; cross: which text token sees which chunk token."""

    full: Mask
    chunks: Mask
    texts: Mask
    cross: Mask


def to_parts(rows: Rows, device: torch.device) -> Parts:
    def part(array: np.ndarray) -> Batch:
        return dict(zip(PARTS, torch.from_numpy(array).to(device).long().unbind(1), strict=True))

    scored = torch.from_numpy(rows.scored).to(device)
    return Parts(to_batch(rows.full, device), part(rows.chunks), part(rows.texts), scored)


def make_masks(parts: Parts, flex: bool) -> Masks:
    """A chunk's tokens see all of it; text sees the text before it, as in packing.py, and all chunks of its world.

    Padding is of world 0 in both; there its text sees one token, so that every token sees something.
    """
    chunk_worlds, chunk_numbers = parts.chunks["worlds"], parts.chunks["numbers"]
    text_worlds, branches = parts.texts["worlds"], parts.texts["numbers"]

    def within(b, h, q, k):
        return (chunk_worlds[b, q] == chunk_worlds[b, k]) & (chunk_numbers[b, q] == chunk_numbers[b, k])

    def behind(b, h, q, k):
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
        as_mask(behind, (rows, num_text, num_text), device, flex),
        as_mask(across, (rows, num_text, num_chunks), device, flex),
    )


def student(comb: Comb, decoder: Llama, chunks: Batch, texts: Batch, masks: Masks) -> torch.Tensor:
    """The states behind all text, [rows, text_length, hidden_size]."""
    known = comb.encode(decoder, chunks["ids"], chunks["positions"], masks.chunks)
    return comb.states(decoder, texts["ids"], texts["positions"], masks.texts, known, masks.cross)


def divergence(found: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """KL(target || found) of log-probabilities [n, vocab_size]; [n]."""
    return (target.exp() * (target - found)).sum(-1)


def is_answer(parts: Parts) -> torch.Tensor:
    """Of `parts.scored`, those before an answer's tokens."""
    return parts.full["kinds"].flatten()[parts.scored[1]] == ANSWER


def behind_answers(parts: Parts, values: torch.Tensor) -> float:
    """The mean of one value for each of `parts.scored` over those before an answer's tokens."""
    return values[is_answer(parts)].mean().item()


class CombTrainer(Training):
    """Trains encoder and cross layers of the model at `recipe.start`, which stays as it is and is the teacher."""

    recipe: CombRecipe
    model: Comb

    def __init__(
        self, recipe: CombRecipe, directory: Path, device: torch.device, flex: bool, examples: Sequence[Example] = ()
    ):
        """examples: those of `recipe.data`, if it has any; a tenth of them is not trained on."""
        self.flex = flex
        self.decoder = load_llama(Path(recipe.start)).to(device).requires_grad_(False)
        torch.manual_seed(recipe.seed)
        comb = Comb(self.decoder.shape, recipe.cross_layers).to(device)
        comb.start_from(self.decoder)
        super().__init__(recipe, comb, directory, device)
        self.tokenizer = Tokenizer.from_file(str(Path(recipe.start) / "tokenizer.json"))
        self.examples = random.Random(recipe.seed).sample(list(examples), len(examples))
        compile_ = torch.compile if flex else lambda function: function
        self.student, self.teacher = compile_(student), compile_(self.decoder.states)

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
        """The losses of answers, KL(teacher || student) and cross entropy, and of questions, KL alone."""
        parts = to_parts(rows, self.device)
        masks = make_masks(parts, self.flex)
        with self.autocast():
            states = self.student(self.model, self.decoder, parts.chunks, parts.texts, masks)
            found, target = self.distributions(parts, masks, states, self.teacher)
        answer, kl = is_answer(parts), divergence(found, target)
        surprise = functional.nll_loss(found[answer], self.targets(parts)[answer])
        return self.update(kl[answer].mean() + surprise, kl[~answer].mean())

    def distributions(
        self, parts: Parts, masks: Masks, states: torch.Tensor, teacher
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities of student and teacher, both [n, vocab_size] fp32."""
        in_texts, in_full = parts.scored
        with torch.no_grad():
            known = teacher(parts.full["ids"], parts.full["positions"], masks.full)
            target = self.decoder.logits(known.flatten(0, 1)[in_full]).float().log_softmax(-1)
        return self.decoder.logits(states.flatten(0, 1)[in_texts]).float().log_softmax(-1), target

    @staticmethod
    def targets(parts: Parts) -> torch.Tensor:
        return parts.full["targets"].flatten()[parts.scored[1]]

    @torch.inference_mode()
    def evaluate(self, num_rows: int, documents: tuple[int, int]) -> dict[str, float]:
        """Of test worlds: exact match under full attention and of the Comb model, by family and hops; of held-out
        examples: how often both have the same best token. Of both, the mean KL behind answers."""
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
        """Which answers of a row are right, of the Comb model and of its teacher, and the KL behind answers."""
        rows = divide(world_row(random.Random(seed), mix, self.recipe, grouped, "test")[None], self.recipe)
        parts, found, target = self.both(rows)
        matches = []
        for logs in (found, target):
            right = torch.ones_like(parts.full["ids"], dtype=torch.bool)
            right.view(-1)[parts.scored[1]] = logs.argmax(-1) == self.targets(parts)
            matches.append(by_question(parts.full, right))
        return matches[0], matches[1], behind_answers(parts, divergence(found, target))

    def compare(self, rows: Rows) -> tuple[float, float]:
        """Behind answers, the KL and the share of equal best tokens."""
        parts, found, target = self.both(rows)
        same = target.argmax(-1) == found.argmax(-1)
        return behind_answers(parts, divergence(found, target)), behind_answers(parts, same.float())

    def both(self, rows: Rows) -> tuple[Parts, torch.Tensor, torch.Tensor]:
        parts = to_parts(rows, self.device)
        masks = make_masks(parts, flex=False)
        with self.autocast():
            states = student(self.model, self.decoder, parts.chunks, parts.texts, masks)
            return parts, *self.distributions(parts, masks, states, self.decoder.states)

    @torch.inference_mode()
    def is_plain(self) -> bool:
        """Whether the weights that were frozen are, bit for bit, those of the model at `recipe.start`."""
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
