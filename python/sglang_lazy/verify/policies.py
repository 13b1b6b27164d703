"""Which policies are compared, and how they are named on the command line."""

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
"""What `--policies all` stands for: from what costs nothing to what recomputes much."""

_NEXT_POLICY = re.compile(r",(?!\w+=)")  # what follows any other comma is one more parameter


def parse_policies(text: str) -> Sequence[str]:
    """The links in a list with commas between them, or `ALL` for "all". Whether they exist is the server's to say."""
    return ALL if text == "all" else _NEXT_POLICY.split(text)
