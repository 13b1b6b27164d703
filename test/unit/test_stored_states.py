"""States of recurrent layers in storage: a chunk is found with the state at its end, or not at all."""

import dataclasses

import pytest
import torch
from test_stored_chunks import runner_of

from fakes.chunk_server import A, B, C, D, Server, chunk_of, storage_with
from fakes.host_tree import LAYOUT
from fakes.storage import Storage
from sglang_lazy.port.cache.storage import identity_of
from sglang_lazy.storage import chunk_objects

pytestmark = pytest.mark.usefixtures("sglang_context")

FOUND, LACKING = "storage", None
LONG, OTHER = (1, 2, 3, 4, 5), (6, 7, 8, 9, 10)


@pytest.fixture(autouse=True)
def with_states(monkeypatch):
    monkeypatch.setattr(Server, "num_states", 60)


@pytest.fixture
def small_pieces(monkeypatch):
    """Objects of two tokens. A state, of 16 + 48 + 8 bytes in two layers, takes two."""
    monkeypatch.setattr(chunk_objects, "PIECE_BYTES", 64)


def test_large_states_are_stored_in_pieces(small_pieces):
    storage = storage_with(LONG)
    sizes = sorted(len(stored) - chunk_objects._HEADER.size for stored in storage.objects.values())
    assert sizes == [8, 32, 64, 64, 64]
    assert Server(storage).served(LONG) == [FOUND]


@pytest.mark.parametrize("damage", ["missing", "flipped", "truncated", "of another chunk"])
def test_a_wrong_piece_of_either_is_a_miss(small_pieces, damage):
    """The chunk is computed, and all of its slots are free again."""
    for place in range(5):
        storage = storage_with(LONG)
        mine = sorted(storage.objects)
        storage_with(OTHER, storage=storage)
        if damage == "missing":
            del storage.objects[mine[place]]
        elif damage == "flipped":
            storage.objects[mine[place]][-1] ^= 1
        elif damage == "truncated":
            storage.objects[mine[place]] = storage.objects[mine[place]][:-1]
        else:
            (its,) = [key for key in storage.objects if key not in mine and key.endswith(mine[place][-2:])]
            storage.objects[mine[place]] = storage.objects[its]
        server = Server(storage)
        assert server.served(LONG, OTHER) == [LACKING, FOUND]
        assert server.tree.host.states.memory.slots.num_free == 120 - 2


def test_layouts_are_kept_apart():
    """Types of states come from flags and the environment, which neither weights nor the model's config know."""
    runners = [runner_of(torch.nn.Linear(2, 2))]
    layouts = [None, LAYOUT, dataclasses.replace(LAYOUT, conv_dtype=torch.bfloat16)]
    assert len({identity_of(runners, None, layout) for layout in layouts}) == 3


def test_storage_holds_at_most_half_of_the_hosts_states():
    """However short the chunks are: while it reads, and while it writes."""
    storage = storage_with(A, B, C)
    storage.open.clear()
    server = Server(storage, num_states=2)
    server.slow = True
    assert server.tree.host.states.memory.slots.size == 4
    assert server.states(server.ask(A, B, C)) == ["on its way"] * 2 + [LACKING]
    server.flush()
    storage.open.set()
    empty = Storage()
    empty.open.clear()
    server = Server(empty, num_states=2)
    server.slow = True
    for chunk in (A, B, C):
        server.compute([chunk_of(chunk)])
        server.settle()
    assert (server.num_protected, server.numbers()["unstored"]) == (8, 1)
    empty.open.set()


def test_a_chunk_is_stored_once_the_host_has_its_state():
    """Its KV is there first, as the beginning of a longer chunk's."""
    server = Server(storage := Storage())
    longer = (*A, 9, 9)
    server.warm(longer)
    assert len(storage.objects) == 2
    server.warm(A)
    assert len(storage.objects) == 4
    assert Server(storage).served(A, longer) == [FOUND, FOUND]


def test_the_state_of_a_beginning_is_fetched_to_its_kv():
    """Which the host has of a longer chunk, without a state that ends there."""
    longer = (*A, 9, 9)
    server = Server(storage_with(A, longer))
    assert server.served(longer) == [FOUND]
    server.evict()
    assert server.served(A) == [FOUND]
    server.evict()
    assert server.served(D, A, longer) == [LACKING, "host", "host"]


def test_a_chunk_is_not_stored_while_the_host_has_no_room_for_its_state():
    """Though it has for the KV."""
    server = Server(storage := Storage(), num_states=2, host_size=60)
    server.warm(A, B)
    nodes = [server.chunks.find(chunk_of(tokens)) for tokens in (A, B)]
    for node in nodes:
        server.tree.host.protect(node)
    server.warm(C)
    node = server.chunks.find(chunk_of(C))
    assert node.host is not None and node.host.state is None
    assert len(storage.objects) == 4 and server.numbers()["unstored"] == 0
    for node in nodes:
        server.tree.host.release(node)
    server.warm(C)
    assert len(storage.objects) == 6
    assert Server(storage).served(C) == [FOUND]
