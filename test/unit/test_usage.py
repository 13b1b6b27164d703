"""What is remembered of prompts with chunks: totals by time and tenant, the last prompts, and each chunk's uses."""

import random
from collections import Counter

import pytest

from sglang_lazy.core import periods
from sglang_lazy.core.keys import Namespace
from sglang_lazy.core.periods import PERIODS, SECONDS, Sums, merged
from sglang_lazy.serving import usage
from sglang_lazy.serving.usage import SHOWN_CHUNKS, SHOWN_PROMPTS, Usage

NOW = 1_000_000.0


def shared(salt=None, extra_key=None):
    return Namespace("chunk", extra_key, salt)


def report(*chunks):
    """A report of (id, tokens, hit)."""
    return [{"id": name, "tokens": tokens, "offset": 0, "hit": hit} for name, tokens, hit in chunks]


def test_totals_by_period():
    used = Usage()
    used.add(shared(), "block", report(("a", 5, False), ("b", 7, True)), 7, NOW)
    used.add(shared(), "block", report(("a", 5, True)), 4, NOW + SECONDS - 1)
    used.add(shared(), "block", report(("b", 7, True)), 7, NOW + SECONDS)
    assert used.history(None, False, NOW + SECONDS) == [[NOW, 2, 3, 2, 17, 11], [NOW + SECONDS, 1, 1, 1, 7, 7]]
    assert used.history("other", False, NOW) == []


def test_totals_go_back_one_hour():
    used = Usage()
    for i in range(PERIODS + 5):
        used.add(shared(), "block", report(("a", 5, True)), 5, NOW + i * SECONDS)
    history = used.history(None, False, NOW + (PERIODS + 4) * SECONDS)
    assert [row[0] for row in history] == [NOW + i * SECONDS for i in range(5, PERIODS + 5)]
    assert used.history(None, False, NOW + (2 * PERIODS + 4) * SECONDS) == []


def test_totals_of_several_ranks():
    assert merged([[[20, 1, 5], [60, 2, 0]], [], [[40, 3, 1], [60, 1, 1]]]) == [[20, 1, 5], [40, 3, 1], [60, 3, 1]]


def test_a_tenant_sees_only_its_own_prompts():
    used = Usage()
    for namespace in (shared(), shared("a"), shared("b"), shared("b", "b and another key"), shared(None, "a")):
        used.add(namespace, "block", report(("x", 5, True), ("y", 6, False)), 5, NOW)
    for tenant in (None, "a", "b"):
        assert [row[1] for row in used.history(tenant, False, NOW)] == [1]
        assert [prompt["cache_salt"] for prompt in used.last(tenant, False)] == [tenant]
        assert used.uses(tenant, False, "x")["num_prompts"] == 1
    assert [row[1] for row in used.history(None, True, NOW)] == [5]
    assert len(used.last(None, True)) == used.uses(None, True, "x")["num_prompts"] == 5
    assert used.uses("c", False, "x") == {"num_prompts": 0, "prompts": [], "together": []}


def test_the_latest_prompts_come_first_and_are_shortened():
    used = Usage()
    for i in range(SHOWN_PROMPTS + 3):
        used.add(shared(), "block", report(*[(f"{j}", 5, True) for j in range(SHOWN_CHUNKS + 2)]), 0, NOW + i)
    prompts = used.last(None, False)
    assert [prompt["time"] for prompt in prompts] == [NOW + SHOWN_PROMPTS + 2 - i for i in range(SHOWN_PROMPTS)]
    assert {(prompt["num_chunks"], len(prompt["chunks"])) for prompt in prompts} == {(SHOWN_CHUNKS + 2, SHOWN_CHUNKS)}
    assert prompts[0]["chunks"][0] == {"id": "0", "tokens": 5, "hit": True}


def test_uses_of_a_chunk():
    rng, used, prompts = random.Random(0), Usage(), []
    for i in range(200):
        ids = rng.choices("abcdefghijklmnopqrstuvw", weights=range(23, 0, -1), k=rng.randint(1, 70))
        prompts.append(ids)
        used.add(shared(), "block", report(*[(name, 5, True) for name in ids]), 0, NOW + i)
    for name in "adw":
        having = [set(ids) for ids in prompts if name in ids]
        counts = Counter(other for ids in having for other in ids - {name})
        found = used.uses(None, False, name)
        assert found["num_prompts"] == len(having)
        assert [other["prompts"] for other in found["together"]] == [n for _, n in counts.most_common(SHOWN_PROMPTS)]
        together = {other["id"] for other in found["together"]}
        assert all(counts[other["id"]] == other["prompts"] for other in found["together"]) and name not in together
        assert len(found["prompts"]) == SHOWN_PROMPTS
        for prompt, ids in zip(found["prompts"], reversed([ids for ids in prompts if name in ids]), strict=False):
            drawn = [chunk["id"] for chunk in prompt["chunks"]]
            assert drawn == [other for other in ids if other in {name, *together}][:SHOWN_CHUNKS]


def test_no_more_periods_are_kept_than_are_shown():
    sums = Sums()
    for i in range(PERIODS + 20):
        sums.add([1], NOW + i * SECONDS)
    assert len(sums.rows(now=NOW)) == PERIODS, "at that time all were of the last hour, or later"


@pytest.mark.parametrize(("limit", "value"), [("MAX_PROMPTS", 5), ("MAX_REFERENCES", 10)])
def test_memory_is_bounded(monkeypatch, limit, value):
    monkeypatch.setattr(usage, limit, value)
    monkeypatch.setattr(periods, "MAX_TENANTS", 3)
    used = Usage()
    for i in range(50):
        used.add(shared(f"tenant-{i}"), "block", report(("a", 5, True), ("b", 5, True)), 0, NOW)
    assert [prompt["cache_salt"] for prompt in used.last(None, True)] == [f"tenant-{i}" for i in range(49, 44, -1)]
    assert [i for i in range(50) if used.history(f"tenant-{i}", False, NOW)] == [47, 48, 49]
    assert [row[1] for row in used.history(None, True, NOW)] == [50]
