"""The conditions under which questions are sent, as data, and how to bring a server into each."""

import dataclasses
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from tqdm import tqdm

from benchmark.serving.contenders import LAZY, STOCK, Server, running
from oracle.segments import Segment, text, token_ids
from research.quality.asking import Answered, Ask, Prompts, ask_all
from research.quality.questions import Question
from sglang_lazy.testing import Client

State = Literal["empty", "warm", "shuffled", "evicting"]
"""empty: nothing is cached. warm: the same prompt was sent just before. shuffled: the same chunks were sent just
before, in another order. evicting: each question is sent again, at most eight questions later, to a server whose pool
holds about three prompts, and the second answer counts; chance decides whether its chunks were evicted in between."""

PROMPTS_IN_POOL = 3
LATER = 8


@dataclasses.dataclass(frozen=True)
class Condition:
    """as_chunks: send documents as chunks; otherwise the prompt is plain text under full attention.

    concurrency: requests in flight.
    bos, opening: whether the prompt begins with these.
    """

    name: str
    as_chunks: bool = True
    state: State = "empty"
    concurrency: int = 1
    bos: bool = True
    opening: bool = True

    @property
    def server(self) -> tuple[str, bool]:
        """A launcher, and whether its KV pool is small."""
        return LAZY if self.as_chunks else STOCK, self.state == "evicting"


CONDITIONS = {
    condition.name: condition
    for condition in (
        Condition("full", as_chunks=False, concurrency=32),
        Condition("full, no BOS", as_chunks=False, concurrency=32, bos=False),
        Condition("full, no opening", as_chunks=False, concurrency=32, opening=False),
        Condition("cold"),
        Condition("warm", state="warm"),
        Condition("shuffled", state="shuffled"),
        Condition("32 at a time", concurrency=32),
        Condition("64 at a time", concurrency=64),
        Condition("no BOS", concurrency=32, bos=False),
        Condition("no opening", concurrency=32, opening=False),
        Condition("after eviction", state="evicting", concurrency=2),
    )
}


@dataclasses.dataclass(frozen=True)
class Served:
    """An answer, its prompt and its condition."""

    condition: str
    question: Question
    segments: list[Segment]
    answered: Answered


def servers_of(conditions: list[Condition]) -> Iterator[tuple[tuple[str, bool], list[Condition]]]:
    """The conditions of each server."""
    for server, group in itertools.groupby(sorted(conditions, key=lambda one: one.server), lambda one: one.server):
        yield server, list(group)


def serve(
    server: tuple[str, bool],
    conditions: list[Condition],
    questions: list[Question],
    prompts: Prompts,
    flags: list[str],
    log: Path,
    timeout: float,
) -> list[Served]:
    """Start the server and send it all questions under each of its conditions. Raises ServerError."""
    module, small_pool = server
    if small_pool:
        longest = max(len(token_ids(prompts.make(question))) + question.max_new_tokens for question in questions)
        flags = [*flags, "--max-total-tokens", str(PROMPTS_IN_POOL * longest)]
    served = []
    with running(Server(module), flags, log, timeout) as url:
        for condition in conditions:
            served += list(ask(url, condition, questions, prompts))
    return served


def ask(url: str, condition: Condition, questions: list[Question], prompts: Prompts) -> Iterator[Served]:
    """The answers of a running server to `questions`, in their order."""
    rng, client = random.Random(condition.name), Client(url)
    client.flush_cache()
    asks = []
    for question in questions:
        segments = prompts.make(question, bos=condition.bos, opening=condition.opening)
        if not condition.as_chunks:
            segments = [text(token_ids(segments))]
        asks.append(Ask(segments, question.max_new_tokens))
    if condition.state == "evicting":
        moments = [(index + LATER * again * rng.random(), index) for index in range(len(asks)) for again in (0, 1)]
        order = [index for _, index in sorted(moments)]
        answers = ask_all(url, [asks[index] for index in order], condition.concurrency)
        answered = dict(zip(order, answers, strict=True))  # the later of two answers wins
    elif condition.concurrency > 1:
        answered = dict(enumerate(ask_all(url, asks, condition.concurrency)))
    else:
        answered = {}
        for index, one in enumerate(tqdm(asks, desc=condition.name, leave=False, disable=None)):
            if condition.state == "empty":
                client.flush_cache()
            elif condition.state == "warm":
                ask_all(url, [one], 1)
            elif condition.state == "shuffled":
                ask_all(url, [dataclasses.replace(one, segments=shuffled(one.segments, rng))], 1)
            answered[index] = ask_all(url, [one], 1)[0]
    for index, question in enumerate(questions):
        yield Served(condition.name, question, asks[index].segments, answered[index])


def shuffled(segments: list[Segment], rng: random.Random) -> list[Segment]:
    """The prompt with its chunks in another order; texts stay in place."""
    chunks = [segment for segment in segments if segment.kind == "chunk"]
    rng.shuffle(chunks)
    return [chunks.pop() if segment.kind == "chunk" else segment for segment in segments]
