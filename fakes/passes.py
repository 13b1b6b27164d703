"""Records how many tokens pass through a module of a served model, in a file that a test reads.

SGLang registers such hooks itself (`forward_hooks`), in the process that runs the model.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any


def count_tokens(config: dict[str, Any]) -> Callable:
    """A forward hook that writes the number of tokens of each call to the file at `config["path"]`, line by line."""

    def hook(_module: Any, args: tuple, _output: Any) -> None:
        with open(config["path"], "a") as file:
            file.write(f"{len(args[0])}\n")

    return hook


def counted(path: Path) -> list[int]:
    """The token counts since the last call."""
    calls = [int(line) for line in path.read_text().split()] if path.exists() else []
    path.unlink(missing_ok=True)
    return calls
