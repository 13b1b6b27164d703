"""A tenant on a running server cannot tell whether another one holds a document: neither by times nor by counts.

Distributions are compared, and the same comparison tells what the tenant holds itself. Without a server, and with all
that answers say: test/unit/test_isolation.py.
"""

import random
from collections import Counter

import pytest

from benchmark.isolation.ttft import measure, p_values, rank_test

PAIRS = 40
SURE = 1e-4
"""By chance, one run in so many would be taken for a leak."""


@pytest.fixture(scope="module")
def groups(server):
    """Pairs enough that times tell a tenant's own documents: on a busy machine that takes more of them."""
    measure(server, 3, 400, random.Random(1))  # the first requests of a server take longer
    groups = {}
    for seed in range(2, 12):
        for name, seen in measure(server, PAIRS, 400, random.Random(seed)).items():
            groups[name] = groups.get(name, []) + seen
        if p_values(groups, "ttft")[1] < SURE:
            break
    return groups


@pytest.mark.slow  # hundreds of requests; test/unit/test_isolation.py has what answers say
def test_times_to_the_first_token_reveal_only_ones_own(groups):
    other, own = p_values(groups, "ttft")
    assert own < SURE < other, (own, other)


@pytest.mark.slow
def test_look_ups_of_missing_chunks_take_alike(groups):
    other, _ = p_values(groups, "lookup")
    assert other > SURE


@pytest.mark.slow
def test_counts_reveal_only_ones_own(groups):
    counts = {name: Counter((seen.cached, seen.of_chunk) for seen in group) for name, group in groups.items()}
    assert counts["held by another"] == counts["held by nobody"] != counts["own"]
    assert {of_chunk for _, of_chunk in counts["own"]} == {400}


def test_the_rank_test_is_one():
    rng = random.Random(0)
    same = [rank_test(*([rng.random() for _ in range(PAIRS)] for _ in range(2))) for _ in range(400)]
    for level in (0.05, 0.5):
        assert abs(sum(p < level for p in same) / 400 - level) < 0.08
    apart = rank_test([rng.random() + 0.5 for _ in range(PAIRS)], [rng.random() for _ in range(PAIRS)])
    assert apart < SURE
