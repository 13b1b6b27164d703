"""Measures whether a tenant's time to first token reveals that another tenant holds the same document.

    python -m benchmark.isolation.ttft --url http://127.0.0.1:30000 --pairs 100

For each pair of new documents of the same length, another tenant, under another salt, first sends one of them and an
unrelated one. Then the attacker asks about both, in random order. Prints quartiles of both times, their rank test
(Mann-Whitney U, two-sided, normal approximation) and, as a positive control, the same for a document that the attacker
itself has sent before: a test that missed that would prove nothing.
"""

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Sequence

import requests

WORDS = [
    *("river", "mill", "stone", "bridge", "north", "market", "winter", "copper"),
    *("ledger", "harbour", "field", "tower", "letter", "glass", "train"),
]


def rank_test(a: Sequence[float], b: Sequence[float]) -> float:
    """The two-sided p-value for both samples having one distribution; values are assumed to be distinct."""
    ranked = sorted([(value, 0) for value in a] + [(value, 1) for value in b])
    ranks = sum(rank for rank, (_, which) in enumerate(ranked, 1) if which == 0)
    u, n, m = ranks - len(a) * (len(a) + 1) / 2, len(a), len(b)
    z = (u - n * m / 2) / math.sqrt(n * m * (n + m + 1) / 12)
    return math.erfc(abs(z) / math.sqrt(2))


def ask(url: str, salt: str, document: str) -> tuple[float, int]:
    """Seconds to the first token, and how many chunk tokens were reused."""
    body = {
        "segments": [
            {"type": "text", "text": "Read: "},
            {"type": "chunk", "text": document},
            {"type": "text", "text": " When?"},
        ],
        "cache_salt": salt,
        "stream": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
    }
    start = time.perf_counter()
    with requests.post(f"{url}/generate", json=body, stream=True, timeout=60) as response:
        response.raise_for_status()
        events = (line for line in response.iter_lines() if line.startswith(b"data: {"))
        first = json.loads(next(events)[6:])
        seconds = time.perf_counter() - start
        for _ in events:
            pass
    return seconds, first["meta_info"]["cached_tokens_details"]["chunk"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--words", type=int, default=400)
    args = parser.parse_args()
    rng = random.Random(0)
    run = f"{time.time_ns():x}"  # so that no document recurs from an earlier run
    groups: dict[str, list[float]] = {"held by another": [], "held by nobody": [], "own": []}
    reused = dict.fromkeys(groups, 0)
    for pair in range(args.pairs):
        documents = [" ".join([run, str(pair), *rng.choices(WORDS, k=args.words)]) for _ in range(4)]
        held, free, own, unrelated = documents
        for document in (held, unrelated):
            ask(args.url, "victim", document)
        ask(args.url, "attacker", own)
        order = [("held by another", held), ("held by nobody", free), ("own", own)]
        rng.shuffle(order)
        for name, document in order:
            seconds, tokens = ask(args.url, "attacker", document)
            groups[name].append(seconds)
            reused[name] += tokens
    for name, times in groups.items():
        quartiles = " ".join(f"{1e3 * value:.2f}" for value in statistics.quantiles(times, n=4))
        print(f"{name:16} ms at 25, 50, 75%: {quartiles}; chunk tokens reused: {reused[name]}")
    p_value = rank_test(groups["held by another"], groups["held by nobody"])
    print(f"held by another or by nobody: p = {p_value:.3f}")
    print(f"own or held by nobody:        p = {rank_test(groups['own'], groups['held by nobody']):.2g}")


if __name__ == "__main__":
    main()
