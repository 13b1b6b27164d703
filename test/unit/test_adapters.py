"""LoRA adapters: each has chunks of its own, a fill runs under its parent's adapter, and unloading drops both."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from test_chunk_lists import id_of, listed
from test_pins import pin

from fakes.loop import QUESTION, A, B, C, Loop
from fakes.requests import CHUNK, TEXT
from fakes.storage import Storage
from fakes.stored import details, new_server
from sglang_lazy.port.cache.storage import adapter_identity, identity_of, model_identity
from sglang_lazy.serving.chunk_lists import with_adapter_names

pytestmark = pytest.mark.usefixtures("sglang_context")
both_loops = pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])

ADAPTERS = (None, "x", "y")


@both_loops
@pytest.mark.parametrize("link", ["block", "base", "base:preamble=lead", "query:ratio=0.4", "blend:ratio=0.4", "copy"])
def test_a_document_under_each_adapter_at_once(overlap, link):
    """No KV computed under one adapter is read under another, text and probes included; the pools check it."""
    loop = Loop(pool_size=200, overlap=overlap, link=link)
    prompt = [(TEXT, (9, 8)), A, B, QUESTION]
    for hits in (0, 0b11):
        reqs = {adapter: loop.submit(prompt, f"{adapter} {hits}", lora_id=adapter) for adapter in ADAPTERS}
        loop.run()
        assert [loop.counts(req)[2] for req in reqs.values()] == [hits] * 3
    assert len(listed(loop)["chunks"]) == 6


def test_parents_of_one_adapter_share_a_fill():
    loop = Loop()
    for i in range(2):
        loop.submit([A, QUESTION], f"x{i}", lora_id="x")
    loop.submit([A, QUESTION], "y", lora_id="y")
    fills = [req for req in loop.visible() if "fill" in req.rid]
    assert [fill.lora_id for fill in fills] == ["x", "y"]


@pytest.mark.parametrize("key", [None, "k"])
def test_a_clients_key_cannot_stand_for_an_adapter(key):
    """SGLang appends the adapter's id to the client's key, so a client could send the concatenation itself."""
    loop = Loop()
    loop.submit([A, (TEXT, (7, 7)), QUESTION], "honest", extra_key=key, lora_id="x")
    loop.run()
    forged = loop.submit([A, (TEXT, (7, 7)), QUESTION], "forged", extra_key=f"{key or ''}x")
    loop.run()
    assert loop.counts(forged)[0] == 0


# A limit on the adapters per batch


@both_loops
def test_batches_respect_the_limit_on_adapters(overlap):
    """A fill needs its parent's adapter. Neither blocks the other, whatever else is running."""
    loop = Loop(overlap=overlap, chunked_prefill_size=6, scheduler={"max_adapters": 1})
    reqs = [
        loop.submit([chunk, B, QUESTION], f"{adapter} {i}", lora_id=adapter, max_new_tokens=4)
        for i, chunk in enumerate((A, C))
        for adapter in ("x", None, "y")
    ]
    of = {req.rid: req.lora_id for req in reqs}
    loop.run()
    assert all(len(req.output_ids) == 4 for req in reqs)
    for batch in loop.log:
        assert len({of[rid] for rid in batch if rid in of}) <= 1


def test_an_adapter_that_becomes_ready_between_a_fill_and_its_parent():
    """SGLang may load adapters while passes run. It skips the fill as not ready, then meets the parent, which is."""
    loop = Loop()
    loop.loading.add("x")
    parent = loop.submit([A, QUESTION], "parent", lora_id="x")
    other = loop.submit([B, QUESTION], "other")
    loop.step()
    assert "parent" not in loop.log[0] and "other" in loop.log[0]
    loop.run()
    assert parent.finished() and other.finished()


def test_a_fill_inherits_its_parents_waiting_time():
    """SGLang favours adapters whose requests have waited long, so a fill's wait starts with its parent's."""
    loop = Loop()
    parent = loop.submit([A, QUESTION], "parent", lora_id="x")
    parent.time_stats.wait_queue_entry_time = 12.5
    fill, _ = loop.visible()
    assert fill.time_stats.wait_queue_entry_time == 12.5


# Unloading


def test_unloading_an_adapter_drops_its_chunks():
    """Its pins end and its memory is freed; nobody else loses anything."""
    loop = Loop()
    for adapter in ADAPTERS:
        loop.submit([A, QUESTION], "r", lora_id=adapter, max_new_tokens=1)
        loop.run()
    pin(loop, A)
    loop.unload("x")
    loop.pools.check()
    assert [(chunk["adapter"], chunk["pinned"]) for chunk in listed(loop, order="asc")["chunks"]] == [
        (None, True),
        ("y", True),
    ]
    loop.step()
    for adapter in (None, "y"):
        loop.unload(adapter or "base")
    req = loop.submit([A, QUESTION], "again")
    loop.run()
    assert loop.counts(req)[2] == 1


@both_loops
def test_unloading_ends_a_fill_that_outlived_its_parent(overlap):
    """Its next pieces would need the adapter that is unloaded meanwhile."""
    loop = Loop(pool_size=40, overlap=overlap, chunked_prefill_size=3)
    parent = loop.submit([A, QUESTION], "parent", lora_id="x")
    loop.step()
    fill = loop.chunked_req
    assert fill is not parent
    loop.abort(parent)
    loop.unload("x")
    assert loop.unloaded == []
    loop.run()
    loop.step()
    assert loop.unloaded == ["x"] and loop.log == [[fill.rid]] and listed(loop)["chunks"] == []
    loop.tree_cache.evict(EvictParams(num_tokens=40))
    assert loop.pools.slots.available_size() == 40


@both_loops
def test_unloading_waits_for_what_an_aborted_request_still_computes(overlap):
    """A client that left has no answer to wait for, but its request ends only with the next step."""
    loop = Loop(overlap=overlap)
    req = loop.submit([A, QUESTION], "left", lora_id="x", max_new_tokens=100)
    for _ in range(4):
        loop.step()
    loop.unload("x")
    loop.step()
    assert loop.unloaded == [] and not req.finished()
    req.to_finish = FINISH_ABORT()
    loop.run()
    loop.step()
    assert loop.unloaded == ["x"] and listed(loop)["chunks"] == []


def test_unloading_leaves_other_adapters_fills_alone():
    loop = Loop(chunked_prefill_size=3)
    parent = loop.submit([A, QUESTION], "parent", lora_id="x")
    loop.step()
    loop.unload("y")
    assert loop.unloaded == ["y"]
    loop.run()
    assert len(parent.output_ids) == 3


# Lists and pins


def test_lists_show_adapters_by_name():
    loop = Loop()
    for adapter in ADAPTERS:
        loop.submit([A, QUESTION], "r", lora_id=adapter, cache_salt="s")
        loop.run()
    chunks = listed(loop, "s", order="asc")["chunks"]
    shown = with_adapter_names(chunks, {"translator": "x"})
    assert [chunk["lora_path"] for chunk in shown] == [None, "translator", "y"]
    assert all("adapter" not in chunk for chunk in shown) and listed(loop)["total"] == 0


def test_a_pin_can_name_one_adapter():
    loop = Loop()
    for adapter in ADAPTERS:
        loop.submit([A, QUESTION], "r", lora_id=adapter)
        loop.run()
    assert pin(loop, A, only=(False, "x")) == ([id_of(A)], [])
    assert {chunk["adapter"]: chunk["pinned"] for chunk in listed(loop)["chunks"]} == {
        None: False,
        "x": True,
        "y": False,
    }


# Storage


def stored_under(adapter, storage=None, **weights):
    """The names of the objects stored by a server that served a chunk under this adapter."""
    storage = storage or Storage()
    server = Loop(60, host_size=120)
    server.pools.connect(storage, **weights)
    server.submit([A, QUESTION], "r", lora_id=adapter, max_new_tokens=1)
    server.run()
    server.pools.flush()
    return set(storage.objects)


def test_stored_chunks_are_named_by_the_adapters_weights():
    """Not by its id: a reloaded adapter gets another one, and a retrained adapter may keep its old one."""
    first = stored_under("x", x=b"one")
    assert len(first) == 1 and stored_under("y", y=b"one") == first
    others = [stored_under("x", x=b"two"), stored_under(None), stored_under("y")]
    assert len(set.union(first, *others)) == 4


def test_stored_chunks_are_found_under_the_adapter():
    storage = Storage()
    stored_under("x", storage)
    server = new_server(storage)
    found = {adapter: server.submit([A, QUESTION], "r", lora_id=adapter) for adapter in ADAPTERS}
    server.run()
    assert {adapter: details(req)[2] for adapter, req in found.items()} == {None: 0, "x": 4, "y": 0}


def test_nothing_is_stored_for_an_adapter_that_is_gone():
    assert not stored_under("x", x=None)


def adapter(**changes):
    weights = {"q_proj.lora_A": torch.arange(6.0).view(2, 3), "q_proj.lora_B": torch.ones(4, 2)}
    weights |= changes.pop("weights", {})
    values = {"r": 2, "scaling": 2.0, "embeddings": {}, **changes}
    return SimpleNamespace(
        config=SimpleNamespace(r=values["r"]),
        scaling=values["scaling"],
        layers=[SimpleNamespace(weights=weights)],
        embedding_layers=values["embeddings"],
    )


def test_any_change_to_an_adapter_changes_its_identity():
    others = [
        adapter(weights={"q_proj.lora_B": torch.ones(4, 2).fill_diagonal_(1.5)}),
        adapter(weights={"k_proj.lora_A": torch.ones(2, 3)}),
        adapter(scaling=1.0),
        adapter(embeddings={"lm_head.lora_A": torch.ones(2, 3)}),
    ]
    assert adapter_identity(adapter()) == adapter_identity(adapter())
    assert len({adapter_identity(one) for one in (adapter(), *others)}) == 5
    runner = SimpleNamespace(lora_manager=SimpleNamespace(loras={"id": adapter()}))
    assert identity_of([runner], "id") == adapter_identity(adapter()) and identity_of([runner], "other") is None


def test_a_server_with_adapters_finds_what_one_without_has_stored():
    """With adapters, wrapper layers sit between the model and the layers that hold its weights; names must not show
    it."""

    def runner(model):
        config = SimpleNamespace(hf_config=SimpleNamespace(to_dict=dict))
        return SimpleNamespace(
            model=model, model_config=config, kv_cache_dtype="bf16", ps=SimpleNamespace(tp_rank=0, tp_size=1)
        )

    plain, wrapped = torch.nn.Module(), torch.nn.Module()
    plain.proj, wrapped.proj = torch.nn.Linear(3, 3), torch.nn.Module()
    wrapped.proj.base_layer, wrapped.proj.weight = plain.proj, plain.proj.weight  # SGLang aliases it, too
    assert model_identity(runner(plain)) == model_identity(runner(wrapped))


def test_a_prefix_of_another_adapters_chunk_is_not_found():
    loop = Loop()
    loop.submit([(CHUNK, (1, 2, 3, 4, 5, 6)), QUESTION], "long", lora_id="x")
    loop.run()
    req = loop.submit([A, QUESTION], "short", lora_id="y")
    loop.run()
    assert loop.counts(req)[0] == 0
