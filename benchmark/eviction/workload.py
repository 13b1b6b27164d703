"""Requests for two caches in one pool: prompts with chunks, and chats without, under a few system prompts."""

import dataclasses
import itertools
import random
from array import array
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Mix:
    """A kind of traffic.

    linked: the share of prompts with chunks.  alpha, num_chunks, picks: chunks are picked by a Zipf law, this often a
    prompt.  turn_tokens, system_tokens: the range of the length of a chat's turns and of system prompts.
    """

    linked: float = 0.5
    alpha: float = 1.1
    num_chunks: int = 1000
    picks: int = 6
    turn_tokens: tuple[int, int] = (100, 1200)
    system_tokens: tuple[int, int] = (300, 4000)


@dataclasses.dataclass(frozen=True)
class Request:
    """The tokens of one plain prompt, or those of each chunk of a linked one."""

    texts: list[array]
    linked: bool


def requests(mix: Mix, count: int, seed: int) -> Iterator[Request]:
    """`count` requests. A chat has up to 16 turns, more likely if recent; one plain prompt in four begins one."""
    rng = random.Random(seed)
    fresh = itertools.count(1)

    def text(limits: tuple[int, int]) -> array:
        """Tokens that no other text begins with."""
        first = next(fresh)
        return array("q", [first, *range(1 << 20, (1 << 20) + rng.randint(*limits) - 1)])

    weights = list(itertools.accumulate((i + 1) ** -mix.alpha for i in range(mix.num_chunks)))
    chunks = [text((200, 1500)) for _ in range(mix.num_chunks)]
    systems = [text(mix.system_tokens) for _ in range(20)]
    chats: list[tuple[array, int]] = []  # the prompt so far, turns left
    for _ in range(count):
        if rng.random() < mix.linked:
            picked = {rng.choices(range(mix.num_chunks), cum_weights=weights)[0] for _ in range(mix.picks)}
            yield Request([chunks[i] for i in sorted(picked)], True)
            continue
        if not chats or rng.random() < 0.25:
            system = rng.choices(systems, [1 / (i + 1) for i in range(len(systems))])[0]
            prompt, left = system, rng.choice([1, 1, 2, 4, 8, 16])
        else:
            prompt, left = chats.pop(int(len(chats) * (1 - rng.random() ** 2)))
        prompt = prompt + text(mix.turn_tokens)
        if left > 1:
            chats = [*chats[-300:], (prompt, left - 1)]
        yield Request([prompt], False)
