"""The KV that a policy's spec keeps of a prompt: `block`, `epic:tokens=16`, `base:preamble=lead+query:ratio=0.1`, ...

For studies, `base` takes the name of a preamble (`preamble=list`), `query` takes layers (`layers=0-9`,
`layers=3.7.11`), a window (`window=7`: a token gets the best score within three tokens in its chunk) and a share that
is first chosen as by `static` (`static=0.1`, part of the ratio), and `static` takes a score of `statics.py`. Without
options, each behaves as on a server.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import torch

from oracle.policies import (
    PolicyOracle,
    Ranges,
    chunk_spans,
    epic,
    is_recomputed,
    keep_all_but,
    leading_text,
    without_best,
    without_best_of_each,
)
from oracle.segments import Segment, chunk, text, token_ids
from research.policies.statics import STATICS
from sglang_lazy.core.policy import Policy, TrainedTokens
from sglang_lazy.policies import get_policy
from sglang_lazy.serving.tokenization import TokenizedPrompt
from sglang_lazy.serving.trained_tokens import add_trained_tokens, tokens_for

Preambles = Mapping[str, Sequence[int]]
"""Token ids by name."""
SERVER = "server"
"""The name of the preamble that a server uses for `base` without options."""
TRAINED = ("kvlink", "packet")
"""Policies that put trained tokens around chunks."""


@dataclasses.dataclass(frozen=True)
class Spec:
    """A parsed policy.  base: None, `lead`, or the name of a preamble."""

    base: str | None
    name: str
    options: Mapping[str, str]

    def preamble(self, segments: list[Segment], preambles: Preambles) -> tuple[int, ...]:
        """The hidden tokens before each chunk."""
        if self.base is None:
            return ()
        return leading_text(segments) if self.base == "lead" else tuple(preambles[self.base])

    def prompt(self, segments: list[Segment], model_path: str, vocab_size: int) -> list[Segment]:
        """The prompt, with the policy's trained tokens around its chunks. Raises ValueError if the model has none."""
        if self.name not in TRAINED:
            return segments
        policy = get_policy(":".join([self.name, *(f"{key}={value}" for key, value in self.options.items())]))
        return around(segments, policy, tokens_for(policy, model_path, vocab_size))

    def kept(self, oracle: PolicyOracle, segments: list[Segment], preambles: Preambles) -> list[Ranges]:
        """The tokens of each chunk that keep their cached KV."""
        preamble = self.preamble(segments, preambles)
        if self.name in ("block", *TRAINED):
            return keep_all_but(segments, ())
        if self.name == "full":
            return [() for segment in segments if segment.kind == "chunk"]
        if self.name == "epic":
            return epic(segments, int(self.options["tokens"]))
        ratio = float(self.options["ratio"])
        if self.name == "query":
            num_layers = oracle.model.config.num_hidden_layers
            layers = parse_layers(self.options.get("layers"), num_layers)
            scores = best_nearby(segments, oracle.query_scores(segments, layers, preamble), self.options.get("window"))
            if "static" in self.options:
                sizes = STATICS["small_keys"](oracle, segments, preamble, ())
                chosen = without_best_of_each(segments, sizes, float(self.options["static"]))
                scores = scores.masked_fill(is_recomputed(segments, chosen).to(scores.device), math.inf)
            return without_best(segments, scores, ratio)
        if self.name == "blend":
            return oracle.blend(segments, ratio, preamble)
        scores = STATICS[self.options.get("score", "small_keys")](oracle, segments, preamble, preambles[SERVER])
        return without_best_of_each(segments, scores, ratio)


def parse(spec: str) -> Spec:
    """Raises ValueError for an unknown name."""
    *before, last = spec.split("+")
    names = {"block", "full", "epic", "query", "blend", "static", *TRAINED}
    name, options = parse_part(last)
    if name == "base" and not before:
        before, name, options = [last], "block", {}
    if name not in names or len(before) > 1:
        raise ValueError(f"no policy {spec!r}")
    if not before:
        return Spec(None, name, options)
    base, preamble = parse_part(before[0])
    if base != "base":
        raise ValueError(f"no policy {spec!r}")
    return Spec(preamble.get("preamble", SERVER), name, options)


def parse_part(part: str) -> tuple[str, dict[str, str]]:
    """Split `query:ratio=0.1,layers=3` into name and options."""
    name, _, options = part.partition(":")
    return name, dict(option.split("=") for option in options.split(",") if option)


def parse_layers(layers: str | None, num_layers: int) -> list[int]:
    """`0-2` and `0.1.2` mean layers 0, 1 and 2; None means the last third, rounded up."""
    if layers is None:
        return list(range(num_layers - math.ceil(num_layers / 3), num_layers))
    if "-" in layers:
        low, high = map(int, layers.split("-"))
        return list(range(low, high + 1))
    return [int(layer) for layer in layers.split(".")]


def best_nearby(segments: list[Segment], scores: torch.Tensor, window: str | None) -> torch.Tensor:
    """For each candidate, the highest score among the `window` (odd) candidates around it in its chunk, [n]."""
    if window is None:
        return scores
    chunks = scores.split([end - start for start, end in chunk_spans(segments) if start < end])
    return torch.cat([torch.nn.functional.max_pool1d(c[None], int(window), 1, int(window) // 2)[0] for c in chunks])


def around(segments: list[Segment], policy: Policy, trained: TrainedTokens) -> list[Segment]:
    """The prompt with the policy's tokens around its chunks, as a server builds it."""
    chunks, end = [], 0
    for segment in segments:
        end += len(segment.ids)
        chunks += [(end - len(segment.ids), end)] if segment.kind == "chunk" else []
    prompt = add_trained_tokens(TokenizedPrompt(token_ids(segments), tuple(chunks)), policy, trained)
    served, position = [], 0
    for start, end in [*prompt.chunks, (len(prompt.input_ids), len(prompt.input_ids))]:
        served += [text(prompt.input_ids[position:start])] if position < start else []
        served += [chunk(prompt.input_ids[start:end])] if start < end else []
        position = end
    return served
