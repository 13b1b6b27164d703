"""What rows ask about SGLang's requests, and change in them. The port knows where SGLang keeps it."""

from array import array
from typing import Protocol

from sglang_lazy.core.request import Request
from sglang_lazy.core.state import RowNodes


class Requests(Protocol):
    """Reads and changes the requests of one scheduler."""

    def rid(self, req: Request) -> str: ...

    def prompt(self, req: Request) -> array:
        """Its tokens, int64."""

    def output(self, req: Request) -> array:
        """The tokens of its answer so far, int64."""

    def priority(self, req: Request) -> int:
        """How much longer than others what it uses stays cached."""

    def row(self, req: Request) -> int:
        """Its row of `req_to_token`."""

    def num_cached(self, req: Request) -> int:
        """The length of its row's cached part."""

    def nodes(self, req: Request) -> RowNodes:
        """What its row depends on."""

    # Changes

    def lay_out(self, req: Request, tokens: array) -> None:
        """Put the tokens of its prompt and answer into the order of its row: `tokens`, int64."""

    def count_computed(self, req: Request, num_tokens: int) -> None:
        """Do not report `num_tokens` of its cached part as cached: they were computed for it. Unless it was retracted,
        when SGLang knows by itself."""

    def own(self, req: Request, num_tokens: int) -> None:
        """The slots of its first `num_tokens` tokens are the tree's."""

    def hold(self, req: Request, nodes: RowNodes) -> RowNodes:
        """Have its row depend on `nodes`, locked already; returns those whose lock it held."""
