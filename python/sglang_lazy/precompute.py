"""Command: compute a corpus of chunks into storage, so that servers started later find them there.

The chunks file has one JSON object per line, with the text of a chunk, or its input_ids, as in the
segments of /generate. Flags for SGLang and for us follow after --, including a storage backend.
Chunks in storage are not computed again, so an interrupted run can be continued.

    python -m sglang_lazy.precompute --model-path meta-llama/Llama-3.1-8B-Instruct \\
        --chunks corpus.jsonl -- --hicache-storage-backend file
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from sglang_lazy.command import EngineFlags, engine_flags, parse, started
from sglang_lazy.core.config import LazyConfig
from sglang_lazy.core.help import parser_of
from sglang_lazy.verify.prompts import read_json_lines

ENGINE_FLAGS = ("--enable-hierarchical-cache", "--lazy-storage-writers", "8")
"""Flags after -- override them. Many writers slow prompts down, but none run beside this command."""
BATCH_SIZE = 32
"""The number of chunks that are computed together. While they are, those before them are stored."""
ROUND_SIZE = 8 * BATCH_SIZE
"""The number of chunks after which the computation waits until all are stored."""
PATIENCE = 5.0
"""The number of seconds without a stored chunk after which the next batch is computed nevertheless."""


def parse_args(argv: Sequence[str]) -> tuple[argparse.Namespace, EngineFlags]:
    """Our flags, and those after -- for the engine. Exits if one is invalid."""
    parser = parser_of("precompute", __doc__, "--model-path MODEL --chunks FILE -- FLAGS")
    parser.add_argument("--model-path", required=True, metavar="MODEL", help="model to start")
    parser.add_argument("--chunks", type=Path, required=True, metavar="FILE", help="JSON Lines file")
    parser.add_argument("--lora-path", metavar="NAME", help="LoRA adapter to compute them with, one of --lora-paths")
    args, flags = parse(parser, argv)
    if not any(flag.partition("=")[0] == "--hicache-storage-backend" for flag in flags):
        parser.error("--hicache-storage-backend is missing after --")
    return args, engine_flags(parser, args.model_path, [*ENGINE_FLAGS, *flags])


def read_chunks(path: Path) -> Iterator[dict[str, Any]]:
    """The segments in a chunks file. Raises ValueError, naming the file and the line."""
    for number, line in read_json_lines(path):
        if len(line.keys() & {"text", "input_ids"}) != 1:
            raise ValueError(f"{path}, line {number}: expected either text or input_ids, got {', '.join(line)}")
        yield {"type": "chunk", **line}


def precompute(
    engine: Any, chunks: Iterable[dict[str, Any]], total: int | None = None, lora_path: str | None = None
) -> int:
    """Compute all chunks into storage. Returns how many were there before. Raises RuntimeError if one cannot be stored.

    total: the number of chunks, for the progress bar.  lora_path: the name of the adapter to compute them with.
    """
    num_found, chunks = 0, iter(chunks)
    with tqdm(total=total, desc="chunks", disable=None) as bar:
        while part := list(itertools.islice(chunks, ROUND_SIZE)):
            num_found += _store(engine, part, lora_path, bar.update)
    return num_found


def _store(engine: Any, chunks: list[dict[str, Any]], lora_path: str | None, progress: Callable[[int], Any]) -> int:
    """Compute and store the chunks that storage does not have. Returns how many it had.

    Where fewer have been stored than computed, such as when the host's memory is too small for all of them, they are
    computed again in smaller groups; storage has some of them then.
    """
    from sglang_lazy.port.serving.frontend import frontend_of  # imports SGLang

    num_before, new, num_hits = _num_stored(engine), set[str](), 0
    for start in range(0, len(chunks), BATCH_SIZE):
        batch, num_computed = chunks[start : start + BATCH_SIZE], len(new)
        hits = _compute(engine, batch, lora_path)
        num_hits += sum(hits)
        new |= {json.dumps(chunk) for chunk, hit in zip(batch, hits, strict=True) if not hit}
        _wait_until_stored(engine, num_before + num_computed)
        progress(len(batch))
    # A flush waits until everything is stored.
    if not engine.loop.run_until_complete(frontend_of(engine.tokenizer_manager).server.flush(600)):
        raise RuntimeError("the engine did not store its chunks within ten minutes")
    if _num_stored(engine) - num_before < len(new):
        if len(chunks) == 1:
            raise RuntimeError(f"storage does not take this chunk: {json.dumps(chunks[0])[:80]}…; the log may say why")
        size = min(BATCH_SIZE, -(-len(chunks) // 8))
        for start in range(0, len(chunks), size):
            _store(engine, chunks[start : start + size], lora_path, lambda _count: None)
    return num_hits


def _compute(engine: Any, chunks: list[dict[str, Any]], lora_path: str | None) -> list[bool]:
    """Compute the chunks that no tier has. Returns for each whether one had it."""
    prompts = [[chunk, "\n"] for chunk in chunks]
    params = {"max_new_tokens": 1, "temperature": 0}
    outputs = engine.generate(segments=prompts, sampling_params=params, lora_path=lora_path, link=_link())
    return [output["meta_info"]["chunks"][0]["hit"] for output in outputs]


def _wait_until_stored(engine: Any, count: int) -> None:
    """Wait until the engine has stored so many chunks since its start, for as long as it stores some."""
    num_stored, since = _num_stored(engine), time.monotonic()
    while num_stored < count and time.monotonic() - since < PATIENCE:
        time.sleep(0.01)
        before, num_stored = num_stored, _num_stored(engine)
        if num_stored > before:
            since = time.monotonic()


def _link() -> str:
    """The policy to compute with: the server's default if it adds trained tokens to chunks. Others may not compute
    every chunk, such as a short one under `epic`, and are replaced by one that does."""
    from sglang_lazy.policies import get_policy  # imports PyTorch, which takes a while when a flag is wrong
    from sglang_lazy.serving.registration import computing

    policy = get_policy(LazyConfig.current().default_link)
    return str(policy if policy.trained else computing(policy))


def _num_stored(engine: Any) -> int:
    """The number of chunks that the engine has written to storage since its start."""
    return sum(state["lazy_storage"]["stored"] for state in engine.get_server_info()["internal_states"])


def main(argv: Sequence[str] | None = None) -> None:
    """Compute the chunks, and print how many were new."""
    args, flags = parse_args(sys.argv[1:] if argv is None else argv)
    try:
        num_chunks = sum(1 for _ in read_chunks(args.chunks))  # before a model is started, all lines are checked
        with started(flags) as engine:
            num_found = precompute(engine, read_chunks(args.chunks), num_chunks, args.lora_path)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"{num_chunks} chunks are stored; {num_found} of them had been before.")


if __name__ == "__main__":
    main()
