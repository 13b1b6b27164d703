"""Measures how fast `sglang_lazy.precompute` computes chunks into files, beside SGLang's prefill of the same tokens.

    python -m benchmark.serving.precompute --model llama-3.1-8b --out precompute.jsonl

An engine with file storage and a server of SGLang's take turns on one machine. The server gets each chunk as a plain
prompt, in the same batches, and generates one token. Each round has new random chunks; the first, a warm-up, is left
out. Files are in a temporary folder (`TMPDIR`), and deleted after each round. Rows go to `--out` as JSON lines, after a
line with the environment. Flags after `--` go to both.

Without a GPU:

    python -m benchmark.serving.precompute --model PATH --chunk-len 128 --num-chunks 64 --out precompute.jsonl \
        -- --max-total-tokens 10000
"""

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import requests

from benchmark.serving.arguments import positive, typed
from benchmark.serving.contenders import contender, running
from benchmark.serving.environment import describe_environment
from benchmark.serving.models import SHAPES, TINY, model_flags, model_name, model_path
from benchmark.serving.prompts import chunk, random_tokens
from sglang_lazy.command import engine_flags, started
from sglang_lazy.precompute import BATCH_SIZE, ENGINE_FLAGS, precompute
from sglang_lazy.testing import device_flags

STORAGE = (*ENGINE_FLAGS, "--hicache-storage-backend", "file")
FOLDER = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"

Chunks = list[list[int]]


def compute_into_storage(engine: Any, chunks: Chunks) -> None:
    if precompute(engine, map(chunk, chunks)):
        raise ValueError("some chunks had been stored before")


def prefill(url: str, chunks: Chunks) -> None:
    for start in range(0, len(chunks), BATCH_SIZE):
        batch = chunks[start : start + BATCH_SIZE]
        body = {"input_ids": batch, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
        requests.post(f"{url}/generate", json=body).raise_for_status()


def measure(ways: dict[str, Callable[[Chunks], None]], storage: Path, args: argparse.Namespace) -> Iterator[dict]:
    """The rows of all rounds, in which the contenders take turns to be first.  storage: the folder of the files."""
    rng = random.Random(args.seed)
    for number in range(args.rounds + 1):
        chunks = [random_tokens(rng, args.chunk_len) for _ in range(args.num_chunks)]
        for name, compute in sorted(ways.items(), reverse=bool(number % 2)):
            began = time.perf_counter()
            compute(chunks)
            seconds = round(time.perf_counter() - began, 3)
            if number:
                shape = {"chunk_len": args.chunk_len, "batch": BATCH_SIZE}
                yield {"contender": name, "round": number, "tokens": sum(map(len, chunks)), "seconds": seconds, **shape}
        for file in storage.iterdir():
            file.unlink()


def new_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = f"{', '.join(SHAPES)}, {TINY}, a path or a hub name"
    parser.add_argument("--model", type=typed(model_name), default="llama-3.1-8b", help=names)
    count = typed(positive)
    parser.add_argument("--chunk-len", type=count, default=2048, help="tokens")
    parser.add_argument("--num-chunks", type=count, default=128, help="chunks per round")
    parser.add_argument("--rounds", type=count, default=3, help="measured rounds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start-timeout", type=float, default=600, help="seconds to wait for the server")
    parser.add_argument("--commit", help="recorded in the results; required without git")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("server_flags", nargs="*", help="flags for both, after `--`")
    return parser


def main() -> None:
    parser = new_parser()
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, open(args.out, "w", encoding="utf-8") as out:

        def write(line: dict) -> None:
            print(json.dumps(line), file=out, flush=True)

        path, log = model_path(args.model, Path(scratch)), Path(scratch) / "stock.log"
        flags = [*device_flags(), *model_flags(args.model, path), *args.server_flags]
        write({"environment": describe_environment(commit=args.commit, seed=args.seed, server_flags=flags)})
        storage = Path(scratch) / "storage"
        os.environ[FOLDER] = str(storage)
        with (
            running(contender("stock").server, flags, log, args.start_timeout) as url,
            started(engine_flags(parser, path, [*STORAGE, *flags])) as engine,
        ):
            ways = {
                "precompute": lambda chunks: compute_into_storage(engine, chunks),
                "stock": lambda chunks: prefill(url, chunks),
            }
            for row in measure(ways, storage, args):
                write(row)
                print(f"{row['contender']:12} {row['tokens'] / row['seconds']:10.0f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
