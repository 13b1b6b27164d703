"""The policies to compare, and their notation on the command line."""

import re
from collections.abc import Sequence

ALL = (
    "block",
    "base",
    "epic:tokens=16",
    "base+epic:tokens=16",
    "query:ratio=0.05",
    "base+query:ratio=0.05",
    "base+query:ratio=0.15",
    "base+query:ratio=0.3",
)
"""The policies of `--policies all`, from no recomputation to much."""

_NEXT_POLICY = re.compile(r",(?!\w+=)")  # other commas separate parameters of one policy


def parse_policies(text: str) -> Sequence[str]:
    """The links in a comma-separated list, or `ALL` for "all". The server checks whether they exist."""
    return ALL if text == "all" else _NEXT_POLICY.split(text)
