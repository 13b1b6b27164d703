"""Storage backends are created as SGLang's flags say."""

import json
from array import array
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile
from sglang.srt.server_args import ServerArgs

from fakes.chunk_server import chunk_of
from fakes.host_tree import Device, Tree
from sglang_lazy.chunks.store import ChunkStore
from sglang_lazy.port.cache import storage as connect
from sglang_lazy.port.cache.storage import AddressBackend, FileBackend, TensorBackend
from sglang_lazy.storage.chunk_storage import Patience

pytestmark = pytest.mark.usefixtures("sglang_context")

LAYER = torch.nn.Linear(2, 2)


@pytest.fixture
def connected(monkeypatch):
    """A function that connects a backend to a tree with a host tier; returns its storage."""
    monkeypatch.setattr(connect, "dp_rank", lambda: 0)

    def connect_to(**flags):
        tree = Tree(20, 40)
        store = ChunkStore(tree, Device(tree))
        runner = SimpleNamespace(
            server_args=ServerArgs(model_path="dummy", **flags),
            model=LAYER,
            model_config=SimpleNamespace(hf_config=SimpleNamespace(to_dict=dict)),
            kv_cache_dtype="bf16",
        )
        storage = connect.connect_storage(store, tree.host, lambda numbers: numbers, [runner], has_metrics=False)
        tree.host.watchers.append(storage)
        return tree, store, storage

    return connect_to


def test_files_in_the_folder_that_flags_name(connected, tmp_path):
    """A second server finds there what the first has stored."""
    flags = {"hicache_storage_backend": "file", "file_storage_path": str(tmp_path / "new")}
    chunk = chunk_of([1, 2, 3])
    tree, store, storage = connected(**flags)
    assert isinstance(storage.objects.backend, FileBackend) and storage.name == "HiCacheFile"
    store.adopt(chunk, node := tree.compute(chunk.tokens))
    tree.host.back_up([node])
    tree.host.finish()
    assert storage.objects.written
    storage.detach()
    (file,) = (tmp_path / "new").iterdir()
    assert file.name.startswith("lazy-kv2-") and "sglang-lazy" in file.name
    tree, store, storage = connected(**flags)
    assert storage.fetch(chunk)
    assert storage.objects.read.settle(60)
    storage.poll()
    assert tree.on_host(tree.host.slots_to(found := tree.end_of(array("q", [1, 2, 3]), chunk.key.namespace)))
    assert tree.on_host(found.host.slots) == tree.kv(found)


def test_waiting_is_configured_as_in_sglang(connected, tmp_path):
    flags = {"hicache_storage_backend": "file", "file_storage_path": str(tmp_path)}
    assert connected(**flags)[2].patience == Patience("timeout", base=1.0, per_ki_token=0.25, max=30.0)
    extra = {"prefetch_timeout_base": 3, "prefetch_timeout_per_ki_token": 0.5, "prefetch_timeout_max": 7}
    flags |= {"hicache_storage_prefetch_policy": "wait_complete"}
    patience = connected(**flags, hicache_storage_backend_extra_config=json.dumps(extra))[2].patience
    assert patience == Patience("wait_complete", base=3.0, per_ki_token=0.5, max=7.0)


@pytest.mark.parametrize("name", ["base", "max"])
@pytest.mark.parametrize("value", ["5", None])
def test_waiting_that_is_no_number_is_refused(connected, tmp_path, name, value):
    extra = json.dumps({f"prefetch_timeout_{name}": value})
    with pytest.raises(ValueError, match=f"prefetch_timeout_{name}"):
        connected(
            hicache_storage_backend="file",
            file_storage_path=str(tmp_path),
            hicache_storage_backend_extra_config=extra,
        )


class Own(HiCacheFile):
    """A class of a user's own."""

    def __init__(self, config, _options):
        super().__init__(config)
        self.config = config


def test_a_class_of_the_users_own_gets_its_options(connected, tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path))
    extra = {"backend_name": "own", "module_path": __name__, "class_name": "Own", "option": 5}
    flags = {"hicache_storage_backend": "dynamic", "hicache_storage_backend_extra_config": json.dumps(extra)}
    backend = connected(**flags)[2].objects.backend
    assert isinstance(backend, TensorBackend) and backend.backend.config.extra_config["option"] == 5


def test_mooncake_is_given_addresses(connected, monkeypatch):
    seen = []

    def create(name, config, memory):
        seen.append((name, config.extra_config))
        return SimpleNamespace(register_buffer=lambda memory: None)

    monkeypatch.setattr(connect.StorageBackendFactory, "create_backend", create)
    extra = {"master_server_address": "here:1"}
    flags = {"hicache_storage_backend": "mooncake", "hicache_storage_backend_extra_config": json.dumps(extra)}
    assert isinstance(connected(**flags)[2].objects.backend, AddressBackend) and seen == [("mooncake", extra)]
