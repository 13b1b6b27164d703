"""What rows ask about SGLang's requests, and change in them. The port knows where SGLang keeps it."""

from array import array
from typing import Any, Protocol

from sglang_lazy.core.state import RowNodes


class Requests(Protocol):
    """Reads and changes the requests of one scheduler."""

    def rid(self, req: Any) -> str: ...

    def prompt(self, req: Any) -> array:
        """Its tokens, int64."""

    def output(self, req: Any) -> array:
        """The tokens of its answer so far, int64."""

    def priority(self, req: Any) -> int:
        """How much longer than others what it uses stays cached."""

    def row(self, req: Any) -> int:
        """Its row of `req_to_token`."""

    def num_cached(self, req: Any) -> int:
        """The length of its row's cached part."""

    def nodes(self, req: Any) -> RowNodes:
        """What its row depends on."""

    # Changes

    def lay_out(self, req: Any, tokens: array) -> None:
        """Put the tokens of its prompt and answer into the order of its row: `tokens`, int64."""

    def count_computed(self, req: Any, num_tokens: int) -> None:
        """Do not report `num_tokens` of its cached part as cached: they were computed for it. Unless it was retracted,
        when SGLang knows by itself."""

    def own(self, req: Any, num_tokens: int) -> None:
        """The slots of its first `num_tokens` tokens are the tree's."""

    def hold(self, req: Any, nodes: RowNodes) -> RowNodes:
        """Have its row depend on `nodes`, locked already; returns those whose lock it held."""
