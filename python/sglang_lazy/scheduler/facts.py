"""What admission asks about SGLang's scheduler and its requests. The port knows where SGLang keeps it."""

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from sglang_lazy.core.policy import Policy
from sglang_lazy.core.request import Request
from sglang_lazy.core.requests import Requests
from sglang_lazy.core.segments import PromptLayout


class Taken(NamedTuple):
    """A request of which a prefill batch computes a part.

    start, end: its part of the slots that the batch writes.  whole: whether its prompt ends in this batch.
    """

    req: Request
    start: int
    end: int
    whole: bool


class GivenImages(NamedTuple):
    """The images of a prompt, in order.

    items: SGLang's.  ranges: the tokens of each.  hashes: of their contents and shapes.
    places: int64 [3, length of the prompt], the positions of all its tokens on three axes.
    """

    items: Sequence[Any]
    ranges: Sequence[tuple[int, int]]
    hashes: Sequence[int]
    places: np.ndarray


class Facts(Requests, Protocol):
    """The facts of one scheduler, and of its requests.

    waiting: its queue, which admission reorders and replaces.
    chunked: the request in chunked prefill, if there is one.
    max_prefill: the most tokens of a prompt in one batch, 0 for no limit.
    growth_ratio: the share of the longest possible answers that running requests are expected to reach.
    num_ahead: how many slots a running request may hold beyond its tokens, for those that are drafted.
    """

    waiting: list[Request]

    @property
    def chunked(self) -> Request | None: ...

    @property
    def max_prefill(self) -> int: ...

    @property
    def growth_ratio(self) -> float: ...

    @property
    def num_ahead(self) -> int: ...

    def taken(self, batch: Any) -> list[Taken]:
        """The requests of a prefill batch whose rows are assigned."""

    def slots(self, batch: Any) -> torch.Tensor:
        """The slots that a prefill batch writes, int64."""

    # Requests

    def extra_key(self, req: Request) -> str | None:
        """The key that its client or its adapter adds to the names of its KV."""

    def adapter(self, req: Request) -> str | None:
        """The id of its LoRA adapter."""

    def plan(self, req: Request) -> tuple[PromptLayout, Policy] | None:
        """The layout and the policy that came with it. Raises ValueError for malformed ones."""

    def images(self, req: Request) -> GivenImages | None:
        """Its images. Raises ValueError for other media, and for images without positions on three axes."""

    def has_media(self, req: Request) -> bool: ...

    def unsupported(self, req: Request) -> list[str]:
        """What it asks for that cannot be combined with chunks."""

    def first_logprob(self, req: Request) -> int | None:
        """From which position of the prompt on it wants log-probabilities, None if from none."""

    def max_new_tokens(self, req: Request) -> int: ...

    def num_left(self, req: Request) -> int:
        """How many tokens of its prompt have no slots yet, once it is in chunked prefill."""

    def is_launched(self, req: Request) -> bool:
        """Whether a batch has taken it."""

    def is_finished(self, req: Request) -> bool: ...

    def is_refused(self, req: Request) -> bool:
        """Whether it will be answered with an error."""

    # Changes

    def refuse(self, req: Request, reason: str) -> None:
        """Have it answered with a 400."""

    def drop_layout(self, req: Request) -> None:
        """Remove the layout from its parameters: its state has it."""

    def limit_answer(self, req: Request, max_new_tokens: int) -> None: ...

    def keep_text(self, req: Request, text: array) -> None:
        """Reduce its prompt to `text`, int64, which ends like the prompt."""

    def hurry(self, req: Request, parent: Request) -> None:
        """Give an internal request the scheduling priority of `parent`, if that goes first."""
