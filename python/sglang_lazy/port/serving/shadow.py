"""Shadow mode in SGLang's HTTP process: its metrics, and hooks that let it yield to users' requests."""

from collections.abc import Callable
from typing import Any

from sglang_lazy.port.hooks import feature, required
from sglang_lazy.port.serving.frontend import frontend_of
from sglang_lazy.serving.agreement import GAUGES, RecentAgreement
from sglang_lazy.serving.shadow import COUNTERS, Shadow


def attach(_result: Any, global_state: Any) -> None:
    """After `http_server.set_global_state`: start shadow mode if the configuration has it."""
    manager = global_state.tokenizer_manager
    frontend = frontend_of(manager)
    config = frontend.config
    if not config.shadow_rate:
        return
    from prometheus_client import Counter, Gauge  # not before SGLang has set up its directory of metrics

    labels = manager.metrics_collector.labels
    counters = {
        name: Counter(f"sglang_lazy:shadow_{name}_total", text, list(labels)).labels(**labels)
        for name, text in COUNTERS.items()
    }
    gauges = {
        name: Gauge(f"sglang_lazy:shadow_{name}", text, [*labels, *own], multiprocess_mode="mostrecent")
        for name, (text, own) in GAUGES.items()
    }

    def publish(name: str, value: float, **own: str) -> None:
        gauges[name].labels(**labels, **own).set(value)

    recent = RecentAgreement(config.shadow_min_agreement, publish)
    frontend.shadow = Shadow(frontend.prompts, config.shadow_rate, counters, recent)


def give_way(manager: Any, obj: Any, _input_ids: Any) -> None:
    """Before `TokenizerManager._validate_one_request`: abort the shadow, since a request has arrived."""
    shadow = frontend_of(manager).shadow
    if shadow is not None and obj.rid != shadow.rid:
        shadow.interrupt()


def abort_with_all(manager: Any, rid: str = "", abort_all: bool = False) -> None:
    """Before `TokenizerManager.abort_request`: if all requests are aborted, do not start the shadow again."""
    shadow = frontend_of(manager).shadow
    if shadow is not None and abort_all:
        shadow.cancel()


async def make_idle(original: Callable, manager: Any, *args: Any, **kwargs: Any) -> Any:
    """Around calls that SGLang refuses or delays while the server is busy: stop the shadow first."""
    shadow = frontend_of(manager).shadow
    if shadow is not None and shadow.under_way:
        await shadow.stop()
        await manager.get_internal_state()  # answered when the scheduler's last batch is over
    return await original(manager, *args, **kwargs)


_TOKENIZER_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_NEED_IDLE = (
    "flush_cache",
    "release_memory_occupation",
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
)
HOOKS = (
    feature(
        "sglang.srt.entrypoints.http_server.set_global_state",
        attach,
        "AFTER",
        "a shadow compares answers with full prefill",
    ),
    required(
        f"{_TOKENIZER_MANAGER}._validate_one_request", give_way, "BEFORE", "tokenizer", "a shadow gives way to users"
    ),
    feature(
        f"{_TOKENIZER_MANAGER}.abort_request", abort_with_all, "BEFORE", "a shadow ends when everything is aborted"
    ),
    *(
        feature(
            f"{_TOKENIZER_MANAGER}.{control}", make_idle, "AROUND", "a shadow ends before what needs an idle server"
        )
        for control in _NEED_IDLE
    ),
)
