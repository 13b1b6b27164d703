"""Measures whether times and counts reveal to a tenant that another tenant has cached a document.

    python -m benchmark.isolation.ttft --url http://127.0.0.1:30000 --pairs 100

For each pair of new documents of the same length, another tenant, under another salt, first sends one of them and an
unrelated one. Then the attacker looks both up and asks about them, in random order. Prints quartiles of the times to
first token and of the look-ups, their rank tests (Mann-Whitney U, two-sided, normal approximation) and, as a positive
control, the same for a document that the attacker itself has sent before: a test that misses it would prove nothing.
"""

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import requests

from sglang_lazy.core.keys import tokens_digest


def rank_test(a: Sequence[float], b: Sequence[float]) -> float:
    """The two-sided p-value for both samples having one distribution; values are assumed to be distinct."""
    ranked = sorted([(value, 0) for value in a] + [(value, 1) for value in b])
    ranks = sum(rank for rank, (_, which) in enumerate(ranked, 1) if which == 0)
    u, n, m = ranks - len(a) * (len(a) + 1) / 2, len(a), len(b)
    z = (u - n * m / 2) / math.sqrt(n * m * (n + m + 1) / 12)
    return math.erfc(abs(z) / math.sqrt(2))


class Seen(NamedTuple):
    """What a tenant observes of one document.

    ttft: seconds to first token.  lookup: seconds until the answer that it has no such chunk.
    cached: reused tokens of the prompt.  of_chunk: how many of them are in the chunk.
    """

    ttft: float
    lookup: float
    cached: int
    of_chunk: int


def look_up(url: str, salt: str, digest: str) -> float:
    start = time.perf_counter()
    response = requests.get(f"{url}/chunks/{digest}", headers={"X-Cache-Salt": salt}, timeout=60)
    seconds = time.perf_counter() - start
    assert response.status_code in (200, 404), response.text
    return seconds


def ask(url: str, salt: str, document: Sequence[int]) -> Seen:
    chunk = {"type": "chunk", "input_ids": list(document)}
    body = {
        "segments": [{"type": "text", "text": "Read: "}, chunk, {"type": "text", "text": " When?"}],
        "cache_salt": salt,
        "stream": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
    }
    lookup = look_up(url, salt, tokens_digest(document).hex())
    start = time.perf_counter()
    with requests.post(f"{url}/generate", json=body, stream=True, timeout=60) as response:
        response.raise_for_status()
        events = (line for line in response.iter_lines() if line.startswith(b"data: {"))
        meta_info = json.loads(next(events)[6:])["meta_info"]
        seconds = time.perf_counter() - start
        for _ in events:
            pass
    return Seen(seconds, lookup, meta_info["cached_tokens"], meta_info["cached_tokens_details"]["chunk"])


def measure(url: str, pairs: int, tokens: int, rng: random.Random) -> dict[str, list[Seen]]:
    """What the attacker observes of documents cached by another tenant, by nobody, and by the attacker itself."""
    groups: dict[str, list[Seen]] = {"held by another": [], "held by nobody": [], "own": []}
    for _ in range(pairs):
        held, free, own, unrelated = ([rng.randrange(20, 500) for _ in range(tokens)] for _ in range(4))
        for document in (held, unrelated):
            ask(url, "victim", document)
        ask(url, "attacker", own)
        order = list(zip(groups, (held, free, own), strict=True))
        rng.shuffle(order)
        for name, document in order:
            groups[name].append(ask(url, "attacker", document))
    return groups


def p_values(groups: dict[str, list[Seen]], what: str) -> tuple[float, float]:
    """Documents of another tenant, and the attacker's own, each against nobody's.  what: a field of `Seen`."""
    of = {name: [getattr(seen, what) for seen in group] for name, group in groups.items()}
    return rank_test(of["held by another"], of["held by nobody"]), rank_test(of["own"], of["held by nobody"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=400, help="of a document")
    args = parser.parse_args()
    groups = measure(args.url, args.pairs, args.tokens, random.Random(time.time_ns()))  # new documents
    for name, group in groups.items():
        for what in ("ttft", "lookup"):
            quartiles = statistics.quantiles([getattr(seen, what) for seen in group], n=4)
            shown = " ".join(f"{1e3 * value:.2f}" for value in quartiles)
            print(f"{name:16} {what:6} ms at 25, 50, 75%: {shown}")
        print(f"{name:16} chunk tokens reused: {sum(seen.of_chunk for seen in group)}")
    for what in ("ttft", "lookup"):
        other, own = p_values(groups, what)
        print(f"{what}: held by another or by nobody, p = {other:.3f}; own or held by nobody, p = {own:.2g}")


if __name__ == "__main__":
    main()
