"""Chunks in storage: who asks for them, who waits, and which objects are not trusted."""

from array import array
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

from fakes.chunk_server import A, B, C, Server, chunk_of, storage_with
from fakes.storage import Storage
from sglang_lazy.cache.host_memory import HostMemory
from sglang_lazy.port.cache import storage as identities
from sglang_lazy.port.cache.storage import TensorBackend
from sglang_lazy.storage import chunk_objects
from sglang_lazy.storage.calls import Outcome
from sglang_lazy.storage.chunk_objects import ChunkObjects

pytestmark = pytest.mark.usefixtures("sglang_context")

FOUND, LACKING = "storage", None


@pytest.fixture
def storage():
    return storage_with(A, B)


def test_chunks_are_stored_and_text_is_not(storage):
    assert len(storage.objects) == 2
    server = Server(storage)
    server.tree.host.back_up([server.tree.compute([9, 9, 9], "leading text")])
    server.served(A)
    server.settle()
    assert len(storage.objects) == 2


def test_a_server_finds_what_another_stored(storage):
    server = Server(storage)
    prompt = server.ask(B, A, C)
    assert server.states(prompt) == ["on its way"] * 3, "none is known to be missing yet"
    assert server.answer(prompt) == [FOUND, FOUND, LACKING]
    server.flush()
    assert server.numbers() == {"stored": 1, "unstored": 0, "fetched": 2, "missed": 1, "late": 0}
    assert len(storage.objects) == 3, "what was fetched is not stored again"


def test_a_chunk_is_fetched_once(storage):
    server = Server(storage)
    storage.open.clear()
    server.slow = True
    first, second = server.ask(A), server.ask(A)
    storage.open.set()
    server.slow = False
    assert server.answer(first) == [FOUND] and server.answer(second) == ["device"]
    assert server.numbers()["fetched"] == 1


def test_storage_delays_nothing_else(storage):
    server = Server(storage)
    server.slow = True
    storage.open.clear()
    prompt = server.ask(A)
    other = server.tree.compute([7, 7, 7], "leading text")
    for _ in range(3):
        server.step()
    assert server.states(prompt) == ["on its way"] and other.slots is not None
    storage.open.set()
    server.slow = False
    assert server.answer(prompt) == [FOUND]


def test_a_fetch_for_nobody_loses_nothing(storage):
    server = Server(storage)
    prompt = server.ask(A)
    server.step()
    assert server.states(prompt) == ["host"] and not server.storage.objects.read


@pytest.mark.parametrize("damage", ["truncated", "flipped", "another", "empty", "raises"])
def test_a_wrong_object_is_a_miss(storage, damage):
    """The chunk is computed; `check` compares every slot's contents with what it should hold."""
    (name, data), (_, other) = storage.objects.items()
    if damage == "truncated":
        storage.objects[name] = data[:-1]
    elif damage == "flipped":
        data[np.random.default_rng(0).integers(len(data))] ^= 1
    elif damage == "another":
        storage.objects[name] = other
    elif damage == "empty":
        storage.objects[name] = data[:0]
    else:
        storage.exists = None
    found = Server(storage).served(A, B)
    assert found == [LACKING, LACKING if damage == "raises" else FOUND]


def files_in(folder):
    ranks = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
    traits = {"is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": False}
    return HiCacheFile(HiCacheStorageConfig(**ranks, **traits, model_name="model"), str(folder))


@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_a_damaged_file_stays_until_it_is_deleted(tmp_path, caplog, damage):
    """SGLang's file backend replaces none, so every server computes its chunk. The log names it."""
    files = storage_with(A, B, storage=files_in(tmp_path))
    path, _ = sorted(tmp_path.iterdir())
    whole = path.read_bytes()
    path.write_bytes(damaged := whole[:-1] if damage == "truncated" else whole[:-1] + bytes([whole[-1] ^ 1]))
    caplog.set_level("WARNING", chunk_objects.__name__)  # an engine in this process may have raised it
    for _ in range(2):
        caplog.clear()
        assert sorted((server := Server(files)).served(A, B), key=str) == [LACKING, FOUND]
        server.flush()
        assert path.read_bytes() == damaged and path.name.partition("_")[0] in caplog.text
    path.unlink()
    storage_with(A, B, storage=files)
    assert path.read_bytes() == whole
    assert Server(files).served(A, B) == [FOUND, FOUND]


def test_objects_of_another_format_are_never_found(tmp_path, caplog, monkeypatch):
    """They are missing, not damaged, and not in the way of new ones."""
    files = files_in(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(chunk_objects, "FORMAT", "lazy-kv1")
        storage_with(A, storage=files)
    earlier = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    caplog.set_level("WARNING", chunk_objects.__name__)
    assert len(earlier) == 1 and Server(files).served(A) == [LACKING] and "damaged" not in caplog.text
    storage_with(A, storage=files)
    assert Server(files).served(A) == [FOUND] and len([*tmp_path.iterdir()]) == 2
    assert {name: (tmp_path / name).read_bytes() for name in earlier} == earlier


@pytest.fixture
def small_pieces(monkeypatch):
    """Limit objects to one or two tokens."""
    monkeypatch.setattr(chunk_objects, "PIECE_BYTES", 2 * Server(Storage()).tree.memory.token_bytes)


def test_large_chunks_are_stored_in_pieces(small_pieces):
    storage = storage_with(long := (1, 2, 3, 4, 5))
    assert len(storage.objects) == 3
    assert Server(storage).served(long) == [FOUND]


@pytest.mark.parametrize("damage", ["missing", "flipped", "two places exchanged", "of another chunk"])
def test_a_wrong_piece_is_a_miss(small_pieces, damage):
    """Whichever piece is wrong, the chunk is computed."""
    long, other = (1, 2, 3, 4, 5), (6, 7, 8, 9, 10)
    for place in range(3):
        storage = storage_with(long)
        mine = sorted(storage.objects)
        storage_with(other, storage=storage)
        if damage == "missing":
            del storage.objects[mine[place]]
        elif damage == "flipped":
            storage.objects[mine[place]][-1] ^= 1
        elif damage == "two places exchanged":
            a, b = mine[place], mine[(place + 1) % 3]
            storage.objects[a], storage.objects[b] = storage.objects[b], storage.objects[a]
        else:
            (its,) = [key for key in storage.objects if key not in mine and key.endswith(mine[place][-2:])]
            storage.objects[mine[place]] = storage.objects[its]
        assert Server(storage).served(long) == [LACKING]


@pytest.mark.parametrize(
    "other", [{"cache_salt": "a"}, {"extra_key": "a"}, {"variant": b"a"}, {"kind": "whole"}], ids=str
)
def test_namespaces_are_kept_apart(storage, other):
    assert Server(storage).served(A, **other) == [LACKING]


def test_models_are_kept_apart(storage):
    assert Server(storage, model=b"another model").served(A, B) == [LACKING, LACKING]


def stored_under(adapter, storage=None, **weights):
    """The names of the objects stored by a server that served a chunk under this adapter."""
    server = Server(storage := storage or Storage(), **{"x": b"adapter x", "y": b"adapter y", **weights})
    server.served(A, adapter=adapter, extra_key=adapter)
    server.flush()
    return set(storage.objects)


def test_chunks_are_named_by_the_adapters_weights():
    """Not by its id: a reloaded adapter gets another one, and a retrained adapter may keep its old one."""
    first = stored_under("x", x=b"one")
    assert len(first) == 1 and stored_under("y", y=b"one") == first
    others = [stored_under("x", x=b"two"), stored_under(None), stored_under("y")]
    assert len(set.union(first, *others)) == 4


def test_nothing_is_stored_for_an_adapter_that_is_gone():
    assert not stored_under("x", x=None)


def test_the_first_request_does_not_wait_for_the_models_identity(storage):
    server = Server(storage)
    assert server.identified == [None]
    assert server.served(A) == [FOUND] and server.identified == [None]


def test_kv_of_all_layers_survives_a_round_trip():
    """In pieces, from slots in one order to slots in another; buffers have rows of different sizes."""
    dice = torch.Generator().manual_seed(0)
    layers = [[torch.zeros(1, 2, 4), torch.zeros(1, 2, 3)], [torch.zeros(1, 5)], [torch.zeros(1, 2, 4)] * 2]
    stored, fetched = HostMemory(layers, 40), HostMemory(layers, 40)
    for rows in stored.groups:
        rows.host.random_(0, 256, generator=dice)
    for rows in fetched.groups:
        rows.host.zero_()
    before, after = torch.tensor([7, 8, 9, 39, 0, 3, 2]), torch.tensor([30, 4, 5, 6, 0, 39, 12])
    backend = TensorBackend(Storage())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_objects, "PIECE_BYTES", 3 * stored.token_bytes)
        writer, reader = ChunkObjects(backend, stored), ChunkObjects(backend, fetched)
    writer.start_write(b"n" * 32, before, None, None)
    assert writer.written.settle(60) and writer.written.outcomes() == [Outcome.SUCCEEDED]
    reader.start_read(b"n" * 32, after, None, None)
    assert reader.read.settle(60) and reader.read.outcomes() == [Outcome.SUCCEEDED]
    assert [len(rows.host) for rows in stored.groups] == [3, 1, 1]
    for source, target in zip(stored.groups, fetched.groups, strict=True):
        expected = torch.zeros_like(target.host)
        expected[:, after] = source.host[:, before]
        assert torch.equal(target.host, expected)


def test_without_room_on_the_host_nothing_is_fetched(storage):
    assert Server(storage, host_size=3).served(A) == [LACKING]


def test_the_host_gives_up_what_storage_has(storage):
    """With a small host tier, what the host evicts comes back from storage."""
    server = Server(storage, host_size=8)
    for _ in range(3):
        for chunk in (A, B, C):
            server.served(chunk)
            server.step()
            server.evict()
            server.check()
    assert server.served(A)[0] in ("host", "storage")


def test_a_flush_waits_for_storage(storage):
    """Host slots being stored must not be reused meanwhile; what was stored is found again."""
    server = Server(storage)
    server.slow = True
    server.served(C)
    server.flush()
    assert len(storage.objects) == 3 and not server.storage.objects.written
    server.slow = False
    assert server.served(C) == [FOUND]


def test_storage_that_cannot_write(storage):
    """Chunks stay on the host; nothing stays held."""
    server = Server(storage)
    storage.batch_set = None
    server.warm(C)
    assert len(storage.objects) == 2 and not server.num_protected


def test_a_chunk_whose_beginning_has_no_copy():
    """Its beginning is on the device only, so a fetched rest has no place in the tree: the chunk is computed."""
    storage = storage_with(long := (*A, 9, 9))
    server = Server(storage, min_hits=2)
    server.warm(A)
    assert server.served(long) == [LACKING] and not server.storage.objects.read


@pytest.mark.parametrize("at_once", [False, True])
def test_the_beginning_of_a_longer_chunk_is_stored_as_well(at_once):
    """It has a copy before it is known. A later prompt that has it alone finds it."""
    storage = storage_with(longer := (*A, 9, 9))
    server = Server(storage)
    for prompt in [server.ask(longer), server.ask(A), server.ask(A)] if at_once else [(longer,), (A,), (A,)]:
        server.answer(prompt) if at_once else server.served(*prompt)
    server.flush()
    assert len(storage.objects) == 2 and server.numbers()["stored"] == 1
    assert Server(storage).served(A) == [FOUND]


def test_a_copy_is_protected_while_it_is_stored(storage):
    """Also when its node is split, and however much the host needs the room."""
    server = Server(storage, host_size=8)
    server.slow = True
    storage.open.clear()
    server.compute([chunk_of(C)])
    server.settle()
    server.evict()
    server.tree.end_of(array("q", [*C][:2]), chunk_of(C).key.namespace)
    server.tree.host.evict(8)
    assert server.states(server.ask(C)) == ["host"]
    storage.open.set()
    server.slow = False
    server.step()
    assert not server.num_protected and Server(storage).served(C) == [FOUND]


def runner_of(model, cache="bf16", path="here"):
    return SimpleNamespace(
        model=model,
        model_config=SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: {"_name_or_path": path})),
        kv_cache_dtype=cache,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.int32])
def test_any_change_of_what_kv_depends_on_is_another_model(dtype):
    """Down to one bit of one weight: trained tokens, for one, change a few embedding rows and nothing else. Gemma 4
    has weights that are buffers. Others are tables, computed from the config and the server's flags."""
    torch.manual_seed(0)
    shapes = {"embedding": (500, 16), "norm": (16,), "experts": (2, 8, 16), "scale": ()}
    weights = {name: (30 * torch.randn(shape)).to(dtype) for name, shape in shapes.items()}

    def identity(changed=None, place=None, table_size=4, rank=0, **more):
        tensors = {name: weight.clone() for name, weight in weights.items()}
        if changed is not None:
            bits = tensors[changed].view(-1).view(torch.uint8)
            bits[place * dtype.itemsize] ^= 1
        model = torch.nn.Module()
        model.register_buffer("scale", tensors.pop("scale"))
        model.register_buffer("table", torch.zeros(table_size), persistent=False)
        for name, weight in tensors.items():
            model.register_parameter(name, torch.nn.Parameter(weight, requires_grad=False))
        with mock.patch.object(identities, "tp_rank", lambda: rank):
            return identities.model_identity(runner_of(model, **more))

    assert identity() == identity(path="elsewhere") == identity(table_size=8)
    places = [(name, place) for name, weight in weights.items() for place in range(0, weight.numel(), 7)]
    others = [identity(*changed) for changed in places] + [identity(rank=1), identity(cache="fp8")]
    assert len({identity(), *others}) == 1 + len(others)


def test_the_draft_is_part_of_the_identity():
    """Stored chunks hold its KV."""
    layers = [torch.nn.Linear(2, 2) for _ in range(3)]
    runners = [runner_of(layer) for layer in layers]
    drafts = [[], [runners[1]], [runners[2]]]
    assert len({identities.identity_of([runners[0], *draft], None) for draft in drafts}) == len(drafts)
    assert identities.identity_of(runners[:2], None) == identities.identity_of(runners[:2], None)


def test_scales_of_bitsandbytes_are_part_of_the_identity():
    """Its scales, and the scales of these, are attributes of the weights instead of parameters."""

    def identity(**changed):
        state = {"absmax": torch.ones(4), "nested_absmax": torch.ones(2), "nested_offset": 0.5, "quant_type": "nf4"}
        state = {**state, **changed}
        model = torch.nn.Module()
        model.weight = torch.nn.Parameter(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)
        quantised = SimpleNamespace(as_dict=lambda: state)
        model.weight.bnb_quant_state = {0: quantised, 1: changed.get("int8", torch.ones(3))}
        return identities.model_identity(runner_of(model))

    others = [
        {"absmax": torch.tensor([1.0, 1, 1, 2])},
        {"nested_absmax": torch.tensor([2.0, 1])},
        {"nested_offset": 0.25},
        {"int8": torch.tensor([1.0, 2, 1])},
    ]
    assert identity() == identity()
    assert len({identity(), *(identity(**changed) for changed in others)}) == 5
