"""Shadow mode in SGLang's HTTP process: its requests and metrics, and hooks that let it yield to users' requests."""

from collections.abc import Callable
from typing import Any

from sglang.srt.managers.io_struct import AbortReq, GenerateReqInput

from sglang_lazy.core.config import LazyConfig
from sglang_lazy.serving.agreement import GAUGES, RecentAgreement
from sglang_lazy.serving.shadow import COUNTERS, Shadow

_ATTR = "_sglang_lazy_shadow"


def attach(_result: Any, global_state: Any) -> None:
    """After `http_server.set_global_state`: start shadow mode if the configuration has it."""
    config, manager = LazyConfig.current(), global_state.tokenizer_manager
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

    attach_shadow(manager, config.shadow_rate, counters, RecentAgreement(config.shadow_min_agreement, publish))


def attach_shadow(manager: Any, rate: float, counters: dict[str, Any], recent: RecentAgreement) -> Shadow:
    """The shadow mode of a tokenizer manager, from now on."""

    def abort(rid: str) -> None:
        # `manager.abort_request` would count it among the users' aborted requests.
        manager._dispatch_to_scheduler(AbortReq(rid=rid))

    shadow = Shadow(manager, rate, counters, recent, new_request, abort)
    setattr(manager, _ATTR, shadow)
    return shadow


def shadow_of(manager: Any) -> Shadow | None:
    """The shadow mode of a tokenizer manager, None if it is off."""
    return getattr(manager, _ATTR, None)


def new_request(obj: Any, rid: str, input_ids: list[int], sampling_params: dict[str, Any]) -> GenerateReqInput:
    """A request like `obj` with another prompt and parameters, kept out of SGLang's metrics of requests."""
    return GenerateReqInput(
        rid=rid,
        input_ids=list(input_ids),
        sampling_params=sampling_params,
        extra_key=obj.extra_key,
        cache_salt=obj.cache_salt,
        lora_path=obj.lora_path,
        custom_logit_processor=obj.custom_logit_processor,
        require_reasoning=obj.require_reasoning,
        max_thinking_tokens=obj.max_thinking_tokens,
        log_metrics=False,
    )


def give_way(manager: Any, obj: Any, _input_ids: Any) -> None:
    """Before `TokenizerManager._validate_one_request`: abort the shadow, since a request has arrived."""
    shadow = shadow_of(manager)
    if shadow is not None and obj.rid != shadow.rid:
        shadow.interrupt()


def abort_with_all(manager: Any, rid: str = "", abort_all: bool = False) -> None:
    """Before `TokenizerManager.abort_request`: if all requests are aborted, do not start the shadow again."""
    shadow = shadow_of(manager)
    if shadow is not None and abort_all:
        shadow.cancel()


async def make_idle(original: Callable, manager: Any, *args: Any, **kwargs: Any) -> Any:
    """Around calls that SGLang refuses or delays while the server is busy: stop the shadow first."""
    shadow = shadow_of(manager)
    if shadow is not None and shadow.under_way:
        await shadow.stop()
        await manager.get_internal_state()  # answered when the scheduler's last batch is over
    return await original(manager, *args, **kwargs)
