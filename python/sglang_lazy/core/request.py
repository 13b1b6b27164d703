"""One of SGLang's requests, as it is handed around here."""

from typing import Protocol


class Request(Protocol):
    """It carries our state, which `core/state.py` reads. What else it has is SGLang's: `Requests` and `Facts` read it.

    lazy: the state; absent if it has no part in chunk reuse.
    lazy_unused_hits: see `unused_hits`; absent for 0.
    """

    lazy: object
    lazy_unused_hits: int
