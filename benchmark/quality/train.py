"""Trains the small model for retrieval questions, under the full and the block mask, and saves it for serving.

    python -m benchmark.quality.train --out tiny-rag                       # half of the worlds under each mask
    python -m benchmark.quality.train --out tiny-stock --mask full
    python -m benchmark.quality.train --out leaning-stock --mask full --world leaning
    python -m benchmark.quality.train --out leaning-block --world leaning --start leaning-stock

Training stops after `--minutes` and resumes when the command is repeated; the data of a step depend only on the seed
and the step's number. `--out` holds the model as Hugging Face and SGLang load it, `checkpoint.pt`, and `log.jsonl`.
Needs torch, numpy, tokenizers and safetensors.
"""

import argparse
import dataclasses
import json
import os
import random
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask

from benchmark.quality.leaning import FAMILIES, LEANING
from benchmark.quality.llama import Llama, Mask, save_for_serving
from benchmark.quality.packing import ANSWER, CONTEXT, FIELDS, Mix, make_row
from benchmark.quality.recipe import Feed, Recipe
from benchmark.quality.vocabulary import BOS, EOS, PAD, Encoder, save_tokenizer, train_tokenizer
from benchmark.quality.worlds import Split

BLOCK_SHARES = {"full": 0.0, "block": 1.0, "mixed": 0.5}
"""Of the worlds, those under the block mask."""
WORLDS = {"people": ("people",), "leaning": tuple(LEANING)}
"""The families of worlds that a model is trained on."""

Batch = dict[str, torch.Tensor]
"""FIELDS, each [rows, length] int64."""


def to_batch(rows: np.ndarray, device: torch.device) -> Batch:
    fields = torch.from_numpy(rows).to(device).long().unbind(1)
    return dict(zip(FIELDS, fields, strict=True))


def make_mask(batch: Batch, flex: bool) -> Mask:
    """The rule at the top of packing.py, as FlexAttention's block mask or as a tensor."""
    worlds, chunks, branches = batch["worlds"], batch["chunks"], batch["branches"]

    def sees(b, h, q, k):
        chunk = (chunks[b, q] == 0) | (chunks[b, q] == chunks[b, k])
        branch = (branches[b, k] == 0) | (branches[b, q] == branches[b, k])
        return (k <= q) & (worlds[b, q] == worlds[b, k]) & chunk & branch

    rows, length = worlds.shape
    if flex:
        return create_block_mask(sees, rows, None, length, length, device=worlds.device, _compile=worlds.is_cuda)
    index = torch.arange(length, device=worlds.device)
    return sees(torch.arange(rows, device=worlds.device)[:, None, None], 0, index[:, None], index)[:, None]


def losses(model: Llama, batch: Batch, mask: Mask) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean cross entropies: of answers, and of everything else."""
    logits = model(batch["ids"], batch["positions"], mask)
    each = functional.cross_entropy(logits.flatten(0, 1).float(), batch["targets"].flatten(), reduction="none")
    kinds = batch["kinds"].flatten()
    answer, context = ((each * (kinds == kind)).sum() / (kinds == kind).sum() for kind in (ANSWER, CONTEXT))
    return answer, context


@torch.inference_mode()
def exact_match(model: Llama, batch: Batch, mask: Mask) -> list[bool]:
    """For each question of a batch, whether greedy decoding would give the answer: every token of it is the best one
    after those before it."""
    right = model(batch["ids"], batch["positions"], mask).argmax(-1) == batch["targets"]
    # The first token of an answer is predicted by the last one of its question, which is of the same branch.
    rows, positions = (batch["kinds"] == ANSWER).nonzero(as_tuple=True)
    found = [rows, *(values[rows, positions] for values in (batch["worlds"], batch["branches"], right))]
    questions: dict[tuple[int, int, int], bool] = {}
    for row, world, branch, token in torch.stack(found, dim=1).tolist():
        questions[row, world, branch] = questions.get((row, world, branch), True) and bool(token)
    return list(questions.values())


class Trainer:
    """A model in training, its optimizer, and the files in `directory`."""

    def __init__(self, recipe: Recipe, directory: Path, device: torch.device, flex: bool):
        self.recipe, self.directory, self.device, self.flex = recipe, directory, device, flex
        directory.mkdir(parents=True, exist_ok=True)
        self.tokenizer = train_tokenizer()
        torch.manual_seed(recipe.seed)
        self.model = Llama(recipe.shape).to(device)
        matrices = [weight for weight in self.model.parameters() if weight.dim() > 1]
        norms = [weight for weight in self.model.parameters() if weight.dim() == 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": norms, "weight_decay": 0.0}],
            betas=(0.9, 0.98),
            fused=device.type == "cuda",
        )
        self.losses = torch.compile(losses) if flex else losses
        self.step = 0

    @property
    def checkpoint(self) -> Path:
        return self.directory / "checkpoint.pt"

    def resume(self) -> None:
        """Resume from the checkpoint or, if there is none, begin with the weights that the recipe starts from. Raises
        ValueError if the checkpoint was made by another recipe."""
        if not self.checkpoint.exists():
            if self.recipe.start:
                weights = load_file(Path(self.recipe.start) / "model.safetensors")
                self.model.load_state_dict({name: weight.float() for name, weight in weights.items()})
            return
        saved = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
        if saved["recipe"] != repr(self.recipe):
            raise ValueError(f"{self.checkpoint} is of another recipe: {saved['recipe']}")
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.step = saved["step"]

    def save(self) -> None:
        """Write the checkpoint, complete or not at all, and the model for serving."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        partial = self.checkpoint.with_suffix(".partial")
        torch.save({**state, "step": self.step, "recipe": repr(self.recipe)}, partial)
        os.replace(partial, self.checkpoint)
        save_for_serving(self.model, self.directory, torch.bfloat16, bos=BOS, eos=EOS, pad=PAD)
        save_tokenizer(self.tokenizer, self.directory, self.recipe.shape.max_position_embeddings)

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def train_step(self, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """One update. Returns the losses of answers and of everything else."""
        batch = to_batch(rows, self.device)
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.rate(self.step)
        with self.autocast():
            answer, context = self.losses(self.model, batch, make_mask(batch, self.flex))
        (answer + self.recipe.weight(self.step) * context).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return answer.detach(), context.detach()

    def evaluate(self, num_rows: int, documents: tuple[int, int], split: Split = "test") -> dict[str, float]:
        """Exact match on questions about held-out names, by mask, family and hops."""
        encode, results = Encoder(self.tokenizer), {}
        for mask, block_share in (("full", 0), ("block", 1)):
            for family, hops in (
                (name, hops) for name in dict.fromkeys(self.recipe.families) for hops in FAMILIES[name].hops
            ):
                mix = Mix(documents, (family,), self.recipe.questions, hops - 1, block_share=block_share, bos_share=1)
                right = []
                for number in range(num_rows):
                    row = make_row(random.Random(f"{hops}/{number}"), encode, mix, self.recipe.length, split)
                    batch = to_batch(row[None], self.device)
                    with self.autocast():
                        right += exact_match(self.model, batch, make_mask(batch, flex=False))
                results[f"{mask} {family} {hops}-hop"] = round(sum(right) / len(right), 4)
        return results


def train(
    trainer: Trainer,
    minutes: float,
    workers: int,
    *,
    log_every: int = 50,
    evaluate_every: int = 2000,
    save_every: float = 3,
    evaluate_rows: int = 16,
) -> None:
    """Train until the recipe's steps are done or `minutes` have passed; save then, and every `save_every` minutes.

    log_every, evaluate_every: in steps. evaluate_rows: of each kind at the end, a quarter of them on the way.
    """
    recipe, start = trainer.recipe, time.monotonic()
    feed = Feed(recipe, trainer.tokenizer, trainer.step, workers)
    saved = logged = start
    waited, first = 0.0, trainer.step
    with open(trainer.directory / "log.jsonl", "a", encoding="utf-8") as log:

        def write(**line) -> None:
            print(json.dumps(line), file=log, flush=True)
            print(json.dumps(line), flush=True)

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
                write(step=trainer.step, **trainer.evaluate(evaluate_rows // 4, recipe.mix(trainer.step).documents))
                logged, first = time.monotonic(), trainer.step
            if time.monotonic() - saved > 60 * save_every:
                trainer.save()
                saved = time.monotonic()
        feed.close()
        trainer.save()
        write(step=trainer.step, done=trainer.step >= recipe.steps, **trainer.evaluate(evaluate_rows, recipe.documents))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    recipe = Recipe()
    parser.add_argument("--out", type=Path, required=True, help="folder of the model, its checkpoint and the log")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so many, to go on later")
    parser.add_argument("--steps", type=int, default=recipe.steps, help="of the whole training; default: %(default)s")
    parser.add_argument("--rows", type=int, default=recipe.rows, help="of a step; default: %(default)s")
    parser.add_argument("--mask", choices=list(BLOCK_SHARES), default="mixed", help="default: half under each")
    parser.add_argument("--world", choices=list(WORLDS), default="people", help="default: %(default)s")
    parser.add_argument("--more", nargs="+", choices=list(FAMILIES), default=(), help="families that come more often")
    parser.add_argument("--start", default="", help="folder of the model to go on with")
    parser.add_argument("--learning-rate", type=float, default=recipe.learning_rate, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=recipe.seed)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="that make data")
    parser.add_argument("--attention", choices=("flex", "sdpa"), help="default: flex on a GPU, else sdpa")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    recipe = Recipe(
        steps=args.steps,
        rows=args.rows,
        learning_rate=args.learning_rate,
        block_share=BLOCK_SHARES[args.mask],
        families=(*WORLDS[args.world], *args.more),
        start=args.start,
        seed=args.seed,
    )
    trainer = Trainer(
        recipe, args.out, device, flex=(args.attention or ("flex" if device.type == "cuda" else "sdpa")) == "flex"
    )
    trainer.resume()
    train(trainer, args.minutes, args.workers)


if __name__ == "__main__":
    main()
