"""Code shared by all training: packed rows as batches, updates, checkpoints, and the loop with time limit and log."""

import abc
import dataclasses
import functools
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from research.quality.llama import Mask
from research.quality.packing import ANSWER, FIELDS
from research.quality.recipe import Feed, Recipe

Batch = dict[str, torch.Tensor]
"""The fields of rows by name, each [rows, length] int64."""
Sees = Callable[..., torch.Tensor]


def to_batch(rows: np.ndarray, device: torch.device, names: Sequence[str] = FIELDS) -> Batch:
    """rows: [rows, len(names), length]. The copy does not wait for work queued on the device."""
    tensor = torch.from_numpy(rows)
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # from pageable memory the copy would wait
    return dict(zip(names, tensor.to(device, non_blocking=True).long().unbind(1), strict=True))


def make_mask(batch: Batch, flex: bool) -> Mask:
    """The rule at the top of packing.py, as FlexAttention's block mask or as a tensor."""
    worlds, chunks, branches = batch["worlds"], batch["chunks"], batch["branches"]

    def sees(b, h, q, k):
        text = (chunks[b, q] == 0) & (chunks[b, k] >= 0)
        chunk = text | (chunks[b, q].abs() == chunks[b, k].abs())
        branch = (branches[b, k] == 0) | (branches[b, q] == branches[b, k])
        return (k <= q) & (worlds[b, q] == worlds[b, k]) & chunk & branch

    rows, length = worlds.shape
    return as_mask(sees, (rows, length, length), worlds.device, flex)


def as_mask(sees: Sees, sizes: tuple[int, int, int], device: torch.device, flex: bool) -> Mask:
    """sees(row, head, query, key) for all of `sizes`, the numbers of rows, queries and keys."""
    rows, queries, keys = sizes
    if flex:
        create = compiled_block_mask() if device.type == "cuda" else create_block_mask
        return create(sees, rows, None, queries, keys, device=device)
    row, query, key = (torch.arange(size, device=device) for size in sizes)
    return sees(row[:, None, None], 0, query[:, None], key)[:, None]


@functools.cache
def compiled_block_mask() -> Callable[..., BlockMask]:
    """One graph for each of a step's masks: by default the compiler would make the second one's sizes symbolic."""
    return torch.compile(create_block_mask, dynamic=False)


def compile_each(model: nn.Module, kinds: type | tuple[type, ...], **options: Any) -> None:
    """Compile each of the model's modules of these types separately. Modules of a type share one graph per size and
    mask; a graph of the whole model would contain every layer and take minutes to compile."""
    for module in model.modules():
        if isinstance(module, kinds):
            module.compile(dynamic=False, **options)


def by_question(batch: Batch, right: torch.Tensor) -> list[bool]:
    """Whether each answer of a batch is entirely right.  right: [rows, length] bool, each at the token before."""
    # The first token of an answer is predicted by the last one of its question, in the same branch.
    rows, positions = (batch["kinds"] == ANSWER).nonzero(as_tuple=True)
    found = [rows, *(values[rows, positions] for values in (batch["worlds"], batch["branches"], right))]
    questions: dict[tuple[int, int, int], bool] = {}
    for row, world, branch, token in torch.stack(found, dim=1).tolist():
        questions[row, world, branch] = questions.get((row, world, branch), True) and bool(token)
    return list(questions.values())


class Training(abc.ABC):
    """A model in training, its optimizer, and the files in `directory`. Parameters without gradients are frozen."""

    def __init__(self, recipe: Recipe, model: nn.Module, directory: Path, device: torch.device):
        self.recipe, self.model, self.directory, self.device = recipe, model, directory, device
        directory.mkdir(parents=True, exist_ok=True)
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        matrices = [weight for weight in trained if weight.dim() > 1]
        norms = [weight for weight in trained if weight.dim() == 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": norms, "weight_decay": 0.0}],
            betas=(0.9, 0.98),
            fused=device.type == "cuda",
        )
        self.step = 0

    @abc.abstractmethod
    def feed(self, workers: int) -> Feed:
        """The data of the steps from the next one on."""

    @abc.abstractmethod
    def train_step(self, data: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Do one update. Returns the losses of answers and of everything else."""

    @abc.abstractmethod
    def evaluate(self, num_rows: int, documents: tuple[int, int]) -> dict[str, float]:
        """Metrics of the model on held-out data, for the log."""

    @abc.abstractmethod
    def save_model(self) -> None:
        """Write the model for serving."""

    @property
    def checkpoint(self) -> Path:
        return self.directory / "checkpoint.pt"

    def resume(self) -> None:
        """Resume from the checkpoint, if any. Raises ValueError if another recipe made it."""
        if not self.checkpoint.exists():
            return
        saved = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
        if saved["recipe"] != repr(self.recipe):
            raise ValueError(f"{self.checkpoint} is of another recipe: {saved['recipe']}")
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.step = saved["step"]

    def save(self) -> None:
        """Write the checkpoint, atomically, and the model for serving."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        partial = self.checkpoint.with_suffix(".partial")
        torch.save({**state, "step": self.step, "recipe": repr(self.recipe)}, partial)
        os.replace(partial, self.checkpoint)
        self.save_model()

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def update(self, answer: torch.Tensor, context: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Take a gradient step on both losses; returns them."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.rate(self.step)
        (answer + self.recipe.weight(self.step) * context).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return answer.detach(), context.detach()


def train(
    trainer: Training,
    minutes: float,
    workers: int,
    *,
    log_every: int = 50,
    evaluate_every: int = 2000,
    save_every: float = 3,
    evaluate_rows: int = 16,
) -> None:
    """Train until the recipe's steps are done or `minutes` have passed; save at the end and every `save_every` minutes.

    log_every, evaluate_every: in steps. evaluate_rows: rows of each kind at the end; a quarter as many before.
    """
    recipe, start = trainer.recipe, time.monotonic()
    feed = trainer.feed(workers)
    saved = logged = start
    waited, first = 0.0, trainer.step
    with open(trainer.directory / "log.jsonl", "a", encoding="utf-8") as log:

        def write(**line) -> None:
            print(json.dumps(line), file=log, flush=True)
            print(json.dumps(line), flush=True)

        def evaluate(num_rows: int, documents: tuple[int, int]) -> dict[str, float]:
            with torch.compiler.set_stance("force_eager"):  # sizes that occur only once
                return trainer.evaluate(num_rows, documents)

        write(recipe=dataclasses.asdict(recipe), step=trainer.step, torch=torch.__version__, device=str(trainer.device))
        while trainer.step < recipe.steps and time.monotonic() - start < 60 * minutes:
            asked = time.monotonic()
            rows = feed.next()
            waited += time.monotonic() - asked
            answer, context = trainer.train_step(rows)
            if trainer.step % log_every == 0:
                answer, context = answer.item(), context.item()  # synchronizes with the device
                now = time.monotonic()
                tokens = (trainer.step - first) * recipe.rows * recipe.length
                write(
                    step=trainer.step,
                    answer=round(answer, 4),
                    context=round(context, 4),
                    documents=recipe.mix(trainer.step).documents,
                    tokens_per_s=round(tokens / (now - logged)),
                    waited_s=round(waited, 2),
                    minutes=round((now - start) / 60, 2),
                )
                logged, waited, first = now, 0.0, trainer.step
            if trainer.step % evaluate_every == 0:
                write(step=trainer.step, **evaluate(evaluate_rows // 4, recipe.mix(trainer.step).documents))
                logged, first = time.monotonic(), trainer.step
            if time.monotonic() - saved > 60 * save_every:
                trainer.save()
                saved = time.monotonic()
        feed.close()
        trainer.save()
        write(step=trainer.step, done=trainer.step >= recipe.steps, **evaluate(evaluate_rows, recipe.documents))
