"""The policies to compare, and their notation on the command line."""

import re
from collections.abc import Sequence
from typing import Literal

ALL = (
    "block",
    "base",
    "packet",
    "kvlink:tokens=5",
    *(f"{base}epic:tokens={tokens}" for tokens in (16, 64) for base in ("", "base+")),
    *(
        f"{base}{name}:ratio={ratio}"
        for ratio in (0.05, 0.15)
        for name in ("static", "query", "blend")
        for base in ("", "base+")
    ),
    *(f"{base}whole:ratio={ratio}" for ratio in (0.15, 0.3) for base in ("", "base+")),
    "base+query:ratio=0.15,static=0.05",
    "base+query:ratio=0.3",
)
"""The policies of `--policies all`, from no recomputation to much: every policy that has answers of its own, and two
values of `tokens` or `ratio`, so that a line can be fitted to the times. Trained tokens belong around chunks without a
preamble, as many as were trained."""


def split_policies(text: str) -> list[str]:
    """The items of a comma-separated list of policies; a comma before `name=value` separates parameters of one."""
    return re.split(r",(?!\w+=)", text)


def parse_policies(text: str) -> Sequence[str] | Literal["all"]:
    """The links in a comma-separated list, or "all". The server checks whether they exist."""
    return "all" if text == "all" else split_policies(text)
