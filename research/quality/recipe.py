"""The training recipe: every setting, and the rows of each step, which worker processes make ahead of time."""

import collections
import dataclasses
import itertools
import math
import multiprocessing
import random
import signal
from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np
from tokenizers import Tokenizer

from research.quality.llama import Shape
from research.quality.packing import Mix, make_row
from research.quality.vocabulary import VOCAB_SIZE, Encoder

Data = TypeVar("Data")


def between(pair: tuple[float, float], progress: float) -> float:
    return pair[0] + progress * (pair[1] - pair[0])


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything that determines the trained weights. A step sees `rows` rows of `length` tokens."""

    shape: Shape = Shape(VOCAB_SIZE)
    families: tuple[str, ...] = ("people",)
    steps: int = 12_000
    rows: int = 16
    length: int = 4096
    learning_rate: float = 5e-4
    warm_up: int = 300
    weight_decay: float = 0.1
    context_weight: tuple[float, float] = (1.0, 0.1)  # of the loss on documents and questions; that on answers has 1
    similar: tuple[float, float] = (0.3, 0.7)  # the share of people who share a first name or surname with another
    first_documents: tuple[int, int] = (2, 4)
    documents: tuple[int, int] = (10, 20)
    grow: float = 0.4  # the share of steps over which documents and similar names increase
    questions: int = 8
    two_hop_share: float = 0.5
    hard_share: float = 0.5
    block_share: float = 0.5
    lead_share: float = 0.0  # the share of worlds under the block mask whose chunks have leads
    neutral_share: float = 0.0  # the share of leads that are neutral text
    recompute_share: float = 0.0  # the share of worlds under the block mask with recomputed tokens
    start: str = ""  # the folder of the model to start from
    lora: int = 0  # rank of the adapter to train instead of the weights; 0 for none
    seed: int = 0

    @property
    def grown(self) -> float:
        """The first step with worlds of full size."""
        return self.grow * self.steps

    def mix(self, step: int) -> Mix:
        """Settings for the worlds of a step."""
        progress = min(1.0, step / self.grown) if self.grown else 1.0
        low, high = (round(between(pair, progress)) for pair in zip(self.first_documents, self.documents, strict=True))
        similar = between(self.similar, progress)
        return Mix(
            (low, high),
            self.families,
            self.questions,
            self.two_hop_share,
            similar,
            self.hard_share,
            self.block_share,
            self.lead_share,
            self.neutral_share,
            self.recompute_share,
        )

    def weight(self, step: int) -> float:
        """The context's weight in a step's loss: constant while worlds grow, then falling."""
        return between(self.context_weight, max(0.0, step - self.grown) / (self.steps - self.grown))

    def rate(self, step: int) -> float:
        """The learning rate of a step: linear warm-up, then cosine decay to a twentieth."""
        if step < self.warm_up:
            return self.learning_rate * (step + 1) / self.warm_up
        progress = (step - self.warm_up) / max(1, self.steps - self.warm_up)
        return self.learning_rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


_encode: Encoder


def start_worker(tokenizer: str) -> None:
    global _encode
    _encode = Encoder(Tokenizer.from_str(tokenizer))


def encoder() -> Encoder:
    """The object that `start_worker` made."""
    return _encode


def make_rows(recipe: Recipe, step: int) -> np.ndarray:
    """[rows, len(FIELDS), length] int32."""
    mix = recipe.mix(step)
    rngs = (random.Random(f"{recipe.seed}/{step}/{row}") for row in range(recipe.rows))
    return np.stack([make_row(rng, _encode, mix, recipe.length) for rng in rngs])


class Feed(Generic[Data]):
    """The data of steps in their order; worker processes make them ahead of time."""

    def __init__(self, make: Callable[[int], Data], prepare: Callable[[], None], steps: range, workers: int):
        """prepare: called once in each worker, before make(step). What it refers to is inherited, not pickled."""
        self.make, self.steps = make, iter(steps)
        # The pool ends its workers with SIGTERM. A handler inherited from this process could leave them waiting
        # forever: exceptions that it raises right after a fork are ignored.
        handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.pool = multiprocessing.get_context("fork").Pool(workers, prepare)
        signal.signal(signal.SIGTERM, handler)
        self.made = collections.deque()
        for _ in range(4 * workers):
            self._ask_for_more()

    def _ask_for_more(self) -> None:
        for step in itertools.islice(self.steps, 1):
            self.made.append(self.pool.apply_async(self.make, (step,)))

    def next(self) -> Data:
        data = self.made.popleft().get()
        self._ask_for_more()
        return data

    def close(self) -> None:
        self.pool.terminate()
