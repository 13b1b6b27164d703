"""The prompts of a soak, and the model's correct answer to each."""

import dataclasses
import itertools
import random

from benchmark.serving.workloads import zipf_weights
from oracle.block_mask import greedy
from oracle.policies import PolicyOracle, epic, keep_all_but
from oracle.scenarios import Dice
from oracle.segments import Segment, text, token_ids

NUM_TOKENS = 5
"""In an answer."""
LINKS = (None, "full", "epic:tokens=2")
"""None is the server's default, which answers like `block`."""
ALPHA = 1.1
"""Exponent of the Zipf distribution of prompts."""


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt and the oracle's answer to it."""

    segments: tuple[Segment, ...]
    link: str | None
    answer: tuple[int, ...]

    @property
    def chunks(self) -> list[Segment]:
        return [segment for segment in self.segments if segment.kind == "chunk"]

    @property
    def is_text(self) -> bool:
        """Whether the server takes all of it for text."""
        return self.link == "full" or not self.chunks


def make_prompts(model_path: str, seed: int, count: int) -> list[Prompt]:
    """`count` prompts, most popular first, with up to five of a dozen chunks each; some have none."""
    dice = Dice(f"soak/{seed}")
    chunks = [*dice.chunks(10, 1, 90), *dice.chunks(1, 150, 150)]
    chunks.append(Segment("chunk", chunks[0].ids + dice.ids(5)))  # shares a prefix with another chunk
    oracle = PolicyOracle(model_path)
    prompts: list[Prompt] = []
    for number in itertools.count():
        if len(prompts) == count:
            return prompts
        picked = dice.rng.sample(chunks, dice.rng.randint(1, 5)) if number % 6 else []
        segments = [dice.text(dice.rng.randint(1, 6))]
        for segment in picked:
            segments += [segment, dice.text(dice.rng.randint(1, 3))]
        link = LINKS[number % len(LINKS)] if picked else None
        try:
            prompts.append(Prompt(tuple(segments), link, _answer(oracle, segments, link)))
        except ValueError:  # the two best tokens are too close
            continue
    raise AssertionError


def _answer(oracle: PolicyOracle, segments: list[Segment], link: str | None) -> tuple[int, ...]:
    if link == "full":
        segments = [text(token_ids(segments))]
    kept = epic(segments, 2) if link == "epic:tokens=2" else keep_all_but(segments, ())
    answer: list[int] = []
    for _ in range(NUM_TOKENS):
        answer += greedy(oracle.logprobs(segments, answer, kept)[-1:])
    return tuple(answer)


class Draw:
    """Draws prompts by a Zipf distribution over their ranks."""

    def __init__(self, prompts: list[Prompt], rng: random.Random):
        self.prompts, self.rng = prompts, rng
        self._weights = zipf_weights(len(prompts), ALPHA)

    def __call__(self) -> Prompt:
        return self.rng.choices(self.prompts, cum_weights=self._weights)[0]
