"""Compare link full with other policies, prompt by prompt: greedy answers, next-token distributions, and cost."""

import dataclasses
import functools
import itertools
import json
import math
import random
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from sglang_lazy.verify.cases import Prompt
from sglang_lazy.verify.cost import Cost, Generate, measure_cost

TOP_TOKENS = 32
"""The number of most likely tokens under full attention that are compared; all others count as one outcome."""

_BATCH = 16


@dataclasses.dataclass(frozen=True)
class Answer:
    """A greedy answer: token ids and text."""

    tokens: list[int]
    text: str


@dataclasses.dataclass(frozen=True)
class LinkedAnswer(Answer):
    """An answer under a policy that reuses chunks.

    kl: for each position of the full answer, KL(full || policy) of the next token, in nats; see `kl_divergence`.
    """

    kl: list[float]


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
    """One prompt's greedy answers, and what they cost.

    full: with link full. linked: by link, in the order of the policies.
    mass: see `Reference`.
    costs: by link, full among them.
    """

    prompt: Prompt
    full: Answer
    linked: dict[str, LinkedAnswer]
    mass: float
    costs: dict[str, Cost]


def common_beginning(left: Sequence[int], right: Sequence[int]) -> float:
    """The length of the common prefix of two answers, as a fraction of the longer one."""
    pairs = zip(left, right, strict=False)
    same = next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(left), len(right)))
    return same / max(len(left), len(right), 1)


def ways(generate: Generate, links: Sequence[str]) -> dict[str, Generate]:
    """By link, `generate` with that link and a new cache salt of its own, so that a policy does not find KV computed by
    another one or by an earlier run."""
    run = uuid.uuid4().hex
    return {link: functools.partial(generate, link=link, cache_salt=f"verify-{run}-{link}") for link in links}


def answer_in_full(full: Generate, prompts: Sequence[Prompt], greedy: Mapping[str, Any]) -> list[list[Reference]]:
    """The answers with link full, in batches.

    full: of `ways`.  greedy: sampling parameters.  A ValueError from `full` is raised again with the indices of the
    prompts that were sent.
    """

    def answer(batch: Sequence[Prompt]) -> list[Reference]:
        segments = [prompt.segments for prompt in batch]
        results = full(segments=segments, sampling_params=greedy, return_logprob=True, top_logprobs_num=TOP_TOKENS)
        return [
            Reference(prompt, Answer(result["output_ids"], result["text"]), _top_logprobs(result))
            for prompt, result in zip(batch, results, strict=True)
        ]

    return _by_batch(answer, list(_batches(prompts)), "full")


def answer_linked(
    links: Mapping[str, Generate], references: Sequence[Sequence[Reference]], greedy: Mapping[str, Any]
) -> list[dict[str, LinkedAnswer]]:
    """For each prompt, the answers under policies, with their scores of the full answer.

    links: of `ways`. references, greedy: the result of `answer_in_full`, and the parameters that it got. Raises as it
    does.
    """

    def answer(batch: Sequence[Reference]) -> list[dict[str, LinkedAnswer]]:
        of_links = [_linked_answers(way, batch, greedy) for way in links.values()]
        return [dict(zip(links, of_prompt, strict=True)) for of_prompt in zip(*of_links, strict=True)]

    return list(itertools.chain.from_iterable(_by_batch(answer, references, "policies")))


def measure_costs(links: Mapping[str, Generate], prompts: Sequence[Prompt]) -> list[dict[str, Cost]]:
    """For each prompt, its cost under all policies.  links: of `ways`.  Raises as `answer_in_full` does.

    One prompt is measured under all of them before the next, so that changes of the load meet all alike, and each time
    in another order, drawn by a generator with a fixed seed, so that none is always first.
    """
    rng = random.Random(0)

    def measure(batch: Sequence[Prompt]) -> list[dict[str, Cost]]:
        (prompt,) = batch
        costs = {link: measure_cost(links[link], prompt.segments) for link in rng.sample(list(links), len(links))}
        return [{link: costs[link] for link in links}]

    return list(itertools.chain.from_iterable(_by_batch(measure, [[prompt] for prompt in prompts], "times")))


def compared(
    references: Sequence[Sequence[Reference]],
    linked: Sequence[dict[str, LinkedAnswer]],
    costs: Sequence[dict[str, Cost]],
) -> list[Comparison]:
    """For each prompt, what the functions above have found out about it."""
    by_prompt = zip(itertools.chain.from_iterable(references), linked, costs, strict=True)
    return [Comparison(one.prompt, one.answer, answers, one.mass, of_links) for one, answers, of_links in by_prompt]


def _by_batch(answer: Callable[[Any], list[Any]], batches: Sequence[Sequence[Any]], name: str) -> list[list[Any]]:
    """The result of `answer` for each batch, behind a bar of progress with this name."""
    results: list[list[Any]] = []
    start = 0
    with tqdm(total=sum(map(len, batches)), desc=name, unit="prompt", leave=False, disable=None) as bar:
        for batch in batches:
            try:
                results.append(answer(batch))
            except ValueError as error:
                last = start + len(batch) - 1
                where = f"prompt {start}" if last == start else f"prompts {start} to {last}"
                raise ValueError(f"{where}: {error}") from None
            start += len(batch)
            bar.update(len(batch))
    return results


def _batches(prompts: Sequence[Prompt]) -> Iterator[list[Prompt]]:
    """`prompts` in order, in batches without two prompts that are equal up to the end of their chunks.

    A policy that selects tokens by the question remembers its last selection for such a prefix. Scoring an answer must
    find the selection of its own prompt: a new one would depend on the answer, too.
    """
    group: list[Prompt] = []
    beginnings: set[str] = set()
    for prompt in prompts:
        last = max(index for index, segment in enumerate(prompt.segments) if segment["type"] == "chunk")
        beginning = json.dumps(prompt.segments[: last + 1])
        if len(group) == _BATCH or beginning in beginnings:
            yield group
            group, beginnings = [], set()
        group.append(prompt)
        beginnings.add(beginning)
    if group:
        yield group


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
        linked.append(LinkedAnswer(answer["output_ids"], answer["text"], kl))
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
