"""SGLang's storage: connect the backend that its flags name, give it objects (uint8 tensors of any length), and name
these by the model or adapter that they are of."""

import contextlib
import ctypes
import functools
import itertools
import logging
import os
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorage, HiCacheStorageConfig
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.observability.metrics_collector import (
    STAT_LOGGER_ROLE_STORAGE,
    StorageMetrics,
    StorageMetricsCollector,
    resolve_collector_class,
)

from sglang_lazy.cache.host import HostKV
from sglang_lazy.chunks.store import ChunkStore
from sglang_lazy.port.facts import dp_rank, flags_of, tp_rank, tp_size
from sglang_lazy.recurrent.pool import StateLayout
from sglang_lazy.storage import identity
from sglang_lazy.storage.chunk_objects import ChunkObjects
from sglang_lazy.storage.chunk_storage import ChunkStorage, Patience
from sglang_lazy.storage.report import COUNTERS, WAITS, StorageReport, counters_of

logger = logging.getLogger(__name__)

MAX_WAIT = 30.0
"""Seconds: the default of `prefetch_timeout_max`."""
_LIBC = ctypes.CDLL(None)
_LIBC.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_WRITE_AND_WAIT = 0b111


class TensorBackend:
    """A `Backend` that takes tensors.  backend: SGLang's."""

    def __init__(self, backend: Any):
        self.backend = backend

    @property
    def name(self) -> str:
        return type(self.backend).__name__

    def new_memory(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    @property
    def can_clear(self) -> bool:
        """SGLang's own `clear` deletes nothing."""
        return getattr(type(self.backend), "clear", HiCacheStorage.clear) is not HiCacheStorage.clear

    def clear(self) -> bool:
        try:
            return self.backend.clear() is not False  # most return nothing
        except Exception:  # the other tensor-parallel ranks wait for this one's answer
            logger.exception("sglang-lazy: the storage backend could not be cleared")
            return False

    def put(self, key: str, stored: torch.Tensor) -> bool:
        return bool(self.backend.batch_set([key], [stored]))

    def get(self, key: str, stored: torch.Tensor) -> bool:
        if not self.backend.exists(key):
            return False
        found = self.backend.batch_get([key], [stored])
        return bool(found) and found[0] is not None

    def close(self) -> None:
        if hasattr(self.backend, "close"):
            self.backend.close()


class FileBackend(TensorBackend):
    """SGLang's files. Each is on the disk before its thread writes the next.

    Otherwise the system collects gigabytes that it has yet to write. At its limit it stops whoever adds to them, if
    only by a line of a log: the scheduler, and the HTTP process.
    """

    def put(self, key: str, stored: torch.Tensor) -> bool:
        if not super().put(key, stored):
            return False
        with contextlib.suppress(FileNotFoundError):  # SGLang has evicted it
            _write_out(os.path.join(self.backend.file_path, f"{self.backend._get_suffixed_key(key)}.bin"))
        return True


def _write_out(path: str) -> None:
    """Write a file's data to the disk. `fdatasync` would also commit the journal, which log files wait for."""
    file = os.open(path, os.O_RDONLY)
    try:
        _LIBC.sync_file_range(file, 0, 0, _WRITE_AND_WAIT)
    finally:
        os.close(file)


class AddressBackend(TensorBackend):
    """A backend that takes addresses in registered memory: Mooncake."""

    def new_memory(self, num_bytes: int) -> torch.Tensor:
        memory = super().new_memory(num_bytes)
        self.backend.register_buffer(memory)
        return memory

    def put(self, key: str, stored: torch.Tensor) -> bool:
        return self.backend.set(key, target_location=stored.data_ptr(), target_sizes=len(stored))

    def get(self, key: str, stored: torch.Tensor) -> bool:
        if not self.backend.exists(key):
            return False
        return self.backend.get(key, target_location=stored.data_ptr(), target_sizes=len(stored))


def connect_storage(
    store: ChunkStore,
    host: HostKV,
    agree: Callable[[list[int]], list[int]],
    runners: Sequence[Any],
    has_metrics: bool,
    states: StateLayout | None = None,
) -> ChunkStorage:
    """The storage below `host`, which the caller has tell it of copies.

    agree: see `ChunkStorage`.  runners: the `ModelRunner`, and that of a draft.  states: of recurrent layers, if any.
    Raises ValueError if the backend's own configuration is wrong, and whatever the backend raises.
    """
    flags, state_memory = flags_of(runners[0].server_args), None if host.states is None else host.states.memory
    patience, extra = extra_config(flags)
    sizes = host.memory.token_bytes, 0 if state_memory is None else state_memory.token_bytes
    report = StorageReport(*sizes)
    if has_metrics:
        labels = {"storage_backend": flags.hicache_storage_backend, **_ranks(), **(flags.extra_metric_labels or {})}
        report = measured_storage(*sizes, labels)
    backend = _backend(flags.hicache_storage_backend, extra)
    objects = ChunkObjects(backend, host.memory, state_memory)
    identify = functools.partial(identity_of, runners, states=states)
    return ChunkStorage(store, host, objects, identify, agree, report, patience)


def _ranks() -> dict[str, int]:
    """This process, as SGLang labels what it measures of storage."""
    no_others = {"pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}  # servers with others are refused
    return {"tp_rank": tp_rank(), "dp_rank": dp_rank(), **no_others}


def extra_config(flags: Any) -> tuple[Patience, dict[str, Any]]:
    """What `--hicache-storage-backend-extra-config` says of waiting, and the rest, for the backend. SGLang has no
    `prefetch_timeout_max`. Raises ValueError if it is not as it should be."""
    parse = HybridCacheController.parse_storage_backend_extra_config
    extra, _, base, per_ki_token, _ = parse(flags.hicache_storage_backend_extra_config)
    longest = extra.pop("prefetch_timeout_max", MAX_WAIT)
    if isinstance(longest, bool) or not isinstance(longest, int | float):
        raise ValueError(f"prefetch_timeout_max must be a number, got {longest!r}")
    if flags.file_storage_path:
        extra.setdefault("file_storage_path", flags.file_storage_path)
    return Patience(flags.hicache_storage_prefetch_policy, base, per_ki_token, float(longest)), extra


def _backend(name: str, extra: dict[str, Any]) -> TensorBackend:
    """SGLang's backend. It is given objects, whatever they hold, and knows nothing of the host's memory: a Mooncake
    that would put that memory into its own server's (`standalone_storage`) refuses to start."""
    config = HiCacheStorageConfig(
        **_ranks(),
        tp_size=tp_size(),
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=False,
        model_name="sglang-lazy",  # identities tell models apart, whatever folder they are served from
        extra_config=extra,
    )
    backend = StorageBackendFactory.create_backend(name, config, types.SimpleNamespace(allocator=None))
    if name == "mooncake":
        return AddressBackend(backend)
    return (FileBackend if isinstance(backend, HiCacheFile) else TensorBackend)(backend)


def measured_storage(token_size: int, state_size: int, labels: Mapping[str, Any]) -> StorageReport:
    """A report of storage, with these labels.  token_size, state_size: bytes."""
    from prometheus_client import Histogram  # not before SGLang has set up its directory of metrics

    collector = resolve_collector_class(STAT_LOGGER_ROLE_STORAGE, StorageMetricsCollector)(labels=dict(labels))

    def log_stored(num_tokens: int, speed: float) -> None:
        collector.log_backuped_tokens(num_tokens)
        collector.log_storage_metrics(StorageMetrics(backup_pgs=[num_tokens], backup_bandwidth=[speed]))

    def log_fetched(num_tokens: int, speed: float) -> None:
        collector.log_prefetched_tokens(num_tokens)
        collector.log_storage_metrics(StorageMetrics(prefetch_pgs=[num_tokens], prefetch_bandwidth=[speed]))

    text = "seconds from asking storage for a chunk to its answer"
    waits = Histogram("sglang_lazy:storage_fetch_seconds", text, list(labels), buckets=WAITS).labels(**labels)
    counters = counters_of("storage", COUNTERS, labels)
    return StorageReport(token_size, state_size, log_stored, log_fetched, counters, waits.observe)


def identity_of(runners: Sequence[Any], adapter: str | None, states: StateLayout | None = None) -> bytes | None:
    """SHA-256 of the model of a `ModelRunner`, with that of the draft's if there is one, and with the layout of the
    states of recurrent layers if it has any; or of the LoRA adapter with this id; None if it is not loaded."""
    if adapter is None:
        of_states = [] if states is None else [repr(states).encode()]  # whose types depend on flags and the environment
        return identity.joined([*map(model_identity, runners), *of_states])
    loaded = runners[0].lora_manager.loras.get(adapter)
    return None if loaded is None else adapter_identity(loaded)


def model_identity(runner: Any) -> bytes:
    """SHA-256 of a `ModelRunner`'s model, its KV cache dtype, and its part of the heads."""
    facts = identity.config_facts(runner.model_config.hf_config.to_dict())
    facts += repr((str(runner.kv_cache_dtype), tp_rank(), tp_size())).encode()
    return identity.identity_of(facts, _weights(runner.model))


def adapter_identity(loaded: Any) -> bytes:
    """SHA-256 of a `LoRAAdapter`: its weights, on the host, its rank and its scaling."""
    facts = repr((loaded.config.r, loaded.scaling)).encode()
    parts = *(layer.weights for layer in loaded.layers), loaded.embedding_layers
    return identity.identity_of(facts, *(part.items() for part in parts))


def _weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors that a model's layers compute with, by name."""
    stored = model.state_dict().keys()  # other buffers are tables, computed from the config and the server's flags
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if name in stored)
    for name, weight in itertools.chain(model.named_parameters(), buffers, _experts_of_methods(model)):
        name = name.replace(".base_layer.", ".")  # layers that take adapters have their parameters one module deeper
        yield name, weight
        # The quantization state of bitsandbytes is an attribute of the weight, in parts if several weights are fused.
        for part, state in getattr(weight, "bnb_quant_state", {}).items():
            values = {"scale": state} if isinstance(state, torch.Tensor) else state.as_dict()
            for key, value in values.items():
                if isinstance(value, torch.Tensor | float):
                    yield f"{name}.{part}.{key}", torch.as_tensor(value)


def _experts_of_methods(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights of experts that are not parameters: those in MXFP4 belong to the method that computes with them, as
    tensors of `triton_kernels`."""
    for name, module in model.named_modules():
        for attribute in ("w13_weight_triton_tensor", "w2_weight_triton_tensor"):
            tensor = getattr(getattr(module, "quant_method", None), attribute, None)
            if tensor is not None:
                yield f"{name}.{attribute}", tensor.storage.data
