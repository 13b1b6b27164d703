"""Compare link full with other policies, prompt by prompt: greedy answers, next-token distributions, and cost."""

import dataclasses
import functools
import json
import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
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
class Comparison:
    """One prompt's greedy answers.

    full: with link full. linked: by link, in the order of the policies.
    mass: the probability of the compared tokens under link full, at the first position.
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


def compare(
    generate: Generate,
    prompts: Sequence[Prompt],
    links: Sequence[str],
    *,
    max_new_tokens: int,
    stop: list[str] | None = None,
) -> list[Comparison]:
    """Compare the answers to `prompts` with link full and with each of `links`.

    Each policy has its own cache salt, so that it does not find KV computed by another one or by an earlier run. A
    ValueError from `generate` is raised again with the indices of the prompts that were sent.
    """
    comparisons: list[Comparison] = []
    greedy = {"temperature": 0, "max_new_tokens": max_new_tokens, "stop": stop or []}
    run = uuid.uuid4().hex
    ways = {
        link: functools.partial(generate, link=link, cache_salt=f"verify-{run}-{link}") for link in ("full", *links)
    }
    with tqdm(total=len(prompts), desc="comparing", unit="prompt", leave=False, disable=None) as bar:
        for batch in _batches(prompts):
            start = len(comparisons)
            try:
                comparisons += _compare_batch(ways, batch, greedy)
            except ValueError as error:
                raise ValueError(f"prompts {start} to {start + len(batch) - 1}: {error}") from None
            bar.update(len(batch))
    return comparisons


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


def _compare_batch(ways: Mapping[str, Generate], batch: Sequence[Prompt], greedy: dict[str, Any]) -> list[Comparison]:
    segments = [prompt.segments for prompt in batch]
    answers = ways["full"](segments=segments, sampling_params=greedy, return_logprob=True, top_logprobs_num=TOP_TOKENS)
    costs = [measure_cost(ways["full"], prompt) for prompt in segments]
    full = [
        Answer(answer["output_ids"], answer["text"], cost.ttft_ms) for answer, cost in zip(answers, costs, strict=True)
    ]
    linked = {
        link: _linked_answers(generate, segments, answers, greedy) for link, generate in ways.items() if link != "full"
    }
    return [
        Comparison(
            prompt,
            full[index],
            {link: of_link[index] for link, of_link in linked.items()},
            mass=sum(map(math.exp, _logprobs(answers[index]["meta_info"]["output_top_logprobs"][0]).values())),
        )
        for index, prompt in enumerate(batch)
    ]


def _linked_answers(
    generate: Generate, segments: list[list[dict[str, Any]]], full: Sequence[dict[str, Any]], greedy: dict[str, Any]
) -> list[LinkedAnswer]:
    """The answers under one policy, with its scores of the full answers.  full: results with link full."""
    answers = generate(segments=segments, sampling_params=greedy)
    top = [[_logprobs(row) for row in answer["meta_info"]["output_top_logprobs"]] for answer in full]
    scored = generate(
        segments=[
            [*one, {"type": "text", "input_ids": answer["output_ids"]}]
            for one, answer in zip(segments, full, strict=True)
        ],
        sampling_params={"temperature": 0, "max_new_tokens": 0},
        return_logprob=True,
        # The first row returned, for the token at this position, is empty. Policies may add tokens to the prompt.
        logprob_start_len=[answer["meta_info"]["prompt_tokens"] - 1 for answer in answers],
        token_ids_logprob=[sorted(set().union(*rows)) for rows in top],
    )
    linked = []
    for prompt, answer, rows, score in zip(segments, answers, top, scored, strict=True):
        scores = [_logprobs(row) for row in score["meta_info"]["input_token_ids_logprobs"][1:]]
        kl = [kl_divergence(p, q) for p, q in zip(rows, scores, strict=True)]
        cost = measure_cost(generate, prompt)
        linked.append(LinkedAnswer(answer["output_ids"], answer["text"], cost.ttft_ms, kl, cost.recomputed))
    return linked


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
