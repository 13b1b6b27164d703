"""Lists of chunks: what a tenant sees of the cache, page by page."""

import base64
import random
from array import array

import pytest

from fakes.loop import QUESTION, A, B, C, Loop
from sglang_lazy.chunks import catalog
from sglang_lazy.core.keys import chunk_id, tokens_digest
from sglang_lazy.serving.chunk_lists import arguments_of_ranks, check_id, list_arguments, merged_page
from sglang_lazy.serving.scans import scan

pytestmark = pytest.mark.usefixtures("sglang_context")


DEEP = base64.urlsafe_b64encode(b"[" * 20_000).decode()
"""A cursor that Python's parser of JSON gives up on."""


def id_of(chunk):
    return chunk_id(tokens_digest(array("q", chunk[1])))


def listed(loop, tenant=None, everybody=False, **query):
    return listed_of_ranks([loop], tenant, everybody, **query)


def scan_of_ranks(loops, verb, between=lambda: None, **arguments):
    """The answers of all data-parallel ranks, of a few chunks each.  between: called between two of a rank's."""

    async def ask(starts):
        if starts is not None:
            between()
        return [loop.admission.control.handle(verb, {**arguments, "starts": starts}, 0.0) for loop in loops]

    for rank, loop in enumerate(loops):
        loop.admission.control.dp_rank = rank
    try:
        scan(ask).send(None)  # driven by hand, since event loops cannot nest
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits for something")


def listed_of_ranks(loops, tenant=None, everybody=False, **query):
    wanted = list_arguments(**query)
    asked = {"tenant": tenant, "everybody": everybody, **arguments_of_ranks(wanted)}
    return merged_page(scan_of_ranks(loops, "page", **asked), wanted)


def test_the_fields_of_a_list():
    loop = Loop()
    loop.warm(A, B)
    loop.submit([A, QUESTION], "hit")
    loop.run()
    page = listed(loop, sort="hits")
    assert (page["total"], page["next"]) == (2, None)
    first, second = page["chunks"]
    assert (first["id"], first["hits"], first["tokens"], first["state"]) == (id_of(A), 1, 4, "resident")
    assert (second["id"], second["hits"], second["users"], second["tiers"]) == (id_of(B), 0, 0, ["device"])
    assert first["digest"].startswith(first["id"]) and len(first["digest"]) == 64


def test_the_memory_that_a_draft_takes():
    """None for a chunk that is not computed yet, and no such field without a model that drafts."""
    loop = Loop(chunked_prefill_size=4)
    loop.submit([A, B, QUESTION], "running")
    loop.step()
    assert not any("draft_bytes" in chunk for chunk in listed(loop)["chunks"])
    loop.admission.store.draft_token_bytes = 24
    assert {chunk["id"]: chunk["draft_bytes"] for chunk in listed(loop)["chunks"]} == {id_of(A): 4 * 24, id_of(B): 0}
    loop.run()


def test_users_and_states_while_requests_run():
    loop = Loop(chunked_prefill_size=4)
    loop.submit([A, B, QUESTION], "running", max_new_tokens=3)
    assert listed(loop)["total"] == 0
    loop.step()
    states = {chunk["id"]: chunk["state"] for chunk in listed(loop)["chunks"]}
    assert states == {id_of(A): "resident", id_of(B): "pending"}
    assert [chunk["id"] for chunk in listed(loop, state="pending")["chunks"]] == [id_of(B)]
    while not loop.running_batch.reqs:
        loop.step()
    assert {chunk["users"] for chunk in listed(loop)["chunks"]} == {1}
    loop.run()
    assert {chunk["users"] for chunk in listed(loop)["chunks"]} == {0}


def test_evicted_chunks_leave_the_list():
    loop = Loop(pool_size=13)
    loop.warm(A, B, C)
    listed_ids = {chunk["id"] for chunk in listed(loop)["chunks"]}
    assert id_of(C) in listed_ids and id_of(A) not in listed_ids


def test_chunks_on_the_host():
    loop = Loop(pool_size=14, host_size=60)
    loop.warm(A, B, C)
    states = {chunk["id"]: (chunk["state"], chunk["tiers"]) for chunk in listed(loop)["chunks"]}
    assert states[id_of(A)] == ("host", ["host"]) and states[id_of(C)] == ("resident", ["device", "host"])
    assert {chunk["id"] for chunk in listed(loop, state="host")["chunks"]} == {
        name for name, (state, _) in states.items() if state == "host"
    }


def test_a_tenant_sees_only_its_own_chunks():
    loop = Loop()
    for i, tenant in enumerate([None, "a", "b"]):
        loop.submit([A, QUESTION], f"t{i}", cache_salt=tenant)
    loop.submit([B, QUESTION], "other key", extra_key="b")  # an extra_key is not a salt
    loop.run()
    for tenant in (None, "a", "b"):
        assert [(c["id"], c["cache_salt"]) for c in listed(loop, tenant)["chunks"]] == [(id_of(A), tenant)]
        found = loop.admission.control.handle("get", {"tenant": tenant, "prefix": id_of(B)}, 0.0)
        assert found["chunks"] == []
    assert listed(loop, "c")["total"] == 0
    assert listed(loop, everybody=True)["total"] == 4


@pytest.fixture(params=[catalog.AT_ONCE, 3], ids=["at once", "a few at a time"])
def at_once(request, monkeypatch):
    """How many chunks are examined at a time."""
    monkeypatch.setattr(catalog, "AT_ONCE", request.param)
    monkeypatch.setattr(catalog, "_SHARE", min(catalog._SHARE, request.param - 1))


@pytest.mark.parametrize("sort", ["last_use", "hits", "tokens", "created"])
@pytest.mark.parametrize("order", ["asc", "desc"])
def test_pages_concatenate_to_the_sorted_list(at_once, sort, order):
    rng = random.Random(0)
    loop = Loop(pool_size=400)
    chunks = [(True, (rng.randrange(1, 15), i % 15 + 1, i // 15 + 1, *[3] * rng.randrange(3))) for i in range(25)]
    loop.warm(*chunks)
    for i in range(20):
        loop.submit([rng.choice(chunks), QUESTION], f"again-{i}", max_new_tokens=1)
    loop.run()
    whole = listed(loop, sort=sort, order=order)["chunks"]
    pages, cursor = [], None
    while True:
        page = listed(loop, sort=sort, order=order, limit=5, cursor=cursor)
        assert len(page["chunks"]) == 5
        pages += page["chunks"]
        cursor = page["next"]
        if cursor is None:
            break
    ids = [chunk["id"] for chunk in whole]
    assert [chunk["id"] for chunk in pages] == ids and len(set(ids)) == len(ids) == page["total"]
    if sort != "created":
        values = [chunk[sort] for chunk in whole]
        assert values == sorted(values, reverse=order == "desc")


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize("limit", [1, 2, 3])
def test_pages_over_ranks_lose_no_chunk_at_ties(at_once, order, limit):
    """Each rank numbers its chunks from 0, so chunks of different ranks tie in the sort order."""
    loops = [Loop(), Loop(), Loop()]
    for loop in loops:
        loop.warm(A, B, C)
    pages, cursor = [], None
    while True:
        page = listed_of_ranks(loops, sort="created", order=order, limit=limit, cursor=cursor)
        pages += [(chunk["id"], chunk["dp_rank"]) for chunk in page["chunks"]]
        cursor = page["next"]
        if cursor is None:
            break
    assert page["total"] == 9
    expected = [(id_of(chunk), rank) for chunk in (A, B, C) for rank in range(3)]
    assert pages == (expected if order == "asc" else expected[::-1])


def test_chunks_being_computed_are_listed_once(at_once):
    loop = Loop(chunked_prefill_size=4)
    others = [(True, (i, 9, 9)) for i in range(1, 9)]
    loop.warm(*others)
    loop.submit([A, B, QUESTION], "running", max_new_tokens=3)
    loop.step()
    page = listed(loop, sort="created", order="asc")
    expected = {id_of(chunk): "resident" for chunk in (*others, A)} | {id_of(B): "pending"}
    assert page["total"] == len(page["chunks"]) == len(expected)
    assert {chunk["id"]: chunk["state"] for chunk in page["chunks"]} == expected


def test_an_id_finds_every_variant():
    loop = Loop()
    loop.warm(A, B)
    loop.submit([A, QUESTION], "behind a preamble", link="base")
    loop.run()
    found = loop.admission.control.handle("get", {"tenant": None, "prefix": id_of(A)}, 0.0)["chunks"]
    assert sorted(chunk["preamble"] for chunk in found) == [False, True]
    assert {chunk["id"] for chunk in found} == {id_of(A)}


@pytest.mark.parametrize(
    "query",
    [
        {"sort": "size"},
        {"order": "up"},
        {"limit": 0},
        {"limit": 1001},
        {"state": "cold"},
        {"cursor": "x"},
        {"cursor": DEEP},
    ],
    ids=lambda query: next(iter(query)),
)
def test_bad_queries(query):
    with pytest.raises(ValueError, match=next(iter(query))):
        list_arguments(**query)


@pytest.mark.parametrize("bad", ["", "abc", "g" * 16, "a" * 65, "A" * 16])
def test_bad_ids(bad):
    with pytest.raises(ValueError, match="16 to 64 hexadecimal digits"):
        check_id(bad)


def test_a_flush_empties_the_list():
    loop = Loop()
    loop.warm(A)
    loop.pools.flush()
    assert listed(loop)["total"] == 0


def deleted(loop, *ids, tenant=None):
    answer = loop.admission.control.handle("delete", {"tenant": tenant, "ids": list(ids)}, 0.0)
    return [(one["id"], one["state"]) for one in answer["affected"]], [one["id"] for one in answer["skipped"]]


@pytest.mark.parametrize("host_size", [0, 60])
def test_a_deleted_chunk_is_computed_again(host_size):
    loop = Loop(host_size=host_size)
    loop.warm(A, B)
    free = loop.pools.slots.available_size()
    assert deleted(loop, id_of(A), "0" * 16) == ([(id_of(A), "deleted")], ["0" * 16])
    loop.pools.check()
    assert loop.pools.slots.available_size() == free + 4
    assert [chunk["id"] for chunk in listed(loop)["chunks"]] == [id_of(B)]
    req = loop.submit([A, B, QUESTION], "after")
    loop.run()
    assert loop.counts(req)[1:] == (4, 0b10)


def test_deletion_frees_the_host_copy():
    loop = Loop(pool_size=14, host_size=60)
    loop.warm(A, B, C)
    assert {c["id"]: c["state"] for c in listed(loop)["chunks"]}[id_of(A)] == "host"
    free = loop.tree_cache.token_to_kv_pool_host.available_size()
    assert deleted(loop, id_of(A)) == ([(id_of(A), "deleted")], [])
    assert loop.tree_cache.token_to_kv_pool_host.available_size() == free + 4
    loop.pools.check()


def test_a_deleted_chunk_in_use_is_freed_when_its_user_ends():
    loop = Loop()
    req = loop.submit([A, QUESTION], "running", max_new_tokens=3)
    while not loop.running_batch.reqs:
        loop.step()
    assert deleted(loop, id_of(A)) == ([(id_of(A), "in use")], [])
    assert loop.resident(req) == [True]
    loop.run()
    loop.step()
    assert listed(loop)["total"] == 0 and loop.resident(req) == [False]


def test_deletion_spares_a_prefix_of_another_chunk():
    longer = (True, (*A[1], 7, 7))
    loop = Loop()
    loop.warm(A, longer)
    assert deleted(loop, id_of(A))[0] == [(id_of(A), "deleted")]
    assert [chunk["id"] for chunk in listed(loop)["chunks"]] == [id_of(longer)]
    assert deleted(loop, id_of(longer))[0] == [(id_of(longer), "deleted")]
    assert not [key for _, key, _ in loop.pools.nodes() if getattr(key, "kind", None) == "chunk"]


def test_a_tenant_cannot_delete_anothers_chunks():
    loop = Loop()
    loop.warm(A)
    assert deleted(loop, id_of(A), tenant="a") == ([], [id_of(A)])
    assert listed(loop)["total"] == 1


def test_an_ambiguous_id_is_left_alone():
    """Two digests with the same first digits: the short id names neither chunk, the full digest does."""
    loop = Loop()
    digests = {tuple(A[1]): b"same id." + b"a" * 24, tuple(B[1]): b"same id." + b"b" * 24}
    nodes = {}
    for chunk in (A, B):
        loop.warm(chunk)
    for key, cached in list(loop.store._cached.items()):
        tokens = next(tuple(node.tokens) for node, _, _ in loop.pools.nodes() if node is cached.node)
        nodes[tokens] = cached.node
        loop.store.forget(cached.node)
        forged = key._replace(tokens=digests[tokens])
        other = loop.store.catalog.add(forged, nodes[tokens], 4, 0.0)
        loop.store._cached[forged] = loop.store._by_node[nodes[tokens].id] = other
    shared = b"same id.".hex()
    assert deleted(loop, shared) == ([], [shared])
    assert deleted(loop, shared + "61") == ([(shared + "61", "deleted")], [])
    assert [chunk["digest"] for chunk in listed(loop)["chunks"]] == [digests[tuple(B[1])].hex()]
