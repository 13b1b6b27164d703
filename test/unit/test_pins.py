"""Pinned chunks: they outlive others, within a budget and a time to live, and starve nobody."""

import random

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from test_chunk_lists import deleted, id_of, listed

from fakes.loop import QUESTION, A, B, C, D, Loop
from fakes.requests import CHUNK, TEXT

pytestmark = pytest.mark.usefixtures("sglang_context")


def pin(loop, *chunks, ttl=None, now=0.0, pinned=True, tenant=None, only=None, **names):
    """The ids pinned, and the reasons why others were skipped."""
    message = {"tenant": tenant, "ids": list(map(id_of, chunks)), "pin": pinned, "ttl": ttl}
    answer = loop.admission.control.handle("pin", {**message, "only": only, **names}, now)
    loop.pools.check()
    return [one["id"] for one in answer["affected"]], [one["reason"] for one in answer["skipped"]]


def expire(loop, now):
    return loop.admission.control.handle("expire", {}, now)["next"]


def listed_pins(loop):
    return {chunk["id"]: chunk["pinned_until"] for chunk in listed(loop)["chunks"] if chunk["pinned"]}


def evict_all(loop):
    loop.tree_cache.evict(EvictParams(num_tokens=loop.tree_cache.evictable_size()))


@pytest.mark.parametrize("host_size", [0, 80])
def test_a_pinned_chunk_stays_while_others_leave(host_size):
    loop = Loop(pool_size=40, host_size=host_size)
    loop.warm(A, B)
    assert pin(loop, A) == ([id_of(A)], [])
    evict_all(loop)
    loop.pools.check()
    tiers = {chunk["id"]: "device" in chunk["tiers"] for chunk in listed(loop)["chunks"]}
    assert tiers.pop(id_of(A)) and not any(tiers.values())
    req = loop.submit([B, A, QUESTION], "r")
    loop.run()
    assert loop.counts(req)[2] == (0b11 if host_size else 0b10)
    assert [chunk["users"] for chunk in listed(loop)["chunks"]] == [0, 0]
    pin(loop, A, pinned=False)
    evict_all(loop)
    assert all("device" not in chunk["tiers"] for chunk in listed(loop)["chunks"])


@pytest.mark.parametrize("host_size", [0, 60])
def test_the_beginning_of_a_longer_chunk_is_a_chunk_like_others(host_size):
    """Found within the longer one, which came first, it is listed, counts its hits, and can be pinned."""
    longer = (CHUNK, (*A[1], 7, 7))
    loop = Loop(pool_size=24, host_size=host_size)
    loop.warm(longer)
    assert pin(loop, A) == ([], ["unknown"])
    loop.warm(A, A)
    assert {chunk["id"]: chunk["hits"] for chunk in listed(loop)["chunks"]} == {id_of(longer): 0, id_of(A): 2}
    assert pin(loop, A) == ([id_of(A)], [])
    evict_all(loop)
    loop.pools.check()
    assert {c["id"] for c in listed(loop)["chunks"] if "device" in c["tiers"]} == {id_of(A)}


def test_the_budget():
    loop = Loop(pool_size=40)  # ten tokens of it may be pinned
    loop.warm(A, B, C)
    assert pin(loop, A, B, C) == ([id_of(A), id_of(B)], ["no more than 10 tokens can be pinned (--lazy-max-pinned)"])
    assert pin(loop, A, B) == ([id_of(A), id_of(B)], [])  # pinning again changes nothing
    assert loop.admission.pins.num_tokens.total() == 8
    pin(loop, A, pinned=False)
    assert pin(loop, C)[1] == []


def test_superseded_expiry_times_are_dropped():
    loop = Loop(pool_size=40)
    loop.warm(A, B)
    pin(loop, A, B, ttl=5.0)
    for i in range(20):
        pin(loop, A, ttl=80.0 + i, now=1.0)
    assert len(loop.admission.pins._ends) < 8, "superseded times pile up"
    assert expire(loop, 50.0) == 50.0 and listed_pins(loop) == {id_of(A): 100.0}
    pin(loop, A, now=51.0)
    assert expire(loop, 1e9) is None and listed_pins(loop) == {id_of(A): None}


def warm_for(loop, tenant, *chunks):
    for chunk in chunks:
        loop.submit(
            [chunk, QUESTION],
            f"{tenant}-{chunk}",
            max_new_tokens=1,
            cache_salt=tenant,
        )
    loop.run()


def test_a_tenant_cannot_exhaust_the_budget():
    loop = Loop(pool_size=48)  # twelve tokens of it may be pinned
    for tenant in ("a", "b", None):
        warm_for(loop, tenant, A, B, C)
    assert pin(loop, A, B, C, tenant="a") == ([id_of(A), id_of(B), id_of(C)], [])
    assert pin(loop, A, tenant="b") == ([id_of(A)], [])
    assert sorted(pins_of(loop, "a")) == sorted([id_of(B), id_of(C)])  # the oldest pin of "a" ended
    full = "no more than 12 tokens can be pinned (--lazy-max-pinned)"
    assert pin(loop, A, tenant="a") == ([], [full])
    assert pin(loop, B, tenant="b") == ([], [full])  # otherwise "b" would hold as much as is left to "a"
    assert pin(loop, C) == ([id_of(C)], [])
    assert [len(pins_of(loop, tenant)) for tenant in ("a", "b", None)] == [1, 1, 1]


def pins_of(loop, tenant):
    return {chunk["id"]: chunk["tokens"] for chunk in listed(loop, tenant)["chunks"] if chunk["pinned"]}


def test_each_tenant_can_pin_its_share():
    rng = random.Random(0)
    loop = Loop(pool_size=1000)
    loop.admission.pins.budget = 50
    tenants = ("a", "b", "c", None)
    chunks = [(True, (i, *[i % 3 + 1] * rng.randrange(1, 14))) for i in range(1, 16)]
    for tenant in tenants:
        warm_for(loop, tenant, *chunks)
    num_refused = num_ended = 0
    for _ in range(600):
        tenant, chunk = rng.choice(tenants), rng.choice(chunks)
        before = {one: pins_of(loop, one) for one in tenants}
        if rng.random() < 0.2:
            pin(loop, chunk, pinned=False, tenant=tenant)
            continue
        affected, _ = pin(loop, chunk, tenant=tenant)
        after = {one: pins_of(loop, one) for one in tenants}
        wanted = before[tenant] | {id_of(chunk): len(chunk[1])}
        share = 50 / sum(bool(before[one]) or one == tenant for one in tenants)
        if affected:
            assert after[tenant] == wanted and sum(sum(own.values()) for own in after.values()) <= 50
            for other in tenants:
                assert other == tenant or after[other] == before[other] or sum(before[other].values()) > share
                num_ended += len(before[other]) - len(after[other]) if other != tenant else 0
        else:
            assert after == before and sum(wanted.values()) > share
            num_refused += 1
    assert num_refused > 20 and num_ended > 20


def test_the_log_names_a_pin_that_ends_for_others(caplog):
    """A hit renews a pin with its name."""
    loop = Loop()
    warm_for(loop, "a", A, B)
    pin(loop, A, tenant="a", ttl=10, names={id_of(A): "Lease"})
    loop.submit([A, QUESTION], "hit", cache_salt="a")
    loop.run()
    expire(loop, 11)
    pin(loop, B, tenant="a")
    for _ in range(2):
        loop.admission.pins.give_up()
    words = "is pinned no longer: a running request needs its memory"
    titles = sorted([f"{id_of(A)} (Lease)", id_of(B)])
    assert sorted(record.getMessage() for record in caplog.records) == [
        f"sglang-lazy: chunk {t} {words}" for t in titles
    ]


def test_time_to_live_and_hits():
    loop = Loop()
    loop.warm(A, B, C)
    pin(loop, A, B, ttl=10.0)
    pin(loop, C)
    assert listed_pins(loop) == {id_of(A): 10.0, id_of(B): 10.0, id_of(C): None}
    assert expire(loop, 4.0) == 6.0
    loop.submit([A, QUESTION], "hit")
    loop.run()
    assert expire(loop, 10.0) == 10.0
    assert listed_pins(loop) == {id_of(A): 20.0, id_of(C): None}
    assert expire(loop, 20.0) is None
    assert listed_pins(loop) == {id_of(C): None}
    evict_all(loop)
    assert [chunk["id"] for chunk in listed(loop)["chunks"]] == [id_of(C)]


def test_pinning_again_replaces_the_expiry():
    loop = Loop()
    loop.warm(A)
    pin(loop, A)
    pin(loop, A, ttl=3.0, now=2.0)
    assert listed_pins(loop) == {id_of(A): 5.0}
    assert expire(loop, 5.0) is None and listed_pins(loop) == {}


def test_unknown_chunks_and_those_of_others_are_skipped():
    loop = Loop()
    loop.warm(A)
    assert pin(loop, A, tenant="a") == ([], ["unknown"])
    assert pin(loop, B) == ([], ["unknown"])
    assert listed_pins(loop) == {}


def test_a_pin_can_name_the_variant_behind_a_preamble():
    loop = Loop()
    loop.warm(A)
    loop.submit([A, QUESTION], "behind", link="base")
    loop.run()
    assert pin(loop, A, only=(True, None)) == ([id_of(A)], [])
    assert {chunk["preamble"]: chunk["pinned"] for chunk in listed(loop)["chunks"]} == {True: True, False: False}
    pin(loop, A)
    assert all(chunk["pinned"] for chunk in listed(loop)["chunks"])


def test_a_pinned_chunk_can_be_deleted():
    loop = Loop()
    loop.warm(A)
    pin(loop, A)
    assert deleted(loop, id_of(A)) == ([(id_of(A), "deleted")], [])
    assert loop.admission.pins.num_tokens.total() == 0
    loop.run()


def test_a_chunk_being_deleted_is_not_pinned():
    loop = Loop()
    loop.submit([A, QUESTION], "running", max_new_tokens=3)
    while not loop.running_batch.reqs:
        loop.step()
    assert deleted(loop, id_of(A)) == ([(id_of(A), "in use")], [])
    assert pin(loop, A) == ([], ["it is being deleted"])
    loop.run()


def test_pinning_loads_a_chunk_from_the_host():
    loop = Loop(pool_size=40, host_size=80)
    loop.warm(A, B)
    evict_all(loop)
    assert pin(loop, A) == ([id_of(A)], [])
    assert {c["id"]: c["state"] for c in listed(loop)["chunks"]} == {id_of(A): "loading", id_of(B): "host"}
    loop.run()
    loop.pools.take_acknowledgements()
    loop.pools.check()
    assert {c["id"]: c["state"] for c in listed(loop)["chunks"]} == {id_of(A): "resident", id_of(B): "host"}


def test_a_flush_ends_all_pins():
    loop = Loop()
    loop.warm(A)
    pin(loop, A)
    loop.pools.flush()
    assert not len(loop.admission.pins) and expire(loop, 1.0) is None
    loop.run()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("prompt", [[(TEXT, tuple(range(1, 13)) * 3)], [C, D, (TEXT, tuple(range(1, 15)) * 2)]])
def test_a_request_that_needs_the_whole_pool_ends_pins(prompt, overlap):
    loop = Loop(pool_size=43, overlap=overlap)
    loop.warm(A, B)
    pin(loop, A, B)
    req = loop.submit(prompt, "large")
    loop.run()
    assert req.finished() and len(req.output_ids) == 3
    assert len(loop.admission.pins) < 2


def test_a_parent_that_needs_its_pinned_chunk_and_the_whole_pool():
    loop = Loop(pool_size=43)
    loop.warm(A, B)
    pin(loop, A, B)
    req = loop.submit([A, (TEXT, tuple(range(1, 12)) * 3)], "large")
    loop.run()
    assert req.finished() and len(req.output_ids) == 3


def test_pins_hold_while_others_run():
    """Requests that fit one after the other wait for each other instead of ending a pin."""
    loop = Loop(pool_size=40)
    loop.warm(A, B)
    pin(loop, A, B)
    reqs = [loop.submit([(TEXT, (i + 1,) * 18)], f"r{i}", max_new_tokens=4) for i in range(4)]
    loop.run()
    assert all(len(req.output_ids) == 4 for req in reqs) and len(loop.admission.pins) == 2


def test_the_last_running_request_is_not_aborted_for_a_pin():
    """SGLang reserves only part of a long answer on admission, so the request may run short later."""
    loop = Loop(pool_size=40)
    loop.warm(A, B)
    pin(loop, A, B)
    req = loop.submit([(TEXT, (3,) * 26)], "grows", max_new_tokens=13)
    req.sampling_params.max_new_tokens = 2
    loop.step()
    assert loop.running_batch.reqs or loop.last_batch.reqs
    req.sampling_params.max_new_tokens = 13
    loop.run()
    assert len(req.output_ids) == 13 and len(loop.admission.pins) < 2


def test_a_pin_yields_to_the_rest_of_a_chunked_prefill():
    """SGLang takes the next piece whether it fits or not; after the first, requests came and pins were set."""
    loop = Loop(pool_size=40, chunked_prefill_size=8)
    loop.warm(A, B)
    req = loop.submit([(TEXT, (3,) * 34)], "long", max_new_tokens=1)
    loop.step()
    assert loop.chunked_req is req
    assert pin(loop, A, B) == ([id_of(A), id_of(B)], [])
    loop.run()
    assert len(req.output_ids) == 1 and len(loop.admission.pins) == 1


@pytest.mark.parametrize("overlap", [False, True])
def test_a_pin_yields_to_copies_of_chunks(overlap):
    """Set while the chunks were computed, the pin took memory that admission had counted on for their copies."""
    loop = Loop(pool_size=34, chunked_prefill_size=8, overlap=overlap, link="copy")
    loop.warm(A, B)
    req = loop.submit([(CHUNK, (3,) * 14), QUESTION], "copies", max_new_tokens=1)
    loop.step()
    assert pin(loop, A, B) == ([id_of(A), id_of(B)], [])
    loop.run()
    assert len(req.output_ids) == 1 and len(loop.admission.pins) == 1


def test_memory_for_copies_is_not_given_to_later_requests():
    """SGLang does not know what the copies take, and would admit the plain prompt to the same pass."""
    loop = Loop(pool_size=40, link="copy")
    loop.warm(A, B, C)
    loop.new_token_ratio_tracker.current = 0.0
    copies = loop.submit([A, B, C, QUESTION], "copies", max_new_tokens=1)
    plain = loop.submit([(TEXT, (3,) * 20)], "plain", max_new_tokens=1)
    loop.run()
    assert copies.finished() and plain.finished()


def test_memory_for_the_rest_of_a_prompt_is_not_given_to_others():
    loop = Loop(pool_size=40, chunked_prefill_size=8)
    loop.warm(A, B)
    long = loop.submit([(TEXT, (3,) * 32)], "long", max_new_tokens=1)
    loop.step()
    other = loop.submit([A, B, C, QUESTION], "other", max_new_tokens=1)
    loop.visible()
    assert loop.chunked_req is long and other not in loop.admission.holders
    loop.run()
    assert long.finished() and other.finished()


def test_a_pin_holds_while_other_locks_will_be_released():
    loop = Loop(pool_size=40)
    loop.warm(A, B)
    pin(loop, A)
    (copied,) = (chunk.node for chunk in loop.store._cached.values() if chunk.pin is None)
    loop.store.tree.lock(copied)  # as during a copy to the host
    loop.admission.make_room()
    assert listed_pins(loop) == {id_of(A): None}
    loop.store.tree.unlock(copied)
    loop.admission.make_room()
    assert listed_pins(loop) == {}
