"""Compares link full and link block, prompt by prompt: greedy answers, and divergence of next-token distributions."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from sglang_lazy.verify.cases import Prompt

Generate = Callable[..., Any]
"""`Engine.generate`, or what `connect` returns: takes the fields of `/generate`, returns one result for each prompt."""

TOP_TOKENS = 32
"""How many of the likeliest tokens under full attention are compared one by one; all others count as one outcome."""

_BATCH = 16


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One prompt's greedy answers with link full and with link block.

    full, block: token ids.
    kl: for each position of the full answer, KL(full || block) of the next token, in nats; see `kl_divergence`.
    mass: the probability under link full, at the first position, of the tokens that are compared one by one.
    """

    prompt: Prompt
    full: list[int]
    block: list[int]
    full_text: str
    block_text: str
    kl: list[float]
    mass: float

    @property
    def common(self) -> float:
        """The length of the common beginning, as a fraction of the longer answer."""
        pairs = zip(self.full, self.block, strict=False)
        same = next((index for index, (left, right) in enumerate(pairs) if left != right), None)
        if same is None:
            same = min(len(self.full), len(self.block))
        return same / max(len(self.full), len(self.block), 1)


def compare(
    generate: Generate, prompts: Sequence[Prompt], *, max_new_tokens: int, stop: list[str] | None = None
) -> list[Comparison]:
    """Compare the answers to `prompts`. Three requests each: both answers, and the full answer scored over the chunks.

    A ValueError from `generate` is raised again with the indices of the prompts that were sent.
    """
    comparisons = []
    greedy = {"temperature": 0, "max_new_tokens": max_new_tokens, "stop": stop or []}
    with tqdm(total=len(prompts), desc="comparing", unit="prompt", leave=False, disable=None) as bar:
        for start in range(0, len(prompts), _BATCH):
            batch = prompts[start : start + _BATCH]
            try:
                comparisons += _compare_batch(generate, batch, greedy)
            except ValueError as error:
                raise ValueError(f"prompts {start} to {start + len(batch) - 1}: {error}") from None
            bar.update(len(batch))
    return comparisons


def _compare_batch(generate: Generate, batch: Sequence[Prompt], greedy: dict[str, Any]) -> list[Comparison]:
    segments = [prompt.segments for prompt in batch]
    full = generate(
        segments=segments, link="full", sampling_params=greedy, return_logprob=True, top_logprobs_num=TOP_TOKENS
    )
    block = generate(segments=segments, link="block", sampling_params=greedy)
    top = [[_logprobs(row) for row in answer["meta_info"]["output_top_logprobs"]] for answer in full]
    scored = generate(
        segments=[
            [*one, {"type": "text", "input_ids": answer["output_ids"]}]
            for one, answer in zip(segments, full, strict=True)
        ],
        link="block",
        sampling_params={"temperature": 0, "max_new_tokens": 0},
        return_logprob=True,
        # The first row returned is for the token at this position, and empty.
        logprob_start_len=[answer["meta_info"]["prompt_tokens"] - 1 for answer in full],
        token_ids_logprob=[sorted(set().union(*rows)) for rows in top],
    )
    comparisons = []
    for prompt, full_answer, block_answer, rows, score in zip(batch, full, block, top, scored, strict=True):
        scores = [_logprobs(row) for row in score["meta_info"]["input_token_ids_logprobs"][1:]]
        comparisons.append(
            Comparison(
                prompt,
                full_answer["output_ids"],
                block_answer["output_ids"],
                full_answer["text"],
                block_answer["text"],
                [kl_divergence(p, q) for p, q in zip(rows, scores, strict=True)],
                sum(map(math.exp, rows[0].values())),
            )
        )
    return comparisons


def _logprobs(row: Sequence[Sequence[Any]]) -> dict[int, float]:
    """Log probability by token id, from SGLang's (log probability, id, text)."""
    return {token: logprob for logprob, token, _ in row}


def kl_divergence(p: Mapping[int, float], q: Mapping[int, float]) -> float:
    """KL(P || Q) in nats, at least 0, where all tokens but those of `p` count as one outcome.

    Merging outcomes never increases the divergence, so this is a lower bound of the one over the whole vocabulary; both
    are equal if P and Q distribute the rest alike. p, q: log probabilities by token; q has every token of p.
    """
    divergence = sum(math.exp(logprob) * (logprob - q[token]) for token, logprob in p.items())
    p_rest, q_rest = (1 - sum(math.exp(logprobs[token]) for token in p) for logprobs in (p, q))
    if p_rest > 0:
        divergence += p_rest * math.log(p_rest / max(q_rest, _TINY))
    return max(divergence, 0.0)


_TINY = 1e-7  # the error of 1 minus a sum of float32 probabilities
