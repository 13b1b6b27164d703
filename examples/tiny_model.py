"""The examples' small models, and a server for one for the length of a `with` block.

python examples/tiny_model.py    # builds the random-weight model on first use and prints its path
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from sample import load_sample

from sglang_lazy.testing import device_flags, running_server
from sglang_lazy.testing import tiny_model as recipe
from sglang_lazy.verify import connect

CACHE = recipe.CACHE

TRAINED = Path(__file__).parent / "models" / "tiny-rag"
"""A small model trained to answer the questions of examples/data/worlds_sample.jsonl."""

KV_POOL = ("--max-total-tokens", "40000")
"""Enough tokens for either sample."""


def tiny_model() -> Path:
    """The directory of a random-weight Llama with a tokenizer for the sample's documents."""
    return recipe.tiny_model(recipe.all_texts(load_sample()))


@contextlib.contextmanager
def tiny_server(
    *flags: str, model: Path | None = None, log: Path = CACHE / "tiny-server.log", threads: int = 1
) -> Iterator[str]:
    """Serve `model`, by default the tiny one, with `flags` for the length of a `with` block; yields the server's URL.

    threads: per CPU operation, unless OMP_NUM_THREADS is set. A tiny model is faster with one.
    """
    model = model or tiny_model()
    log.parent.mkdir(parents=True, exist_ok=True)
    usual = 60 if torch.cuda.is_available() else 25
    environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
    arguments = ["--model-path", str(model), *KV_POOL, *device_flags(), *flags]
    with running_server(arguments, log, usual=usual, environment=environment) as url:
        yield url


def server_or_tiny(url: str | None, *flags: str) -> contextlib.AbstractContextManager[str]:
    """The running server at `url`, or a new `tiny_server` if it is None. Exits if there is none at `url`."""
    if not url:
        return tiny_server(*flags)
    try:
        connect(url)
    except ValueError as error:
        sys.exit(f"error: {error}")
    return contextlib.nullcontext(url)


if __name__ == "__main__":
    print(tiny_model())
