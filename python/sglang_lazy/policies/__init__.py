"""How a prompt uses its chunks: one module for each policy."""

from typing import Any

NAMES = ("block", "full", "copy")
"""What a request's `link` may be."""


def check_link(link: Any) -> str:
    """`link` if it names a policy, else ValueError."""
    if link not in NAMES:
        raise ValueError(f"link must be one of {', '.join(map(repr, NAMES))}, got {link!r:.50}")
    return link


def reuses_chunks(link: str) -> bool:
    """Whether the policy takes chunks from the cache; `full` computes the prompt as stock SGLang would."""
    return link != "full"
