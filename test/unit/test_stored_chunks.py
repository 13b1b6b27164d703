"""Chunks in storage: who asks for them, who waits, and which objects are not trusted."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

from fakes.loop import QUESTION, A, B, C, Loop
from fakes.requests import CHUNK, TEXT
from fakes.storage import Storage
from fakes.stored import details, new_server, served, storage_with
from sglang_lazy.chunks.tree import ChunkState
from sglang_lazy.port.cache import chunk_objects
from sglang_lazy.port.cache.backends import TensorBackend
from sglang_lazy.port.cache.calls import Outcome
from sglang_lazy.port.cache.tier_report import StorageReport
from sglang_lazy.port.model.identity import model_identity

pytestmark = pytest.mark.usefixtures("sglang_context")

FETCHING, HOST = ChunkState.FETCHING, ChunkState.HOST


@pytest.fixture
def storage():
    return storage_with(A, B)


def test_chunks_are_stored_and_text_is_not(storage):
    assert len(storage.objects) == 2
    served(new_server(storage), (TEXT, (9, 9, 9)), A, (TEXT, (8, 8)))
    assert len(storage.objects) == 2


def test_a_server_finds_what_another_stored(storage):
    server = new_server(storage)
    req = server.submit([B, A, C, QUESTION], "r")
    assert server.states(req) == [FETCHING, FETCHING, FETCHING], "none is known to be missing yet"
    server.run()
    assert details(req) == (0, 0, 8, 8) and server.counts(req)[2] == 0b011
    assert [tokens for rids in server.log for tokens in rids if "fill" in tokens] == ["\0fill-0"]


def test_requests_wait_for_storage_and_others_do_not(storage):
    server = new_server(storage)
    server.pools.slow = True
    storage.open.clear()
    req = server.submit([A, QUESTION], "waits")
    other = server.submit([(TEXT, (7, 7, 7))], "other", max_new_tokens=1)
    for _ in range(3):
        server.step()
    assert other.finished() and req in server.waiting_queue and not server.fills()
    storage.open.set()
    server.pools.slow = False
    server.run()
    assert details(req) == (0, 0, 4, 4)


def test_an_abort_while_fetching_loses_nothing(storage):
    server = new_server(storage)
    req = server.submit([A, QUESTION], "r")
    server.abort(req)
    server.step()
    assert server.states(req) == [HOST]


@pytest.mark.parametrize("damage", ["truncated", "flipped", "another", "empty", "raises"])
def test_a_wrong_object_is_a_miss(storage, damage):
    """The chunk is computed; `RecordingPools` compares every slot's contents with what it should hold."""
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
    req = served(new_server(storage), A, B)
    assert details(req) == ((0, 0, 0, 0) if damage == "raises" else (0, 0, 4, 4))


@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_a_damaged_file_stays_until_it_is_deleted(tmp_path, caplog, damage):
    """SGLang's file backend replaces none, so every server computes its chunk. The log names it."""
    ranks = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
    traits = {"is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": False}
    config = HiCacheStorageConfig(**ranks, **traits, model_name="model")
    files = storage_with(A, B, storage=HiCacheFile(config, str(tmp_path)))
    path, _ = sorted(tmp_path.iterdir())
    whole = path.read_bytes()
    path.write_bytes(damaged := whole[:-1] if damage == "truncated" else whole[:-1] + bytes([whole[-1] ^ 1]))
    caplog.set_level("WARNING", chunk_objects.__name__)  # an engine in this process may have raised it
    for _ in range(2):
        caplog.clear()
        assert details(served(server := new_server(files), A, B)) == (0, 0, 4, 4)
        server.pools.flush()
        assert path.read_bytes() == damaged and path.name.partition("_")[0] in caplog.text
    path.unlink()
    storage_with(A, B, storage=files)
    assert path.read_bytes() == whole
    assert details(served(new_server(files), A, B)) == (0, 0, 8, 8)


@pytest.fixture
def small_pieces(monkeypatch):
    """Limit objects to one or two tokens."""
    size = Loop(pool_size=60, host_size=60).tree_cache.token_to_kv_pool_host.get_size_per_token()
    monkeypatch.setattr(chunk_objects, "PIECE_BYTES", 2 * size)


def test_large_chunks_are_stored_in_pieces(small_pieces):
    long = (CHUNK, (1, 2, 3, 4, 5))
    storage = storage_with(long)
    assert len(storage.objects) == 3
    assert details(served(new_server(storage), long)) == (0, 0, 5, 5)


@pytest.mark.parametrize("damage", ["missing", "flipped", "two places exchanged", "of another chunk"])
def test_a_wrong_piece_is_a_miss(small_pieces, damage):
    """Whichever piece is wrong, the chunk is computed."""
    long, other = (CHUNK, (1, 2, 3, 4, 5)), (CHUNK, (6, 7, 8, 9, 10))
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
        assert details(served(new_server(storage), long)) == (0, 0, 0, 0)


@pytest.mark.parametrize("other", [{"cache_salt": "a"}, {"extra_key": "a"}, {"link": "base"}])
def test_namespaces_are_kept_apart(storage, other):
    assert details(served(new_server(storage), A, **other))[2] == 0


def test_models_are_kept_apart(storage):
    server = new_server(storage)
    server.pools.connect(storage, b"another model")
    assert details(served(server, A, B))[2] == 0


def test_the_first_request_does_not_wait_for_the_models_identity(storage):
    server, asked = new_server(storage), []
    backend, report = TensorBackend(storage), StorageReport(1)
    server.tree_cache.connect(backend, lambda weights: asked.append(weights) or b"model", report)
    assert asked == [None]
    assert details(served(server, A)) == (0, 0, 4, 4) and asked == [None]


def test_kv_of_all_layers_survives_a_round_trip():
    """In pieces, from slots in one order to slots in another."""
    shape = (2, 3, 40, 2, 4)
    stored, fetched = (SimpleNamespace(kv_buffer=torch.zeros(shape), get_size_per_token=lambda: 192) for _ in range(2))
    stored.kv_buffer.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    before, after = torch.tensor([7, 8, 9, 39, 0, 3, 2]), torch.tensor([30, 4, 5, 6, 0, 39, 12])
    backend = TensorBackend(Storage())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_objects, "PIECE_BYTES", 3 * 192)
        objects = [chunk_objects.ChunkObjects(backend, pool) for pool in (stored, fetched)]
    objects[0].start_write(b"n" * 32, before, None)
    assert objects[0].written.settle(60) and objects[0].written.outcomes() == [Outcome.SUCCEEDED]
    objects[1].start_read(b"n" * 32, after, None)
    assert objects[1].read.settle(60) and objects[1].read.outcomes() == [Outcome.SUCCEEDED]
    expected = torch.zeros(shape)
    for old, new in zip(before, after, strict=True):
        expected[:, :, new] = stored.kv_buffer[:, :, old]
    assert torch.equal(fetched.kv_buffer, expected)


def test_without_room_on_the_host_nothing_is_fetched(storage):
    server = new_server(storage, host_size=3)
    assert details(served(server, A)) == (0, 0, 0, 0)


def test_the_host_gives_up_what_storage_has(storage):
    """With a small host tier, what the host evicts comes back from storage."""
    server = new_server(storage, host_size=8)
    for _ in range(3):
        for chunk in (A, B, C):
            served(server, chunk)
            server.tree_cache.evict(EvictParams(num_tokens=server.tree_cache.evictable_size()))
            server.pools.check()
    req = served(server, A)
    assert details(req)[1] + details(req)[2] == 4


def test_a_flush_waits_for_storage(storage):
    """Host slots being stored must not be reused meanwhile; what was stored is found again."""
    server = new_server(storage)
    server.warm(C)
    server.pools.flush()
    assert len(storage.objects) == 3
    req = served(server, C)
    assert details(req) == (0, 0, 4, 4)


def test_storage_that_cannot_write(storage):
    """Chunks stay on the host; nothing stays held."""
    server = new_server(storage)
    storage.batch_set = None
    server.warm(C)
    server.step()
    assert len(storage.objects) == 2 and all(not node.host_ref_counter for node, _, _ in server.pools.nodes())


def test_a_chunk_whose_beginning_has_no_copy():
    """Its beginning is on the device only, so a fetched rest has no place in the tree: the chunk is computed."""
    long, storage = (CHUNK, (*A[1], 9, 9)), Storage()
    new_server(storage).warm(long)
    server = new_server(storage, write_policy="write_through_selective")
    server.warm(A)
    assert details(served(server, long)) == (0, 0, 0, 0) and not server.store.fetching


@pytest.mark.parametrize("in_turn", [False, True])
def test_the_beginning_of_a_longer_chunk_is_stored_as_well(in_turn):
    """It has a copy before it is known. A later prompt that has it alone finds it."""
    longer = (CHUNK, (*A[1], 9, 9))
    storage = storage_with(longer)
    server = new_server(storage)
    for chunk in (longer, A, A):
        server.submit([chunk, QUESTION], "r", max_new_tokens=1)
        if in_turn:
            server.run()
    server.run()
    server.pools.flush()
    assert len(storage.objects) == 2 and server.pools.cache.report.num_stored == 1
    assert details(served(new_server(storage), A)) == (0, 0, 4, 4)


def test_what_is_fetched_for_nobody_makes_nothing_recent_by_the_clock():
    """Recency is a count, the same on all ranks, also of a beginning under which there is no place for the rest."""
    long, storage = (CHUNK, (*A[1], 9, 9)), Storage()
    new_server(storage).warm(long)
    server = new_server(storage, write_policy="write_through_selective")
    server.warm(A)
    server.abort(server.submit([long, QUESTION], "aborted"))
    server.run()
    assert server.pools.cache.report.num_fetched == 1
    assert all(isinstance(node.last_access_time, int) for node, _, _ in server.pools.nodes())


def runner_of(model, rank=0, cache="bf16", path="here"):
    return SimpleNamespace(
        model=model,
        model_config=SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: {"_name_or_path": path})),
        kv_cache_dtype=cache,
        ps=SimpleNamespace(tp_rank=rank, tp_size=2),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.int32])
def test_any_change_of_what_kv_depends_on_is_another_model(dtype):
    """Down to one bit of one weight: trained tokens, for one, change a few embedding rows and nothing else. Gemma 4
    has weights that are buffers. Others are tables, computed from the config and the server's flags."""
    torch.manual_seed(0)
    shapes = {"embedding": (500, 16), "norm": (16,), "experts": (2, 8, 16), "scale": ()}
    weights = {name: (30 * torch.randn(shape)).to(dtype) for name, shape in shapes.items()}

    def identity(changed=None, place=None, table_size=4, **more):
        tensors = {name: weight.clone() for name, weight in weights.items()}
        if changed is not None:
            bits = tensors[changed].view(-1).view(torch.uint8)
            bits[place * dtype.itemsize] ^= 1
        model = torch.nn.Module()
        model.register_buffer("scale", tensors.pop("scale"))
        model.register_buffer("table", torch.zeros(table_size), persistent=False)
        for name, weight in tensors.items():
            model.register_parameter(name, torch.nn.Parameter(weight, requires_grad=False))
        return model_identity(runner_of(model, **more))

    assert identity() == identity(path="elsewhere") == identity(table_size=8)
    places = [(name, place) for name, weight in weights.items() for place in range(0, weight.numel(), 7)]
    others = [identity(*changed) for changed in places] + [identity(rank=1), identity(cache="fp8")]
    assert len({identity(), *others}) == 1 + len(others)


def test_scales_of_bitsandbytes_are_part_of_the_identity():
    """Its scales, and the scales of these, are attributes of the weights instead of parameters."""

    def identity(**changed):
        state = {"absmax": torch.ones(4), "nested_absmax": torch.ones(2), "nested_offset": 0.5, "quant_type": "nf4"}
        state = {**state, **changed}
        model = torch.nn.Module()
        model.weight = torch.nn.Parameter(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)
        quantised = SimpleNamespace(as_dict=lambda: state)
        model.weight.bnb_quant_state = {0: quantised, 1: changed.get("int8", torch.ones(3))}
        return model_identity(runner_of(model))

    others = [
        {"absmax": torch.tensor([1.0, 1, 1, 2])},
        {"nested_absmax": torch.tensor([2.0, 1])},
        {"nested_offset": 0.25},
        {"int8": torch.tensor([1.0, 2, 1])},
    ]
    assert identity() == identity()
    assert len({identity(), *(identity(**changed) for changed in others)}) == 5
