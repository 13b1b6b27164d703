"""The contract of a policy: how a prompt uses its chunks."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import numpy as np

from sglang_lazy.core.model import ServedModel
from sglang_lazy.core.prompt import ChunkSlice, LinkedPrompt, Ranges
from sglang_lazy.core.request import Request
from sglang_lazy.core.segments import PromptLayout

Preamble = Literal["none", "neutral", "lead"]
Measure = Literal["attention", "deviation", "key size"]


class ServerTraits(NamedTuple):
    """The server's properties that policies and admission depend on.

    fp8_cache: whether keys and values are rounded to fp8.
    partial_pass: whether a pass can end at the keys of the second layer.
    whole_layers: whether any layer sees the whole prompt rather than a window.
    window_pool: whether window layers keep their KV in a pool of their own.
    cross_attention: whether the model encodes chunks and reads them by cross-attention, outside the text.
    masks_images: whether tokens of an image may see later tokens of the same image.
    recurrent: whether it has recurrent layers, whose states go through chunks as a whole.
    latents: whether attention over chunks is SGLang's own, over latents that are not rotated.
    min_chunk: the shortest text that is a chunk to them; shorter ones are text.
    preambles: whether chunks can be computed after one.
    """

    fp8_cache: bool = False
    partial_pass: bool = True
    whole_layers: bool = True
    window_pool: bool = False
    cross_attention: bool = False
    masks_images: bool = False
    recurrent: bool = False
    latents: bool = False
    min_chunk: int = 0
    preambles: bool = True


IN_WINDOW_POOL = (
    "would have to fit into the small pool of layers with windows (--disable-hybrid-swa-memory: one pool for all "
    "layers, if their heads have one shape)"
)
"""The reason for refusing policies that need the window KV of many tokens."""


class TrainedTokens(NamedTuple):
    """Ids of the tokens that a model was trained to see around chunks.

    before, behind: inside each chunk, at its beginning and its end.
    link: text after chunks; the policy says which of them follow which chunk.
    """

    before: Sequence[int] = ()
    behind: Sequence[int] = ()
    link: Sequence[int] = ()


class Around(NamedTuple):
    """What a policy puts around one chunk: tokens that begin and end it, and text after it."""

    before: Sequence[int] = ()
    behind: Sequence[int] = ()
    link: Sequence[int] = ()


class Range(NamedTuple):
    """The values that a number may have.  above: whether `least` itself is excluded."""

    least: float
    most: float
    above: bool = False

    def check(self, name: str, value: float) -> None:
        """Raise ValueError for a value outside, including NaN."""
        if not (self.least < value if self.above else self.least <= value) or not value <= self.most:
            least = f"{'above' if self.above else 'at least'} {self.least}"
            raise ValueError(f"{name} must be {least} and at most {self.most}, got {value!r:.20}")


DEFAULT_RANGE = Range(0, 1 << 20)
"""Of a parameter that declares none."""


def parameter(default: float, least: float, most: float, *, above: bool = False) -> Any:
    """A field of a policy: a number in this `Range`. It has the type of `default`."""
    return dataclasses.field(default=default, metadata={"range": Range(least, most, above)})


@dataclasses.dataclass(frozen=True)
class Policy:
    """How a prompt uses its chunks: which of their tokens keep cached KV, and which are computed in context.

    A policy's only state is its parameters, the fields of a frozen dataclass. It is registered by name in
    `sglang_lazy.policies`, and requests give its name and parameters as `link`. Clients choose the numbers: each has
    bounds, its `parameter`'s or `DEFAULT_RANGE`, which are checked before the policy is made. The defaults below attend
    to shared KV in place and need nothing else.

    preamble: what each chunk is computed after: nothing, the server's neutral text, or the prompt's own leading text.
    reuses: whether it can keep any KV of chunks. If not, the prompt is an ordinary one.
    in_place: whether attention reads the shared KV of chunks, rotating queries back by each chunk's offset. If not,
        the row holds the request's own KV.
    needs_resident: whether a request's forward pass must follow those that compute its chunks; by default it may be
        the same pass.
    trained: whether it puts trained tokens around chunks; see `around`.
    whole_chunks: whether `choose` keeps all of a probed chunk or nothing. Of policies with `probes`, recurrent layers
        allow only these.
    """

    preamble: Preamble = dataclasses.field(default="none", kw_only=True)

    name: ClassVar[str]
    reuses: ClassVar[bool] = True
    in_place: ClassVar[bool] = True
    needs_resident: ClassVar[bool] = False
    trained: ClassVar[bool] = False
    whole_chunks: ClassVar[bool] = False

    def __post_init__(self):
        self.check(vars(self))

    @classmethod
    def check(cls, values: Mapping[str, Any]) -> None:
        """Raise ValueError for a parameter out of its range.  values: all parameters, by name."""
        for field in dataclasses.fields(cls):
            if isinstance(field.default, int | float):
                field.metadata.get("range", DEFAULT_RANGE).check(field.name, values[field.name])
        if values["preamble"] not in get_args(Preamble):
            raise ValueError(f"preamble must be one of {', '.join(get_args(Preamble))}, got {values['preamble']!r:.50}")

    def __str__(self) -> str:
        parameters = [
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if field.name != "preamble" and getattr(self, field.name) != 0
        ]
        name = ":".join(filter(None, [self.name, ",".join(parameters)]))
        if self.preamble == "none":
            return name
        base = "base" if self.preamble == "neutral" else f"base:preamble={self.preamble}"
        return base if name == "block" else f"{base}+{name}"

    def kept(self, layout: PromptLayout, input_ids: Sequence[int]) -> Sequence[Ranges]:
        """For each chunk of `layout`, the ranges of its tokens whose cached KV the prompt uses.

        Positions are relative to the chunk. All other tokens of the chunk are text: they are computed in context, see
        everything before them, and are seen by everything after them.
        """
        raise NotImplementedError

    def around(self, trained: TrainedTokens, index: int) -> Around:
        """What this policy puts around chunk `index` of a prompt."""
        return Around()

    @property
    def probes(self) -> tuple[Measure, ...]:
        """What to measure first, for each token that `kept` keeps, so that `choose` can decide.

        "attention": how much the question attends to it, over the cached chunks. "deviation": how far its key in the
        second layer is from its key in the whole prompt. "key size": the squared norm of its key, which is kept with
        the chunk.
        """
        return ()

    def choose(self, chunks: Sequence[ChunkSlice], scores: Mapping[Measure, np.ndarray]) -> Sequence[Ranges]:
        """For each of the probed `chunks`, the ranges to keep in the end, as in `kept`.

        scores: for each of `probes`, float32, one for each kept token, in order. "attention": that from the text after
            the last chunk, summed over this text, all heads and the last third of the layers. "deviation": its square,
            summed over heads and dimensions; 0 for a token whose first layer sees what it saw when the chunk was
            computed. "key size": the key's squared norm relative to the chunk's mean, summed
            over the layers without windows, or over all layers if each has one.
        """
        raise NotImplementedError

    def max_recomputed(self, chunk_lens: Sequence[int]) -> int:
        """The most tokens that `choose` may leave out of chunks of these lengths."""
        return sum(chunk_lens)

    def unfit(self, server: ServerTraits) -> str | None:
        """The reason why this server cannot serve the policy, or None."""
        return None

    def num_own_slots(self, prompt: LinkedPrompt) -> int:
        """How many slots a request needs in addition to those of its text."""
        return 0

    def warm_up(self, model: ServedModel) -> None:
        """Compile what the policy launches; called at start-up for the server's default policy."""

    def begin(self, req: Request, rows: Any) -> None:
        """Called when the row of `req` has been assigned and its chunks have slots.  rows: the cache's `RowCache`."""

    def before_forward(self, reqs: Sequence[Request], model: ServedModel, rows: Any) -> None:
        """Launch what must precede a batch's forward pass, on its stream.  reqs: its requests with this policy."""

    def end(self, req: Request, rows: Any) -> None:
        """Called when the row of `req` is about to be released."""


def refusal(policy: Policy, server: ServerTraits) -> str | None:
    """The reason why a server cannot serve a policy, or None."""
    if server.cross_attention and policy.reuses and not _keeps_whole_chunks(policy):
        return f"link {policy}: this model reads whole chunks through an encoder, so it supports only block and full"
    if server.latents and policy.probes:
        return f"link {policy}: SGLang's own attention reads this model's chunks, and does not tell which it attends to"
    if policy.preamble != "none" and policy.reuses and not server.preambles:
        return f"link {policy}: this model's convolutions do not show what a preamble leaves before a chunk"
    if server.recurrent and policy.reuses and not policy.whole_chunks and not _keeps_whole_chunks(policy, around=True):
        return f"link {policy}: this model has recurrent layers, whose states go through all tokens of a chunk"
    return policy.unfit(server)


def _keeps_whole_chunks(policy: Policy, around: bool = False) -> bool:
    """Whether a policy uses chunks unchanged, judged by a sample prompt with short and long chunks.

    around: whether it may have other tokens around them, and compute them after a preamble.
    """
    layout = PromptLayout(((1, 3), (3, 5), (6, 4096)))
    whole = [[(0, end - start)] for start, end in layout.chunks]
    alters = policy.probes or not policy.in_place or (not around and (policy.trained or policy.preamble != "none"))
    return not alters and [list(ranges) for ranges in policy.kept(layout, range(4097))] == whole
