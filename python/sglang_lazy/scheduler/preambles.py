"""The neutral preamble of a server (`--lazy-preamble`)."""

from array import array
from typing import Any

from sglang_lazy.core.model import MAX_PREAMBLE_LEN
from sglang_lazy.policies import get_policy


def neutral_preamble(text: str, tokenizer: Any) -> array:
    """The tokens of `--lazy-preamble` at the beginning of a prompt, int64; none if the server has no tokenizer.

    Raises ValueError if there are too many.
    """
    tokens = array("q", tokenizer.encode(text) if tokenizer is not None and text else ())
    if len(tokens) > MAX_PREAMBLE_LEN:
        raise ValueError(f"--lazy-preamble has {len(tokens)} tokens, at most {MAX_PREAMBLE_LEN} are allowed")
    return tokens


def check_default_preamble(link: str, preamble: array, context_len: int) -> None:
    """Raise ValueError if no prompt could be served under the default policy `link` after this preamble."""
    if get_policy(link).preamble == "neutral" and not 0 < len(preamble) < context_len:
        raise ValueError(
            f"--lazy-default-link {link}: --lazy-preamble has {len(preamble)} tokens, and a chunk after it would have "
            f"to fit into {context_len} positions"
        )
