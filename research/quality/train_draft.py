"""Trains an EAGLE head for the small model to draft documents of generated worlds, under the full and the block mask.

    python -m research.quality.train_draft --out draft                      # half of the worlds under each mask
    python -m research.quality.train_draft --out draft-full --block-share 0

`--out` gets the head as SGLang loads it, and `log.jsonl`. A row is a world: an instruction and documents, of which the
last ones are text. Under the block mask those before are chunks of one to twelve documents. The loss is the cross
entropy to what the target predicts at the last tokens, in each step of a chain. Twelve minutes on one core of a CPU.
"""

import argparse
import dataclasses
import json
import math
import random
import time
from pathlib import Path

import torch

from benchmark.sample import TRAINED
from oracle.block_mask import visibility
from oracle.segments import Segment, chunk, text, token_ids
from research.quality.draft_head import DraftHead
from research.quality.llama import load_llama
from research.quality.vocabulary import BOS, Encoder, train_tokenizer
from research.quality.worlds import Split, make_world
from sglang_lazy.verify.prompts import INSTRUCTION, document_text


@dataclasses.dataclass(frozen=True)
class Recipe:
    """length: tokens of a row.  num_last: of which so many count.  chain: drafts in a row.  people: in a world."""

    steps: int = 400
    rows: int = 4
    length: int = 640
    num_last: int = 192
    chain: int = 3
    people: int = 40
    similar: float = 0.5
    block_share: float = 0.5
    learning_rate: float = 2e-3
    warm_up: int = 40
    seed: int = 0

    def rate(self, step: int) -> float:
        """The learning rate of a step: linear warm-up, then cosine decay to a fiftieth."""
        progress = max(0.0, step - self.warm_up) / max(1, self.steps - self.warm_up)
        return self.learning_rate * min(1.0, (step + 1) / self.warm_up) * (0.51 + 0.49 * math.cos(math.pi * progress))


def documents(rng: random.Random, encode: Encoder, recipe: Recipe, split: Split) -> list[list[int]]:
    """The tokens of a world's documents."""
    world = make_world(rng, split, recipe.people, recipe.similar)
    return [encode(document_text({"title": title, "text": body})) for title, body in world.documents]


def in_chunks(docs: list[list[int]], sizes: list[int]) -> list[Segment]:
    """Documents one after the other in chunks of so many."""
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    parts = [docs[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    return [chunk([token for doc in part for token in doc]) for part in parts if part]


def make_row(rng: random.Random, encode: Encoder, recipe: Recipe) -> list[Segment]:
    """The segments of a prompt of at least `length` tokens."""
    docs = documents(rng, encode, recipe, "train")
    sizes, before, room = [], 0, recipe.length - recipe.num_last
    while before < len(docs) and sum(map(len, docs[: before + 1])) < room:
        before += 1
    while (left := before - sum(sizes)) > 0:
        sizes.append(min(left, rng.randint(1, 12)))
    segments = [text([BOS, *encode(INSTRUCTION)]), *in_chunks(docs, sizes), text(sum(docs[before:], []))]
    return segments if rng.random() < recipe.block_share else [text(token_ids(segments))]


def following(segments: list[Segment]) -> list[int]:
    """The token after each, as a server's draft reads them: after a chunk's last one it is the chunk's first one."""
    ids, place = token_ids(segments), 0
    after = [*ids[1:], ids[0]]
    for segment in segments:
        place += len(segment.ids)
        if segment.kind == "chunk":
            after[place - 1] = segment.ids[0]
    return after


class Trainer:
    def __init__(self, recipe: Recipe, target: Path):
        self.recipe, self.path = recipe, target
        self.encode = Encoder(train_tokenizer())
        torch.manual_seed(recipe.seed)
        self.target = load_llama(target).requires_grad_(False)
        self.head = DraftHead(self.target.shape)
        self.optimizer = torch.optim.AdamW(self.head.parameters(), betas=(0.9, 0.98), weight_decay=0.01)

    def rows(self, step: int) -> list[list[Segment]]:
        rngs = (random.Random(f"{self.recipe.seed}/{step}/{row}") for row in range(self.recipe.rows))
        return [make_row(rng, self.encode, self.recipe) for rng in rngs]

    def losses(self, rows: list[list[Segment]]) -> tuple[torch.Tensor, list[float]]:
        """The loss, and how often each step of a chain guesses what the target predicts."""
        length, num_last = self.recipe.length, self.recipe.num_last
        ids, after = (torch.tensor([of(row)[:length] for row in rows]) for of in (token_ids, following))
        sees = torch.stack([visibility(row, 0)[:length, :length] for row in rows])
        states = self.target.states(ids, torch.arange(length).expand_as(ids), sees[:, None])
        expected = self.target.logits(states[:, -num_last:])[:, 1:].log_softmax(-1)
        best = expected.argmax(-1)
        loss, right = torch.zeros(()), []
        for step, output in enumerate(self.head(self.target, states, after, sees, num_last, self.recipe.chain)):
            guessed = self.target.logits(output[:, step:-1]).log_softmax(-1)
            loss = loss - (expected[:, step:].exp() * guessed).sum(-1).mean()
            right.append((guessed.argmax(-1) == best[:, step:]).float().mean().item())
        return loss, right

    def step(self, number: int) -> tuple[float, list[float]]:
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.rate(number)
        loss, right = self.losses(self.rows(number))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item(), right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    recipe = Recipe()
    parser.add_argument("--out", type=Path, required=True, help="folder of the head and the log")
    parser.add_argument("--target", type=Path, default=TRAINED, help="the model; default: %(default)s")
    parser.add_argument("--steps", type=int, default=recipe.steps, help="default: %(default)s")
    parser.add_argument("--rows", type=int, default=recipe.rows, help="worlds of a step; default: %(default)s")
    parser.add_argument(
        "--block-share",
        type=float,
        default=recipe.block_share,
        help="worlds under the block mask; default: %(default)s",
    )
    parser.add_argument("--seed", type=int, default=recipe.seed)
    args = parser.parse_args()
    recipe = Recipe(steps=args.steps, rows=args.rows, block_share=args.block_share, seed=args.seed)
    trainer, start = Trainer(recipe, args.target), time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    with open(args.out / "log.jsonl", "w", encoding="utf-8") as log:
        print(json.dumps({"recipe": dataclasses.asdict(recipe), "torch": torch.__version__}), file=log, flush=True)
        for number in range(recipe.steps):
            loss, right = trainer.step(number)
            if number % 10 == 9:
                minutes = round((time.monotonic() - start) / 60, 2)
                shares = [round(share, 3) for share in right]
                line = json.dumps({"step": number + 1, "loss": round(loss, 4), "right": shares, "minutes": minutes})
                print(line, file=log, flush=True)
                print(line, flush=True)
    trainer.head.save(args.out, args.target)


if __name__ == "__main__":
    main()
