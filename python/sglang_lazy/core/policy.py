"""The contract of a policy: how a prompt uses its chunks."""

from collections.abc import Sequence
from typing import Any, ClassVar

from sglang_lazy.core.model import ServedModel
from sglang_lazy.core.prompt import LinkedPrompt, Ranges
from sglang_lazy.core.segments import PromptLayout


class Policy:
    """How the chunks of a prompt are used: which of their tokens keep cached KV, and which are computed in context.

    A policy has no state of its own. It is registered by name in `sglang_lazy.policies`; requests name it as `link`.
    The defaults below attend to shared KV in place and need nothing beyond it.

    reuses: whether it can keep any KV of chunks. Without, a prompt is an ordinary one.
    in_place: whether attention reads the shared KV of chunks, rotating queries back by each chunk's offset. Otherwise
        the row holds KV of the request's own.
    needs_resident: whether the forward pass of a request must come after those that compute its chunks; by default it
        may be the same.
    """

    name: ClassVar[str]
    reuses: ClassVar[bool] = True
    in_place: ClassVar[bool] = True
    needs_resident: ClassVar[bool] = False

    def kept(self, layout: PromptLayout, input_ids: Sequence[int]) -> Sequence[Ranges]:
        """For each chunk of `layout`, the ranges of its tokens whose cached KV the prompt uses.

        Positions are relative to the chunk. All other tokens of the chunk are text: they are computed in context, see
        everything before them, and are seen by everything behind them.
        """
        raise NotImplementedError

    def unfit(self, fp8_cache: bool) -> str | None:
        """Why this server cannot serve the policy, or None. fp8_cache: whether keys and values are rounded to fp8."""
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
