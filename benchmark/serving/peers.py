"""Time to the first token of documents in a new order, on servers of any engine that are already running.

    python -m benchmark.serving.peers model /tmp/m8b
    python -m benchmark.serving.peers measure --out rows.jsonl lazy=chunks@http://127.0.0.1:30000 \\
        sglang=plain@http://127.0.0.1:30001 blend=pieces@http://127.0.0.1:8200

`model` writes Llama-3.1-8B's shape for servers that make weights up; docs/benchmarks.md says how to start them.
`measure` sends every server the same prompts of token ids over `/v1/completions`, one at a time, and takes the time
until one token is back. The word before the URL says how a server learns documents, and how it is sent prompts:

    chunks  a prompt with all of them; documents are chunks
    plain   a prompt with all of them, which a prefix cache may keep; ids
    pieces  each alone, as LMCache's blend needs them; ids, and LMCache is told to store no more

A prompt is a preamble, documents and a question, with the same three ids between them, which LMCache cuts at. The file
gets a line for each server, size and phase: `cold` has new documents, `new order` those stored, `same order` the order
in which they were stored, all behind a new question.
"""

import argparse
import dataclasses
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import requests
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

BOS = 128000
SEPARATOR = [1001, 1002, 1003]
DOCUMENT_IDS = range(2000, 100000)
"""Without the separator's."""
SIDE_TEXT = 64
"""Ids of the preamble and of the question."""
UNCOUNTED = 2
"""Prompts at the beginning of a phase that are sent, but not counted: engines compile and tune at first use."""
COLD, STORED = 4, 8
"""Prompts counted with new and with stored documents."""
SETTLE_S = 1.5
"""LMCache may still be storing when it has answered."""
TIMEOUT_S = 60


@dataclasses.dataclass(frozen=True)
class Size:
    count: int
    length: int  # of a document, in ids

    @classmethod
    def parse(cls, text: str) -> "Size":
        return cls(*map(int, text.split("x")))


@dataclasses.dataclass(frozen=True)
class Server:
    name: str
    kind: str
    url: str

    @classmethod
    def parse(cls, text: str) -> "Server":
        name, _, rest = text.partition("=")
        kind, _, url = rest.partition("@")
        if kind not in ("chunks", "plain", "pieces") or not url:
            raise ValueError(text)
        return cls(name, kind, url)

    def body(self, parts: list[list[int]]) -> dict:
        """The fields of a request for a prompt of a preamble, documents and a question."""
        joined = [parts[0], *(part for document in parts[1:] for part in (SEPARATOR, document))]
        if self.kind != "chunks":
            ids = {"prompt": [token for part in joined for token in part]}
            return ids if self.kind == "plain" else ids | {"kv_transfer_params": {"lmcache.skip_save": True}}
        chunks = range(2, 2 * len(parts) - 2, 2)
        segments = [{"type": "chunk" if i in chunks else "text", "input_ids": ids} for i, ids in enumerate(joined)]
        return {"segments": segments}

    def store(self, session: requests.Session, parts: list[list[int]]) -> None:
        """Let the server learn the preamble and the documents of this prompt."""
        if self.kind == "pieces":
            for piece in parts[:-1]:
                self.ask(session, {"prompt": piece})
        else:
            self.ask(session, self.body(parts))
        time.sleep(SETTLE_S)

    def ask(self, session: requests.Session, prompt: dict) -> tuple[float, dict]:
        """Milliseconds until one token is back, and the answer's usage. Raises RequestException if it fails."""
        data = json.dumps({**prompt, "model": "default", "max_tokens": 1, "temperature": 0, "ignore_eos": True})
        start = time.perf_counter()
        answer = session.post(
            f"{self.url}/v1/completions", data, headers={"Content-Type": "application/json"}, timeout=TIMEOUT_S
        )
        elapsed = time.perf_counter() - start
        if answer.status_code != 200:
            raise requests.RequestException(f"{answer.status_code}: {answer.text[:300]}")
        return elapsed * 1000, answer.json()["usage"]


def measure(server: Server, size: Size, seed: int) -> Iterator[dict]:
    """Rows of one server and size. The seed and the size determine the prompts, whichever server they go to."""
    rng = random.Random(f"{seed} {size}")

    def ids(length: int) -> list[int]:
        return rng.choices(DOCUMENT_IDS, k=length)

    preamble = [BOS, *ids(SIDE_TEXT - 1)]

    def prompt(documents: list[list[int]]) -> list[list[int]]:
        return [preamble, *documents, ids(SIDE_TEXT)]

    def new() -> list[list[int]]:
        return [ids(size.length) for _ in range(size.count)]

    stored = new()
    phases = {
        "cold": [prompt(new()) for _ in range(UNCOUNTED + COLD)],
        "new order": [prompt(rng.sample(stored, size.count)) for _ in range(UNCOUNTED + STORED)],
        "same order": [prompt(stored) for _ in range(UNCOUNTED + STORED)],
    }
    with requests.Session() as session:
        for phase, prompts in phases.items():
            if phase == "new order":
                server.store(session, prompt(stored))
            asked = [server.ask(session, server.body(parts)) for parts in prompts][UNCOUNTED:]
            times = [round(milliseconds, 2) for milliseconds, _ in asked]
            yield {
                "server": server.name,
                "count": size.count,
                "length": size.length,
                "phase": phase,
                "ms": times,
                "ms_p50": round(statistics.median(times), 2),
                "usage": asked[-1][1],
            }


def write_model(folder: Path) -> None:
    """Llama-3.1-8B's shape without `rope_scaling`, which LMCache cannot rotate, and a tokenizer of a word for each id.

    LMCache encodes the separator from text, so "t1001 t1002 t1003" has to become its ids.
    """
    from benchmark.serving.models import LLAMA_3_1_8B

    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(LLAMA_3_1_8B["vocab_size"])}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    bos, eos = f"t{BOS}", f"t{BOS + 1}"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, BOS)]
    )
    names = dict(bos_token=bos, eos_token=eos, unk_token="t0", model_max_length=131072)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    shape = {name: value for name, value in LLAMA_3_1_8B.items() if name != "rope_scaling"}
    (folder / "config.json").write_text(json.dumps({**shape, "eos_token_id": BOS + 1}, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("model").add_argument("folder", type=Path)
    measuring = commands.add_parser("measure")
    measuring.add_argument("servers", type=Server.parse, nargs="+", metavar="NAME=KIND@URL")
    measuring.add_argument("--sizes", type=Size.parse, nargs="+", default=[Size(10, 1024), Size(10, 128)])
    measuring.add_argument("--seed", type=int, default=1)
    measuring.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.command == "model":
        write_model(args.folder)
        return
    failed = []
    with open(args.out, "a", encoding="utf-8") as file:
        for size in args.sizes:
            for server in args.servers:
                try:
                    for row in measure(server, size, args.seed):
                        print(json.dumps(row), file=file, flush=True)
                        documents = f"{size.count} x {size.length}"
                        print(f"{server.name:12} {documents:>10} {row['phase']:10} {row['ms_p50']:8.1f} ms", flush=True)
                except requests.RequestException as error:
                    failed.append(server.name)
                    print(f"{server.name}: {error}", file=sys.stderr, flush=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
