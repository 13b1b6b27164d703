"""How many drafts are accepted over chunks and over the same prompts as text, by a server on a CPU.

    PYTHONPATH=test python -m research.quality.acceptance --draft draft --out rows.jsonl

Prompts are held-out worlds: an instruction, documents, and the name that is the next one's title. The model writes that
document, greedily, with chains of three drafts. Writes a line for each of `CONDITIONS`: for each prompt, how many
verifications accepted 0, 1, 2 and 3 drafts. It needs no GPU, and replaces kernels that a GPU has.
"""

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmark.report.speculation import mean_length
from benchmark.sample import TRAINED
from benchmark.serving.environment import describe_environment
from fakes import lost_draft_kv, speculation_on_cpu
from oracle.segments import Segment, text, token_ids
from research.quality.train_draft import Recipe, documents, in_chunks
from research.quality.vocabulary import BOS, Encoder, train_tokenizer
from sglang_lazy import Engine
from sglang_lazy.testing import CPU_OPTIONS
from sglang_lazy.verify.prompts import INSTRUCTION
from support import plugins

NUM_CHUNKS, LEAST = 3, 200
"""Chunks of a prompt, and the least tokens of one."""
BATCH, SEED, MOST = 8, 0, 64
END = Encoder(train_tokenizer())("\n\n")[0]
"""The token that ends a document."""


def make_prompts(count: int, *, by_document: bool = False) -> list[list[Segment]]:
    """by_document: the same tokens with a chunk for each document."""
    encode, prompts = Encoder(train_tokenizer()), []
    for number in range(count):
        docs = documents(random.Random(f"acceptance {SEED} {number}"), encode, Recipe(), "test")
        sizes = []
        for _ in range(NUM_CHUNKS):
            begin, size = sum(sizes), 1
            while sum(map(len, docs[begin : begin + size])) < LEAST:
                size += 1
            sizes.append(size)
        end = sum(sizes)
        title = docs[end][: docs[end].index(encode("\n")[0]) + 1]
        chunks = in_chunks(docs, [1] * end if by_document else sizes)
        prompts.append([text([BOS, *encode(INSTRUCTION)]), *chunks, text(title)])
    return prompts


class Asked:
    """An engine that drafts, and the file whose existence makes it lose the draft's KV."""

    def __init__(self, engine: Engine, lost: Path):
        self.engine, self.lost = engine, lost

    def accepted(self, prompts: list[list[Segment]], num_tokens: int = MOST) -> list[list[int]]:
        """For each prompt, how many verifications accepted 0, 1, ... drafts, until the document ends."""
        params = {"temperature": 0, "max_new_tokens": num_tokens, "stop_token_ids": [END]}
        found = []
        for start in range(0, len(prompts), BATCH):
            given = [[segment.to_request() for segment in prompt] for prompt in prompts[start : start + BATCH]]
            outputs = self.engine.generate(segments=given, sampling_params=params)
            found += [output["meta_info"]["spec_correct_drafts_histogram"] for output in outputs]
        return found

    def compute_alone(self, prompts: list[list[Segment]]) -> None:
        """Cache each chunk by a request of its own."""
        for prompt in prompts:
            for segment in prompt:
                if segment.kind == "chunk":
                    self.accepted([[segment, text(prompt[-1].ids)]], 2)


def plain(asked: Asked, count: int) -> list[list[int]]:
    return asked.accepted([[text(token_ids(prompt))] for prompt in make_prompts(count)])


def alone(asked: Asked, count: int) -> list[list[int]]:
    prompts = make_prompts(count)
    asked.compute_alone(prompts)
    return asked.accepted(prompts)


def together(asked: Asked, count: int) -> list[list[int]]:
    return asked.accepted(make_prompts(count))


def by_document(asked: Asked, count: int) -> list[list[int]]:
    return asked.accepted(make_prompts(count, by_document=True))


def lost(asked: Asked, count: int) -> list[list[int]]:
    prompts = make_prompts(count)
    asked.compute_alone(prompts)
    asked.lost.touch()
    return asked.accepted(prompts)


@contextlib.contextmanager
def served(model: Path, draft: Path) -> Iterator[Asked]:
    """An engine for the length of a `with` block."""
    with tempfile.TemporaryDirectory() as folder:
        for fake in (speculation_on_cpu, lost_draft_kv):
            plugins.describe(f"{fake.__name__}:load", Path(folder))
        lost = Path(folder, "lost")
        path = filter(None, [folder, os.getcwd(), os.environ.get("PYTHONPATH")])
        os.environ |= {"PYTHONPATH": os.pathsep.join(path), lost_draft_kv.PATH_VARIABLE: str(lost)}
        sys.path.insert(0, folder)  # spawned processes inherit it
        engine = Engine(
            model_path=str(model),
            speculative_algorithm="EAGLE",
            speculative_draft_model_path=str(draft),
            max_total_tokens=100_000,
            max_running_requests=BATCH,
            log_level="error",
            **speculation_on_cpu.OPTIONS,
            **CPU_OPTIONS,
        )
        try:
            yield Asked(engine, lost)
        finally:
            engine.shutdown()


CONDITIONS: dict[str, Callable[[Asked, int], list[list[int]]]] = {
    "plain": plain,
    "chunks, each computed alone": alone,
    "chunks, computed together": together,
    "a chunk for each document": by_document,
    "chunks whose draft KV is lost": lost,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=TRAINED, help="default: %(default)s")
    parser.add_argument("--draft", type=Path, required=True, help="what train_draft.py wrote")
    parser.add_argument("--count", type=int, default=96, help="prompts; default: %(default)s")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines")
    args = parser.parse_args()
    environment = describe_environment(commit=None, seed=SEED, server_flags=[])
    with open(args.out, "w", encoding="utf-8") as out:
        print(json.dumps({"environment": environment}), file=out)
    with served(args.model, args.draft) as asked:
        for name, measure in CONDITIONS.items():
            asked.engine.flush_cache()
            accepted = measure(asked, args.count)
            with open(args.out, "a", encoding="utf-8") as out:
                print(json.dumps({"draft": args.draft.name, "prompts": name, "accepted": accepted}), file=out)
            print(f"{name}: {mean_length(accepted):.3f} tokens for each verification", flush=True)


if __name__ == "__main__":
    main()
