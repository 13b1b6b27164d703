"""What stands in the pages: their code, and what it is said to print. Needs nothing but Python."""

import contextlib
import io
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def section(page: str, heading: str) -> str:
    """What stands under a heading of the second level."""
    return read(page).partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def indented(text: str) -> list[str]:
    """Its blocks of code by indentation, as they stand there."""
    return [block.strip() for block in re.findall(r"(?:^ {4}.*\n)+", text, re.MULTILINE)]


def fenced(text: str) -> list[tuple[str, str]]:
    """Its fenced blocks, each with what it is (`bash`, `python`, `text` and the like)."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def pattern(printed: str) -> str:
    """A regular expression for what a page shows, in which each … stands for part of a line."""
    return re.escape(printed.strip()).replace("…", ".*")


def run_python(program: str, names: dict) -> str:
    """What a program prints.  names: its globals, which the next one finds."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(program, names)
    return printed.getvalue()


def swapped_chunks(curl: str) -> str:
    """A request with its two chunks, each on a line, in the other order."""
    first, second = re.findall(r'^ +\{"type": "chunk",.*\n', curl, re.MULTILINE)
    return curl.replace(first + second, second + first)
