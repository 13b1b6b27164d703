"""The requests of host_time.py: several forms with chunks, and plain prompts of the same length."""

import argparse
import itertools
import random
from array import array

import numpy as np
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from benchmark.scheduler.host import VOCAB_SIZE, Host
from benchmark.serving.workloads import draw_distinct, zipf_weights
from sglang_lazy.core.segments import LAYOUT_PARAM, PromptLayout

QUESTION_LEN = 32
SEPARATOR = 11


class Traffic:
    """Requests over `num_documents` numbered documents of random tokens, drawn by popularity.

    reuses: whether chunks are served; else the cache is SGLang's own.
    on_host: how many chunks the host holds per resident one; 0 for no host tier.
    metrics: publish metrics, as with `--enable-metrics`.
    """

    reuses = True
    on_host = 0
    metrics = False

    def __init__(self, args: argparse.Namespace, shape: tuple[int, int], num_documents: int):
        self.num_chunks, self.chunk_len = shape
        self.separator = array("q", [SEPARATOR] * args.separator_len)
        self.seed, self.alpha = args.seed, args.alpha
        self.rng = random.Random(args.seed)
        self.weights = zipf_weights(num_documents, args.alpha)
        self.numbers = itertools.count()

    def tokens(self, kind: int, number: int, length: int) -> array:
        rng = np.random.default_rng((self.seed, kind, number))
        return array("q", rng.integers(VOCAB_SIZE, size=length).tobytes())

    def document(self, number: int) -> array:
        return self.tokens(0, number, self.chunk_len)

    def request(self, host: Host, ids: array, params: dict | None) -> Req:
        number = next(self.numbers)
        sampling_params = SamplingParams(max_new_tokens=1, custom_params=params)
        sampling_params.normalize(None)
        question = self.tokens(1, number, QUESTION_LEN)
        return host.request_class(f"request-{number}", "", ids + question, sampling_params, vocab_size=VOCAB_SIZE)


class Linked(Traffic):
    """Each request has `num_chunks` different documents as chunks, in random order."""

    def fill(self, host: Host, num_resident: int) -> None:
        on_host_alone = range(num_resident, num_resident * self.on_host)
        for number in (*on_host_alone, *self.rng.sample(range(num_resident), num_resident)):
            host.insert_chunk(self.document(number))

    def next(self, host: Host) -> Req:
        ids, chunks = array("q"), []
        for number in draw_distinct(self.rng, self.weights, self.num_chunks):
            chunks.append((len(ids), len(ids) + self.chunk_len))
            ids += self.document(number) + self.separator
        return self.request(host, ids, {LAYOUT_PARAM: PromptLayout(tuple(chunks)).pack()})


class Tiered(Linked):
    """The same with a host tier."""

    on_host = 10


class Metered(Linked):
    """The same with metrics."""

    metrics = True


class Plain(Traffic):
    """Each request has the same tokens, then one document: an equally long prefix with equally many leaves."""

    reuses = False

    def fill(self, host: Host, num_resident: int) -> None:
        self.front = self.tokens(2, 0, (self.num_chunks - 1) * self.chunk_len)
        slots = host.insert(self.front)
        for number in self.rng.sample(range(num_resident), num_resident):
            host.insert(self.front + self.document(number), slots)

    def next(self, host: Host) -> Req:
        (number,) = draw_distinct(self.rng, self.weights, 1)
        return self.request(host, self.front + self.document(number), None)


class PlainOnOurs(Plain):
    """The same prompts without chunks, with our cache and hooks."""

    reuses = True


CONTENDERS = {"lazy": Linked, "lazy-metrics": Metered, "lazy-tiers": Tiered, "lazy-plain": PlainOnOurs, "stock": Plain}
