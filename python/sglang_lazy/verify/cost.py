"""The cost of an answer whose documents are cached, and a model of the work in it."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Generate = Callable[..., Any]
"""`Engine.generate`, or the result of `connect`: takes the fields of `/generate`, returns the result, or one per prompt
of a batch."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of a prompt whose chunks are cached and in a new order.

    ttft_ms: milliseconds from the request to the first token; None for a prompt whose chunks have only one order.
    recomputed: share of its chunk tokens whose cached KV is not used.
    """

    ttft_ms: float | None
    recomputed: float


class Work(NamedTuple):
    """What a policy computes for a prompt whose chunks are cached, beside the text; sorts by `recomputed` first.

    recomputed: share of the chunks' tokens. probes: whether an extra pass chooses them.
    """

    recomputed: float
    probes: bool

    @classmethod
    def of(cls, link: str, recomputed: float) -> "Work":
        """The work of the policy `link`; one that only the server knows counts as having no extra pass."""
        from sglang_lazy.policies import get_policy  # imports PyTorch, which takes a while when a flag is wrong

        try:
            measured = set(get_policy(link).probes)
        except ValueError:
            measured = set()
        return cls(recomputed, bool(measured - {"key size"}))  # a chunk's keys are measured once

    def exceeds(self, other: "Work") -> bool:
        """Whether this is all of the other work and more: then it takes longer, whatever times were measured.

        Of two policies, one may recompute more and the other take an extra pass. Then only times can tell.
        """
        return self != other and self.recomputed >= other.recomputed and self.probes >= other.probes


def measure_cost(generate: Generate, segments: list[dict[str, Any]]) -> Cost:
    """Compute a prompt, so that its chunks are cached, and measure it with the chunks in another order."""
    generate(segments=[segments], sampling_params={"temperature": 0, "max_new_tokens": 0})
    reordered = rotate_chunks(segments)
    begin = time.perf_counter()
    (answer,) = generate(segments=[reordered], sampling_params={"temperature": 0, "max_new_tokens": 1})
    elapsed = time.perf_counter() - begin
    return Cost(1000 * elapsed if reordered != segments else None, recomputed_share(answer["meta_info"]))


def rotate_chunks(segments: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """`segments` with the second chunk in place of the first, and so on; text stays."""
    chunks = [segment for segment in segments if segment["type"] == "chunk"]
    rotated = iter([*chunks[1:], *chunks[:1]])
    return [next(rotated) if segment["type"] == "chunk" else segment for segment in segments]


def recomputed_share(meta_info: dict[str, Any]) -> float:
    """The share of a prompt's chunk tokens that were not reused, 0..1, from the counts in its result."""
    total = sum(chunk["tokens"] for chunk in meta_info.get("chunks", ()))
    reused = (meta_info.get("cached_tokens_details") or {}).get("chunk", 0)
    return 1 - reused / total if total else 1.0
