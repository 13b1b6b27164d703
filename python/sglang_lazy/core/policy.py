"""The contract of a policy: how a prompt uses its chunks."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import numpy as np

from sglang_lazy.core.model import ServedModel
from sglang_lazy.core.prompt import ChunkSlice, LinkedPrompt, Ranges
from sglang_lazy.core.segments import PromptLayout

Preamble = Literal["none", "neutral", "lead"]


class ServerTraits(NamedTuple):
    """What policies and admission have to know of a server.

    fp8_cache: whether keys and values are rounded to fp8.
    partial_pass: whether the pass of a batch can end at the keys of the model's second layer.
    whole_layers: whether there are layers that see all of a prompt, rather than a window.
    window_pool: whether layers with windows keep KV in a pool of their own.
    reads_beside: whether the model reads chunks through an encoder, beside the text.
    masks_images: whether tokens of an image may see those that follow them in it.
    """

    fp8_cache: bool = False
    partial_pass: bool = True
    whole_layers: bool = True
    window_pool: bool = False
    reads_beside: bool = False
    masks_images: bool = False


IN_WINDOW_POOL = (
    "would have to fit into the small pool of layers with windows (--disable-hybrid-swa-memory: one for all)"
)
"""Why policies that need KV of many tokens there do not fit."""


class TrainedTokens(NamedTuple):
    """Ids of tokens that a model was trained to have at chunks.

    before, behind: inside each chunk, at its beginning and its end.
    link: text behind chunks; each policy says which of them stand behind which.
    """

    before: Sequence[int] = ()
    behind: Sequence[int] = ()
    link: Sequence[int] = ()


class Around(NamedTuple):
    """What a policy puts around one chunk: tokens that begin and end it, and text behind it."""

    before: Sequence[int] = ()
    behind: Sequence[int] = ()
    link: Sequence[int] = ()


@dataclasses.dataclass(frozen=True)
class Policy:
    """How the chunks of a prompt are used: which of their tokens keep cached KV, and which are computed in context.

    A policy has no state but its parameters, the fields of a frozen dataclass. It is registered by name in
    `sglang_lazy.policies`, and requests give its name and parameters as `link`. The defaults below attend to shared KV
    in place and need nothing beyond it.

    preamble: what each chunk is computed behind: nothing; the server's neutral text; or the prompt's own leading text.
    reuses: whether it can keep any KV of chunks. Without, a prompt is an ordinary one.
    in_place: whether attention reads the shared KV of chunks, rotating queries back by each chunk's offset. Otherwise
        the row holds KV of the request's own.
    needs_resident: whether the forward pass of a request must come after those that compute its chunks; by default it
        may be the same.
    trained: whether it puts tokens around chunks that the model was trained to have there; see `around`.
    probes: what has to be measured first, of each token that `kept` keeps; `choose` decides by that. "attention": how
        much the question pays to it, over the prompt as it is cached. "deviation": how far its key in the second layer
        is from that in the whole prompt. "key size": the squared norm of its key, which is kept with the chunk.
    """

    preamble: Preamble = dataclasses.field(default="none", kw_only=True)

    name: ClassVar[str]
    reuses: ClassVar[bool] = True
    in_place: ClassVar[bool] = True
    needs_resident: ClassVar[bool] = False
    trained: ClassVar[bool] = False
    probes: ClassVar[Literal["attention", "deviation", "key size"] | None] = None

    def __post_init__(self):
        if self.preamble not in get_args(Preamble):
            raise ValueError(f"preamble must be one of {', '.join(get_args(Preamble))}, got {self.preamble!r}")

    def __str__(self) -> str:
        parameters = [
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if field.name != "preamble"
        ]
        name = ":".join(filter(None, [self.name, ",".join(parameters)]))
        if self.preamble == "none":
            return name
        base = "base" if self.preamble == "neutral" else f"base:preamble={self.preamble}"
        return base if name == "block" else f"{base}+{name}"

    def kept(self, layout: PromptLayout, input_ids: Sequence[int]) -> Sequence[Ranges]:
        """For each chunk of `layout`, the ranges of its tokens whose cached KV the prompt uses.

        Positions are relative to the chunk. All other tokens of the chunk are text: they are computed in context, see
        everything before them, and are seen by everything behind them.
        """
        raise NotImplementedError

    def around(self, trained: TrainedTokens, index: int) -> Around:
        """What stands around the chunk at place `index` in every prompt under this policy."""
        return Around()

    def choose(self, chunks: Sequence[ChunkSlice], scores: np.ndarray) -> Sequence[Ranges]:
        """For each of `chunks`, which the probe ran on, what is kept in the end; as for `kept`.

        scores: float32, of each of their kept tokens. Attention that it got from the text behind the prompt's last
            chunk, summed over that text, all heads and the last third of the layers; or the squared deviation, summed
            over heads and dimensions; or the key's squared norm in units of the chunk's mean, summed over layers
            without windows, or over all if each has one.
        """
        raise NotImplementedError

    def max_recomputed(self, chunk_lens: Sequence[int]) -> int:
        """How many tokens of a prompt's chunks, of these lengths, `choose` leaves out at most."""
        return sum(chunk_lens)

    def unfit(self, server: ServerTraits) -> str | None:
        """Why this server cannot serve the policy, or None."""
        return None

    def num_own_slots(self, prompt: LinkedPrompt) -> int:
        """How many slots a request takes besides those of its text."""
        return 0

    def warm_up(self, model: ServedModel) -> None:
        """Compile what the policy launches; called at start-up for the server's default policy."""

    def begin(self, req: Any, rows: Any) -> None:
        """The row of `req` has been assigned and its chunks have slots. rows: the cache's `RowCache`."""

    def before_forward(self, reqs: Sequence[Any], model: ServedModel, rows: Any) -> None:
        """Launch what must precede the forward pass of a batch, on its stream. reqs: those under this policy."""

    def end(self, req: Any, rows: Any) -> None:
        """The row of `req` is about to be released."""


def refusal(policy: Policy, server: ServerTraits) -> str | None:
    """Why a server cannot serve a policy, or None."""
    if server.reads_beside and policy.reuses and not _keeps_whole_chunks(policy):
        return f"link {policy}: this model reads whole chunks through an encoder, so it knows block and full alone"
    return policy.unfit(server)


def _keeps_whole_chunks(policy: Policy) -> bool:
    """Whether it has attention read them as they are: of a prompt with short chunks and long ones, it keeps all."""
    layout = PromptLayout(((1, 3), (3, 5), (6, 4096)))
    whole = [[(0, end - start)] for start, end in layout.chunks]
    alters = policy.preamble != "none" or policy.probes or policy.trained or not policy.in_place
    return not alters and [list(ranges) for ranges in policy.kept(layout, range(4097))] == whole
