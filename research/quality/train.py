"""Trains the small model for retrieval questions, under the full and the block mask, and saves it for serving.

    python -m research.quality.train --out tiny-rag                       # half of the worlds under each mask
    python -m research.quality.train --out tiny-stock --mask full
    python -m research.quality.train --out leaning-stock --mask full --world leaning
    python -m research.quality.train --out leaning-block --world leaning --start leaning-stock
    python -m research.quality.train --out leaning-lora --world leaning --start leaning-stock --lora 16

Training stops after `--minutes` and resumes when the command is repeated; the data of a step depend only on the seed
and the step's number. `--out` holds the model as Hugging Face and SGLang load it, or with `--lora` an adapter in PEFT's
format, `checkpoint.pt`, and `log.jsonl`. Needs torch, numpy, tokenizers and safetensors.
"""

import argparse
import functools
import os
import random
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch.nn import functional

from research.quality.adapter import add_adapter, save_adapter
from research.quality.leaning import FAMILIES, LEANING
from research.quality.llama import Layer, Llama, Mask, save_for_serving
from research.quality.packing import ANSWER, CONTEXT, Mix, make_row
from research.quality.recipe import Feed, Recipe, make_rows, start_worker
from research.quality.training import Batch, Training, by_question, compile_each, make_mask, to_batch, train
from research.quality.vocabulary import BOS, EOS, PAD, Encoder, save_tokenizer, train_tokenizer
from research.quality.worlds import Split

BLOCK_SHARES = {"full": 0.0, "block": 1.0, "mixed": 0.5}
"""The share of worlds under the block mask."""
MASKS = {
    "full": {"block_share": 0.0},
    "block": {"block_share": 1.0},
    "lead": {"block_share": 1.0, "lead_share": 1.0},
    "neutral": {"block_share": 1.0, "lead_share": 1.0, "neutral_share": 1.0},
    "recomputed": {"block_share": 1.0, "recompute_share": 1.0},
}
"""Settings for the worlds in which each mask is evaluated."""
WORLDS = {"people": ("people",), "leaning": tuple(LEANING)}
"""The families of worlds to train on."""


def losses(model: Llama, batch: Batch, mask: Mask) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean cross entropy of answers, and of everything else."""
    logits = model(batch["ids"], batch["positions"], mask)
    each = functional.cross_entropy(logits.flatten(0, 1).float(), batch["targets"].flatten(), reduction="none")
    kinds = batch["kinds"].flatten()
    answer, context = ((each * (kinds == kind)).sum() / (kinds == kind).sum() for kind in (ANSWER, CONTEXT))
    return answer, context


@torch.inference_mode()
def exact_match(model: Llama, batch: Batch, mask: Mask) -> list[bool]:
    """For each question of a batch, whether greedy decoding would give the answer: each of its tokens is the best one
    after the ones before it."""
    return by_question(batch, model(batch["ids"], batch["positions"], mask).argmax(-1) == batch["targets"])


class Trainer(Training):
    """The small model, trained under either mask."""

    def __init__(self, recipe: Recipe, directory: Path, device: torch.device, flex: bool):
        self.flex = flex
        self.tokenizer = train_tokenizer()
        torch.manual_seed(recipe.seed)
        model = Llama(recipe.shape).to(device)
        if recipe.start:
            weights = load_file(Path(recipe.start) / "model.safetensors")
            model.load_state_dict({name: weight.float() for name, weight in weights.items()})
        if recipe.lora:
            add_adapter(model, recipe.lora)
        super().__init__(recipe, model, directory, device)
        if flex:
            compile_each(model, Layer)

    def save_model(self) -> None:
        if self.recipe.lora:
            return save_adapter(self.model, self.directory)
        save_for_serving(self.model, self.directory, torch.bfloat16, bos=BOS, eos=EOS, pad=PAD)
        save_tokenizer(self.tokenizer, self.directory, self.recipe.shape.max_position_embeddings)

    def feed(self, workers: int) -> Feed:
        prepare = functools.partial(start_worker, self.tokenizer.to_str())
        return Feed(functools.partial(make_rows, self.recipe), prepare, range(self.step, self.recipe.steps), workers)

    def train_step(self, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        batch = to_batch(rows, self.device)
        with self.autocast():
            answer, context = losses(self.model, batch, make_mask(batch, self.flex))
        return self.update(answer, context)

    def evaluate(self, num_rows: int, documents: tuple[int, int], split: Split = "test") -> dict[str, float]:
        """Exact match on questions about held-out names, by mask, family and hops."""
        encode, results = Encoder(self.tokenizer), {}
        for mask, shares in MASKS.items():
            for family, hops in (
                (name, hops) for name in dict.fromkeys(self.recipe.families) for hops in FAMILIES[name].hops
            ):
                mix = Mix(documents, (family,), self.recipe.questions, hops - 1, bos_share=1, **shares)
                right = []
                for number in range(num_rows):
                    row = make_row(random.Random(f"{hops}/{number}"), encode, mix, self.recipe.length, split)
                    batch = to_batch(row[None], self.device)
                    with self.autocast():
                        right += exact_match(self.model, batch, make_mask(batch, flex=False))
                results[f"{mask} {family} {hops}-hop"] = round(sum(right) / len(right), 4)
        return results


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    recipe = Recipe()
    parser.add_argument("--out", type=Path, required=True, help="folder of the model, its checkpoint and the log")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="stop after this many; the same command resumes"
    )
    parser.add_argument("--steps", type=int, default=recipe.steps, help="training steps; default: %(default)s")
    parser.add_argument("--rows", type=int, default=recipe.rows, help="rows per step; default: %(default)s")
    parser.add_argument("--mask", choices=list(BLOCK_SHARES), default="mixed", help="default: half under each")
    parser.add_argument(
        "--lead-share",
        type=float,
        default=recipe.lead_share,
        help="share of worlds under the block mask with a copy of the leading text in front of each chunk, as under "
        "base:preamble=lead; default: %(default)s",
    )
    parser.add_argument(
        "--neutral-share",
        type=float,
        default=recipe.neutral_share,
        help="share of those worlds with a neutral text in front of each chunk instead, as under base; "
        "default: %(default)s",
    )
    parser.add_argument(
        "--recompute-share",
        type=float,
        default=recipe.recompute_share,
        help="share of worlds under the block mask in which some tokens of chunks, the first ones or random ones, are "
        "recomputed in context; default: %(default)s",
    )
    parser.add_argument("--world", choices=list(WORLDS), default="people", help="default: %(default)s")
    parser.add_argument("--more", nargs="+", choices=list(FAMILIES), default=(), help="families to draw more often")
    parser.add_argument("--start", default="", help="folder of the model to start from")
    parser.add_argument(
        "--grow", type=float, help=f"share of the steps over which worlds grow; default: {recipe.grow}, with --start 0"
    )
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train an adapter of the model at --start")
    parser.add_argument("--length", type=int, default=recipe.length, help="tokens per row; default: %(default)s")
    parser.add_argument("--learning-rate", type=float, default=recipe.learning_rate, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=recipe.seed)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="data processes")
    parser.add_argument("--attention", choices=("flex", "sdpa"), help="default: flex on a GPU, else sdpa")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.lora and not args.start:
        sys.exit("error: --lora needs the model of the adapter: --start")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    recipe = Recipe(
        steps=args.steps,
        rows=args.rows,
        learning_rate=args.learning_rate,
        block_share=BLOCK_SHARES[args.mask],
        lead_share=args.lead_share,
        neutral_share=args.neutral_share,
        recompute_share=args.recompute_share,
        families=(*WORLDS[args.world], *args.more),
        grow=(0.0 if args.start else Recipe.grow) if args.grow is None else args.grow,
        start=args.start,
        lora=args.lora,
        length=args.length,
        seed=args.seed,
    )
    trainer = Trainer(
        recipe, args.out, device, flex=(args.attention or ("flex" if device.type == "cuda" else "sdpa")) == "flex"
    )
    trainer.resume()
    train(trainer, args.minutes, args.workers)


if __name__ == "__main__":
    main()
