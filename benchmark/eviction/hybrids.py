"""Hit rates of models with recurrent layers at equal memory, by the Zipf load of the serving benchmark.

    python -m benchmark.eviction.hybrids --out docs/results/hybrids/memory.jsonl

The tree and its pool of states are real, slots have no KV. Chunks divide the memory between KV and states, by each of
some values of --lazy-state-share. Beside them: a cache of prefixes whose states cost nothing, the most that one could
find, and chunks whose states cost nothing. Prints a line for each case: the prompts' tokens found cached, in percent.
"""

import argparse
import itertools
import json
import random
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import torch

from benchmark.eviction.caches import Cache, ExactLRU, WithStates
from benchmark.eviction.workload import Request
from benchmark.kv_bytes import kv_bytes_per_token
from benchmark.serving.arguments import positive, typed
from benchmark.serving.environment import describe_environment
from benchmark.serving.models import QWEN3_5_4B, QWEN3_6_35B_A3B
from benchmark.serving.workloads import Synthetic
from sglang_lazy.recurrent.pool import StateLayout, StateMemory

MODELS = {"Qwen3.5-4B": QWEN3_5_4B, "Qwen3.6-35B-A3B": QWEN3_6_35B_A3B}
CHUNK_LENS = (1024, 2048, 4096)
GIGABYTES = (4, 8, 16)
SHARES = (0.2, 0.35, 0.5, 0.65, 0.8)
"""Values of --lazy-state-share."""


def layout_of(shape: dict) -> StateLayout:
    """The states of a Qwen3.5 in bf16, whose recurrences are in fp32."""
    heads, k_dim, v_dim = (shape[f"linear_{name}"] for name in ("num_value_heads", "key_head_dim", "value_head_dim"))
    channels = 2 * shape["linear_num_key_heads"] * k_dim + heads * v_dim
    num_layers = shape["layer_types"].count("linear_attention")
    conv = ((channels, shape["linear_conv_kernel_dim"] - 1),)
    return StateLayout(num_layers, conv, torch.bfloat16, (heads, v_dim, k_dim), torch.float32, "matrix")


def prompts(chunk_len: int, seed: int) -> Iterator[list[array]]:
    """Each prompt's segments, as tokens: as the serving benchmark draws them, without end."""
    for turn, *_ in Synthetic(chunk_len=chunk_len).conversations(random.Random(seed), list):
        yield [array("q", segment["input_ids"]) for segment in turn.segments]


def hit_rate(cache: Cache, asked: Sequence[list[array]], as_chunks: bool) -> float:
    """Tokens found after the first fifth of the prompts, in percent.

    as_chunks: whether the cache knows all segments but the last by themselves, or a prompt as a whole.
    """
    found = total = 0
    for number, segments in enumerate(asked):
        texts = segments[:-1] if as_chunks else [array("q", itertools.chain(*segments))]
        num_found = cache.serve(Request(texts, as_chunks))
        cache.check()
        if number >= len(asked) // 5:
            found, total = found + num_found, total + sum(map(len, segments))
    return round(100 * found / total, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=typed(positive), default=2000, help="in each case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="recorded in the results; required without git")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = [{"environment": describe_environment(commit=args.commit, seed=args.seed, server_flags=[])}]
    for (name, shape), chunk_len in itertools.product(MODELS.items(), CHUNK_LENS):
        asked = [*itertools.islice(prompts(chunk_len, args.seed), args.requests)]
        token_bytes, layout = kv_bytes_per_token(SimpleNamespace(**shape)), layout_of(shape)
        for gigabytes in GIGABYTES:
            size = int(gigabytes * 1e9 / token_bytes)
            row = {
                "model": name,
                "chunk_len": chunk_len,
                "kv_mb": round(chunk_len * token_bytes / 1e6, 1),
                "state_mb": round(layout.slot_bytes / 1e6, 1),
                "gigabytes": gigabytes,
                "prefixes": hit_rate(ExactLRU(size), asked, as_chunks=False),
                "free_states": hit_rate(ExactLRU(size), asked, as_chunks=True),
                "shares": {},
            }
            for share in SHARES:
                memory = StateMemory.within(share * gigabytes * 1e9, layout)
                if memory.num_states >= len(asked[0]) - 1:  # a prompt reads all its chunks at once
                    cache = WithStates(int((1 - share) * size), memory.num_states)
                    row["shares"][share] = hit_rate(cache, asked, as_chunks=True)
            rows.append(row)
            print(*row.values(), flush=True)
    if args.out is not None:
        args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
