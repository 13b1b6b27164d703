"""What the process that takes requests asks of its server."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol


class Repeated(NamedTuple):
    """An answer.  finish_reason: SGLang's, an object with a `type`.  tokens: its ids."""

    finish_reason: Mapping[str, Any]
    tokens: list[int]


class Server(Protocol):
    """The server behind this process. Whatever can change while it runs, such as the weights, is read at each use.

    tokenizer: Hugging Face's; None if the server has none.
    vocab_size, context_len: the model's numbers of tokens and of positions.
    truncates: whether prompts beyond these positions are truncated.
    model_path: the folder of the model.
    default_params: sampling parameters of requests that do not give them.
    num_workers: how many processes take requests.
    adapters: the ids of the loaded LoRA adapters, by name.
    has_admin_key: whether it has a key of its administrator's, apart from that of users.
    is_idle: whether no request is running, nor kept waiting by a pause.
    is_ending: whether the server is about to end.
    """

    @property
    def tokenizer(self) -> Any: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def context_len(self) -> float: ...
    @property
    def truncates(self) -> bool: ...
    @property
    def model_path(self) -> str: ...
    @property
    def default_params(self) -> Mapping[str, Any]: ...
    @property
    def num_workers(self) -> int: ...
    @property
    def adapters(self) -> Mapping[str, str]: ...
    @property
    def has_admin_key(self) -> bool: ...
    @property
    def is_idle(self) -> bool: ...
    @property
    def is_ending(self) -> bool: ...

    async def ask(self, verb: str, **arguments: Any) -> list[dict[str, Any]]:
        """The answers of `ChunkControl`, one from each data-parallel rank, in the order of ranks.

        Raises ValueError if the server runs without chunk reuse.
        """
        ...

    async def compute(self, input_ids: list[int], params: dict[str, Any], adapter: str | None) -> str | None:
        """Serve a prompt whose answer nobody reads, with this adapter; returns the adapter's id.

        Raises ValueError if it is refused or aborted.
        """
        ...

    async def repeat(self, request: Any, rid: str, input_ids: list[int], params: dict[str, Any]) -> Repeated:
        """The answer to a request like SGLang's `request`, but with this id, prompt and sampling parameters."""
        ...

    async def flush(self, timeout_s: float) -> bool:
        """Empty the caches, once all that is to be stored is stored. Returns whether that was within this time."""
        ...

    def abort(self, rid: str) -> bool:
        """Abort the request with this id. Returns whether there is one."""
        ...
