"""Compares the hit rate of the two trees of a server with that of one exact LRU tree, on the same requests.

    python -m benchmark.eviction --out docs/results/eviction/rows.jsonl

The trees are real, the pool has no KV. Prints a line per case: the tokens found cached, in percent of all, of the last
four fifths of the requests.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

from benchmark.eviction.caches import Cache, ExactLRU, TwoTrees
from benchmark.eviction.workload import Mix, requests
from benchmark.serving.arguments import positive, typed
from benchmark.serving.environment import describe_environment

SHORT = {"turn_tokens": (10, 60), "system_tokens": (10, 200)}
MIXES = {
    "10% linked": Mix(linked=0.1),
    "50% linked": Mix(linked=0.5),
    "90% linked": Mix(linked=0.9),
    "50% linked, flat": Mix(linked=0.5, alpha=0.6),
    "50% linked, short chats": Mix(linked=0.5, **SHORT),
}
POOLS = (60_000, 240_000, 1_000_000)


def hit_rates(cache: Cache, mix: Mix, count: int, seed: int) -> dict[str, float]:
    """Tokens found, in percent, after the first fifth of the requests: of all, of chunks, and of other prompts."""
    found, asked = {True: 0, False: 0}, {True: 0, False: 0}
    for i, request in enumerate(requests(mix, count, seed)):
        num_found = cache.serve(request)
        cache.check()
        if i >= count // 5:
            found[request.linked] += num_found
            asked[request.linked] += sum(map(len, request.texts))
    return {
        "all": _percent(found.values(), asked.values()),
        "chunks": _percent([found[True]], [asked[True]]),
        "plain": _percent([found[False]], [asked[False]]),
    }


def _percent(found: Iterable[int], asked: Iterable[int]) -> float:
    return round(100 * sum(found) / max(1, sum(asked)), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=typed(positive), default=6000, help="in each case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="recorded in the results; required without git")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    environment = describe_environment(commit=args.commit, seed=args.seed, server_flags=[])
    rows = []
    for name, mix in MIXES.items():
        for pool in POOLS:
            one, two = (hit_rates(cls(pool), mix, args.requests, args.seed) for cls in (ExactLRU, TwoTrees))
            rows.append({"mix": name, "pool": pool, "one_tree": one, "two_trees": two})
            print(name, pool, *(f"{kind}: {one[kind]} {two[kind]}" for kind in one), flush=True)
    worst = min(row["two_trees"]["all"] - row["one_tree"]["all"] for row in rows)
    print(f"worst case: {worst:+.2f} points of all tokens")
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        run = {"environment": environment, "requests": args.requests}
        args.out.write_text("".join(json.dumps(row) + "\n" for row in [run, *rows]))


if __name__ == "__main__":
    main()
