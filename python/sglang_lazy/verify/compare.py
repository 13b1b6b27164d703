"""Compare link full with other policies, prompt by prompt: greedy answers, next-token distributions, and cost."""

import dataclasses
import functools
import itertools
import json
import math
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from sglang_lazy.verify.cases import Prompt
from sglang_lazy.verify.cost import Generate, measure_cost

TOP_TOKENS = 32
"""The number of most likely tokens under full attention that are compared; all others count as one outcome."""

_BATCH = 16


@dataclasses.dataclass(frozen=True)
class Answer:
    """A greedy answer: token ids and text.  ttft_ms: see `Cost`."""

    tokens: list[int]
    text: str
    ttft_ms: float | None


@dataclasses.dataclass(frozen=True)
class LinkedAnswer(Answer):
    """An answer under a policy that reuses chunks.

    kl: for each position of the full answer, KL(full || policy) of the next token, in nats; see `kl_divergence`.
    recomputed: see `Cost`.
    """

    kl: list[float]
    recomputed: float


@dataclasses.dataclass(frozen=True)
class Reference:
    """A prompt and its answer with link full.

    top: for each position of the answer, the log probabilities of the compared tokens.
    """

    prompt: Prompt
    answer: Answer
    top: list[dict[int, float]]

    @property
    def mass(self) -> float:
        """The probability of the compared tokens at the first position."""
        return sum(map(math.exp, self.top[0].values()))


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One prompt's greedy answers.

    full: with link full. linked: by link, in the order of the policies.
    mass: see `Reference`.
    """

    prompt: Prompt
    full: Answer
    linked: dict[str, LinkedAnswer]
    mass: float


def common_beginning(left: Sequence[int], right: Sequence[int]) -> float:
    """The length of the common prefix of two answers, as a fraction of the longer one."""
    pairs = zip(left, right, strict=False)
    same = next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(left), len(right)))
    return same / max(len(left), len(right), 1)


def answer_in_full(generate: Generate, prompts: Sequence[Prompt], greedy: Mapping[str, Any]) -> list[list[Reference]]:
    """The answers with link full, in batches.  greedy: sampling parameters.  Raises as `compare` does."""
    full = _ways(generate, ["full"])["full"]

    def answer(batch: Sequence[Prompt]) -> list[Reference]:
        segments = [prompt.segments for prompt in batch]
        results = full(segments=segments, sampling_params=greedy, return_logprob=True, top_logprobs_num=TOP_TOKENS)
        times = [measure_cost(full, one).ttft_ms for one in segments]
        return [
            Reference(prompt, Answer(result["output_ids"], result["text"], time), _top_logprobs(result))
            for prompt, result, time in zip(batch, results, times, strict=True)
        ]

    return _by_batch(answer, list(_batches(prompts)), "full")


def compare(
    generate: Generate, references: Sequence[Sequence[Reference]], links: Sequence[str], greedy: Mapping[str, Any]
) -> list[Comparison]:
    """Compare the answers with link full to those under each of `links`.

    references, greedy: the result of `answer_in_full`, and the parameters that it got. Each policy has its own cache
    salt, so that it does not find KV computed by another one or by an earlier run. A ValueError from `generate` is
    raised again with the indices of the prompts that were sent.
    """
    ways = _ways(generate, links)

    def answer(batch: Sequence[Reference]) -> list[Comparison]:
        linked = {link: _linked_answers(way, batch, greedy) for link, way in ways.items()}
        return [
            Comparison(one.prompt, one.answer, {link: of_link[index] for link, of_link in linked.items()}, one.mass)
            for index, one in enumerate(batch)
        ]

    return list(itertools.chain.from_iterable(_by_batch(answer, references, "policies")))


def _ways(generate: Generate, links: Sequence[str]) -> dict[str, Generate]:
    """By link, `generate` with that link and a cache salt of its own."""
    run = uuid.uuid4().hex
    return {link: functools.partial(generate, link=link, cache_salt=f"verify-{run}-{link}") for link in links}


def _by_batch(answer: Callable[[Any], list[Any]], batches: Sequence[Sequence[Any]], name: str) -> list[list[Any]]:
    """The result of `answer` for each batch, behind a bar of progress with this name."""
    results: list[list[Any]] = []
    start = 0
    with tqdm(total=sum(map(len, batches)), desc=name, unit="prompt", leave=False, disable=None) as bar:
        for batch in batches:
            try:
                results.append(answer(batch))
            except ValueError as error:
                raise ValueError(f"prompts {start} to {start + len(batch) - 1}: {error}") from None
            start += len(batch)
            bar.update(len(batch))
    return results


def _batches(prompts: Sequence[Prompt]) -> Iterator[list[Prompt]]:
    """`prompts` in order, in batches without two prompts that are equal up to the end of their chunks.

    A policy that selects tokens by the question remembers its last selection for such a prefix. Scoring an answer must
    find the selection of its own prompt: a new one would depend on the answer, too.
    """
    batch: list[Prompt] = []
    beginnings: set[str] = set()
    for prompt in prompts:
        last = max(index for index, segment in enumerate(prompt.segments) if segment["type"] == "chunk")
        beginning = json.dumps(prompt.segments[: last + 1])
        if len(batch) == _BATCH or beginning in beginnings:
            yield batch
            batch, beginnings = [], set()
        batch.append(prompt)
        beginnings.add(beginning)
    if batch:
        yield batch


def _linked_answers(
    generate: Generate, references: Sequence[Reference], greedy: Mapping[str, Any]
) -> list[LinkedAnswer]:
    """The answers to a batch under one policy, with its scores of the full answers."""
    segments = [one.prompt.segments for one in references]
    answers = generate(segments=segments, sampling_params=greedy)
    scored = generate(
        segments=[[*one.prompt.segments, {"type": "text", "input_ids": one.answer.tokens}] for one in references],
        sampling_params={"temperature": 0, "max_new_tokens": 0},
        return_logprob=True,
        # The first row returned, for the token at this position, is empty. Policies may add tokens to the prompt.
        logprob_start_len=[answer["meta_info"]["prompt_tokens"] - 1 for answer in answers],
        token_ids_logprob=[sorted(set().union(*one.top)) for one in references],
    )
    linked = []
    for one, answer, score in zip(references, answers, scored, strict=True):
        scores = [_logprobs(row) for row in score["meta_info"]["input_token_ids_logprobs"][1:]]
        kl = [kl_divergence(p, q) for p, q in zip(one.top, scores, strict=True)]
        cost = measure_cost(generate, one.prompt.segments)
        linked.append(LinkedAnswer(answer["output_ids"], answer["text"], cost.ttft_ms, kl, cost.recomputed))
    return linked


def _top_logprobs(result: Mapping[str, Any]) -> list[dict[int, float]]:
    return [_logprobs(row) for row in result["meta_info"]["output_top_logprobs"]]


def _logprobs(row: Sequence[Sequence[Any]]) -> dict[int, float]:
    """Log probability by token id, from SGLang's triples (log probability, id, text)."""
    return {token: logprob for logprob, token, _ in row}


def kl_divergence(p: Mapping[int, float], q: Mapping[int, float]) -> float:
    """KL(P || Q) in nats, at least 0, where all tokens not in `p` count as one outcome.

    Merging outcomes never increases the divergence, so this is a lower bound of the one over the whole vocabulary; the
    two are equal if P and Q distribute the rest alike. p, q: log probabilities by token; q has all tokens of p.
    """
    divergence = sum(math.exp(logprob) * (logprob - q[token]) for token, logprob in p.items())
    p_rest, q_rest = (1 - sum(math.exp(logprobs[token]) for token in p) for logprobs in (p, q))
    if p_rest > 0:
        divergence += p_rest * math.log(p_rest / max(q_rest, _TINY))
    return max(divergence, 0.0)


_TINY = 1e-7  # the error of 1 minus a sum of float32 probabilities
