"""Links: names of policies with parameters, and what each policy keeps, as far as no cache is needed to say it."""

import dataclasses
import itertools
import math
import random
from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_lazy.core.keys import ChunkKey, Namespace
from sglang_lazy.core.policy import Policy, parameter
from sglang_lazy.core.prompt import ChunkSlice
from sglang_lazy.core.segments import PromptLayout
from sglang_lazy.policies import POLICIES, get_policy, register
from sglang_lazy.policies.epic import Epic
from sglang_lazy.policies.query import Query

repeatable = settings(derandomize=True, deadline=None, database=None)

# Links


@pytest.mark.parametrize(
    "link, full, preamble",
    [
        ("block", "block", "none"),
        ("full", "full", "none"),
        ("copy", "copy", "none"),
        ("epic", "epic:tokens=16", "none"),
        ("epic:tokens=3", "epic:tokens=3", "none"),
        ("epic:tokens= 3", "epic:tokens=3", "none"),
        ("query", "query:ratio=0.15", "none"),
        ("query:ratio=1", "query:ratio=1.0", "none"),
        ("query:ratio=5e-1", "query:ratio=0.5", "none"),
        ("base", "base", "neutral"),
        ("base+block", "base", "neutral"),
        ("base:preamble=neutral", "base", "neutral"),
        ("base:preamble=lead", "base:preamble=lead", "lead"),
        ("base:preamble=lead+block", "base:preamble=lead", "lead"),
        ("base:preamble=none+epic", "epic:tokens=16", "none"),
        ("base+copy", "base+copy", "neutral"),
        ("base+epic:tokens=2", "base+epic:tokens=2", "neutral"),
        ("base:preamble=lead+query:ratio=0.1", "base:preamble=lead+query:ratio=0.1", "lead"),
    ],
)
def test_links(link, full, preamble):
    """`str(policy)` is the full link, which names an equal policy."""
    policy = get_policy(link)
    assert str(policy) == full and policy.preamble == preamble
    assert get_policy(full) == policy and hash(get_policy(full)) == hash(policy)


def test_parameters_make_policies_differ():
    links = [
        "epic:tokens=1",
        "epic:tokens=2",
        "base+epic:tokens=1",
        "base:preamble=lead+epic:tokens=1",
        "block",
        "base",
    ]
    policies = [get_policy(link) for link in links]
    assert all(one != other for one, other in itertools.combinations(policies, 2))


KNOWN = "link must be one of 'block', 'full', 'epic', 'query', .*'packet'.*"


@pytest.mark.parametrize(
    "link, message",
    [
        *((link, f"{KNOWN}, or 'base', alone or as in 'base\\+epic'; got {link!r}") for link in ("other", "", "Block")),
        *(
            (link, f"{KNOWN}.*; got ")
            for link in (None, 3, ["block"], "block+epic", "base+base", "base+", "based+epic")
        ),
        ("block+", KNOWN),
        ("base++epic", KNOWN),
        ("block:", "policy 'block' has no parameters, got ''"),
        ("block:tokens=3", "policy 'block' has no parameters, got 'tokens=3'"),
        ("block:preamble=lead", "policy 'block' has no parameters, got 'preamble=lead'"),
        ("epic:preamble=lead", "policy 'epic' takes tokens, got 'preamble=lead'"),
        ("epic:", "policy 'epic' takes tokens, got ''"),
        ("epic:ratio=0.1", "policy 'epic' takes tokens, got 'ratio=0.1'"),
        ("epic:tokens", "tokens must be of type int, got ''"),
        ("epic:tokens=3.5", "tokens must be of type int, got '3.5'"),
        ("epic:tokens=3,", "policy 'epic' takes tokens, got ''"),
        ("epic:tokens=3,tokens=4", "tokens is given twice"),
        ("query:ratio=0.15,ratio=0.15", "ratio is given twice"),
        ("base:preamble=lead,preamble=neutral+epic", "preamble is given twice"),
        ("epic:tokens=0", "link 'epic:tokens=0': tokens must be at least 1 and at most 1048576, got 0"),
        ("epic:tokens=-2", "tokens must be at least 1 .*, got -2"),
        ("epic:tokens=9999999999999999999", "tokens must be at least 1 and at most 1048576, got 9"),
        ("kvlink:tokens=9999999999999999999", "tokens must be at least 1 and at most 64, got 9"),
        ("kvlink:tokens=" + 240 * "9", "tokens must be at least 1 and at most 64, got 9"),
        ("query:ratio=0.5,static=0.6", "static must be at least 0 and at most ratio, got 0.6"),
        ("query:ratio=0.5,static=nan", "static must be at least 0 and at most 1, got nan"),
        ("query:ratio=1e999", "ratio must be above 0 and at most 1, got inf"),
        ("block\0", "link must have at most 256 printable characters"),
        ("block" + 252 * "x", "link must have at most 256 printable characters, got 'block"),
        ("query:ratio=much", "ratio must be of type float, got 'much'"),
        ("query:ratio=0", "ratio must be above 0 and at most 1, got 0.0"),
        ("query:ratio=1.01", "ratio must be above 0 and at most 1, got 1.01"),
        ("query:ratio=nan", "ratio must be above 0 and at most 1, got nan"),
        ("base:preamble=other", "preamble must be one of none, neutral, lead, got 'other'"),
        ("base:tokens=3", "policy 'base' takes preamble, got 'tokens=3'"),
        ("base+epic:tokens=0", "link 'base\\+epic:tokens=0': tokens must be at least 1"),
        ("base+full", "link 'base\\+full': full computes no chunks, so a preamble has no effect"),
        ("base:preamble=none+full", "full computes no chunks"),
    ],
)
def test_bad_links(link, message):
    for _ in range(2):  # an error is not cached
        with pytest.raises(ValueError, match=message):
            get_policy(link)


def test_errors_are_short():
    with pytest.raises(ValueError) as error:
        get_policy("x" * 10000)
    assert len(str(error.value)) < 300


@dataclasses.dataclass(frozen=True)
class Some(Policy):
    name = "some"
    share: float = 0.5
    what: str = "all"
    count: int = 3


def test_links_follow_registration_and_deletion():
    """Although parsed links are cached."""
    for _ in range(2):
        with pytest.raises(ValueError, match="got 'some'"):
            get_policy("some")
        register(Some)
        try:
            assert get_policy("some") == Some()
            policy = get_policy("base+some:what=this,count=4")
            assert policy == Some(what="this", count=4, preamble="neutral")
            assert str(policy) == "base+some:share=0.5,what=this,count=4"
            with pytest.raises(ValueError, match="policy 'some' takes share, what, count, got 'whole=1'"):
                get_policy("some:whole=1")
            with pytest.raises(ValueError, match="'packet', .*'some', or 'base'"):
                get_policy("other")
        finally:
            del POLICIES["some"]


def test_a_link_means_the_class_registered_now():
    other = type("Other", (Some,), {})
    for policy in (Some, other, Some):
        register(policy)
        try:
            assert type(get_policy("some:count=9")) is policy
        finally:
            del POLICIES["some"]


@dataclasses.dataclass(frozen=True)
class Unchecked(Policy):
    """It has no checks of its own, not even the base class's."""

    name = "unchecked"
    share: float = 0.5
    count: int = 3
    few: int = parameter(2, 2, 5)

    def __post_init__(self):
        assert self.few <= 5 and self.count <= 1 << 20 and self.share <= 1 << 20, "made before it was checked"


@pytest.mark.parametrize(
    "value", ["few=1", "few=6", "count=-1", "count=1048577", "share=nan", "share=1e999", "share=-1"]
)
def test_parameters_of_registered_policies_have_bounds(value):
    register(Unchecked)
    try:
        assert get_policy("unchecked:few=5,count=1048576") == Unchecked(few=5, count=1 << 20)
        with pytest.raises(ValueError, match=f"{value.partition('=')[0]} must be at least [02] and at most"):
            get_policy(f"unchecked:{value}")
    finally:
        del POLICIES["unchecked"]


def test_every_number_of_every_policy_has_bounds_of_its_own():
    for policy in POLICIES.values():
        for field in dataclasses.fields(policy):
            assert field.name == "preamble" or "range" in field.metadata, (policy, field.name)


@pytest.mark.parametrize("name", ["block", "base"])
def test_names_that_are_taken(name):
    with pytest.raises(ValueError, match=f"policy '{name}' is registered already"):
        register(type("Again", (Some,), {"name": name}))


# What policies keep

lens = st.lists(st.integers(1, 6), min_size=1, max_size=5)


@repeatable
@given(lens, st.integers(0, 2), st.integers(1, 7))
def test_epic_recomputes_the_first_tokens_of_chunks(lens, lead, tokens):
    """By brute force: a chunk's token is kept unless it is among the first and something precedes the chunk."""
    ends = [lead + end for end in itertools.accumulate(lens)]
    layout = PromptLayout(tuple(zip([lead, *ends], ends, strict=False)))
    for (start, end), ranges in zip(layout.chunks, Epic(tokens).kept(layout, range(ends[-1] + 1)), strict=True):
        kept = [i for pair in ranges for i in range(*pair)]
        assert kept == [i for i in range(end - start) if i >= tokens or start == 0]
        assert all(first < last for first, last in ranges)


def slices(lens, cut_last):
    """The chunks whole, but for the prompt's last token."""
    key, position, chunks = ChunkKey(b"", Namespace("chunk", None, None), b""), 0, []
    for i, count in enumerate(lens):
        kept = count - (cut_last and i == len(lens) - 1)
        if kept:
            chunks.append(ChunkSlice(key, i, array("q", range(sum(lens))), position, count, ((0, kept),)))
        position += count
    return chunks


@repeatable
@given(lens, st.booleans(), st.sampled_from([0.01, 0.15, 0.25, 0.5, 0.9, 1.0]), st.integers(0, 1 << 30))
def test_query_recomputes_the_most_attended_tokens(lens, cut_last, ratio, seed):
    """By brute force over all chunks together, with many ties, which go to the lower position. Repeated chunks count
    token by token."""
    chunks = slices(lens, cut_last)
    count = sum(chunk.num_kept for chunk in chunks)
    if not count:
        return
    dice = random.Random(seed)
    attention = np.array([dice.choice([0, 0.5, 1, 7]) for _ in range(count)], dtype=np.float32)
    query = Query(ratio)
    best = sorted(range(count), key=lambda i: (-attention[i], i))[: math.ceil(ratio * count)]
    assert query.max_recomputed([count]) == len(best)
    place = 0
    chosen = query.choose(chunks, {"attention": attention})
    assert len(chosen) == len(chunks)
    for chunk, ranges in zip(chunks, chosen, strict=True):
        kept = [i for pair in ranges for i in range(*pair)]
        assert kept == [i for i in range(chunk.num_kept) if place + i not in best]
        assert all(first < last for first, last in ranges)
        assert all(one[1] < other[0] for one, other in itertools.pairwise(ranges)), "adjacent ranges must be merged"
        assert all(type(edge) is int for pair in ranges for edge in pair), "keys hold no NumPy integers"
        place += chunk.num_kept


@pytest.mark.parametrize("seed", range(20))
def test_query_chooses_a_part_by_key_size(seed):
    """First the smallest keys of each chunk, then what is attended to most of the others."""
    dice = random.Random(seed)
    chunks = slices([dice.randint(1, 12) for _ in range(dice.randint(1, 5))], cut_last=False)
    lens = [chunk.num_kept for chunk in chunks]
    sizes, attention = (np.array([dice.random() for _ in range(sum(lens))], dtype=np.float32) for _ in range(2))
    query = get_policy("query:ratio=0.5,static=0.2")
    assert str(query) == "query:ratio=0.5,static=0.2" and set(query.probes) == {"attention", "key size"}
    small, place = set(), 0
    for length in lens:
        order = sorted(range(place, place + length), key=lambda i: sizes[i])
        small.update(order[: math.ceil(0.2 * length)])
        place += length
    most = sorted(range(sum(lens)), key=lambda i: (i not in small, i if i in small else -attention[i]))
    expected = set(most[: math.ceil(0.5 * sum(lens))])
    kept, place = set(), 0
    for chunk, ranges in zip(chunks, query.choose(chunks, {"attention": attention, "key size": sizes}), strict=True):
        kept |= {place + i for pair in ranges for i in range(*pair)}
        place += chunk.num_kept
    assert kept == set(range(sum(lens))) - expected


@repeatable
@given(lens, st.booleans(), st.sampled_from([0.01, 0.3, 0.5, 1.0]), st.integers(0, 1 << 30))
def test_whole_recomputes_the_most_attended_chunks(lens, cut_last, ratio, seed):
    """No kept chunk that fits into what is left has more attention than a recomputed one."""
    chunks = slices(lens, cut_last)
    counts = [chunk.num_kept for chunk in chunks]
    if not chunks:
        return
    attention = np.random.default_rng(seed).random(sum(counts)).astype(np.float32)
    policy = get_policy(f"whole:ratio={ratio}")
    sums = [float(part.sum()) for part in np.split(attention, np.cumsum(counts)[:-1])]
    kept = policy.choose(chunks, {"attention": attention})
    assert all(not ranges or ranges == chunk.kept for ranges, chunk in zip(kept, chunks, strict=True))
    recomputed = [i for i, ranges in enumerate(kept) if not ranges]
    assert sum(counts[i] for i in recomputed) <= policy.max_recomputed(counts)
    for i in set(range(len(chunks))) - set(recomputed):
        before = sum(counts[j] for j in recomputed if sums[j] > sums[i])
        assert before + counts[i] > policy.max_recomputed(counts), "it would have been next, and there was room"


@pytest.mark.parametrize("static", ["-0.1", "0.3", "nan"])
def test_the_part_by_key_size_is_within_the_ratio(static):
    with pytest.raises(ValueError, match="static must be at least 0 and at most (1|ratio)"):
        get_policy(f"query:ratio=0.2,static={static}")


def test_query_keeps_nothing_at_a_ratio_of_one():
    assert list(Query(1.0).choose(slices([2, 3], False), {"attention": np.arange(5, dtype=np.float32)})) == [[], []]
