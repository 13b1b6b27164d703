"""Print docs/hooks.md, the hooks in the order in which they run: python -m tools.hook_page

The hooks are read from the modules that declare them. Only their order stands here.
"""

import re
from collections.abc import Iterable, Sequence

from sglang_lazy.port import plugin
from sglang_lazy.port.facts import UPDATES
from sglang_lazy.port.hooks import Hook

STEPS = {
    "An HTTP process starts": ("http_server.set_global_state", "auth.add_api_key_middleware"),
    "A scheduler starts": (
        "overrides.post_capture_kv_sizing_planned",
        "ModelConfig.from_server_args",
        "ModelRunner.initialize",
        "LoRAManager.init_lora_modules",
        "LoRAAdapter._process_weight",
        "SpeculativeAlgorithm.create_worker",
        "KVCacheConfigurator._profile_available_bytes",
        "KVCacheConfigurator._handle_max_mamba_cache",
        "KVCacheConfigurator._apply_token_constraints",
        "attention_registry.attn_backend_wrapper",
        "DecodeCudaGraphRunner.capture",
        "EagleDraftWorker.init_attention_backend",
        "FrozenKVMTPDraftWorker.init_attention_backends",
        *(
            f"{runner}CudaGraphRunner.{method}"
            for runner in ("EAGLEDraft", "EAGLEDraftExtend", "FrozenKVMTP")
            for method in ("capture_one_shape", "_make_graph_key")
        ),
        "kv_cache_builder.maybe_register_hicache_draft",
        "Scheduler.init_request_dispatcher",
        "Scheduler.__init__",
    ),
    "A request enters the HTTP process": (
        "OpenAIServingResponses._make_request",
        "OpenAIServingResponses._response_input_history",
        "AnthropicServing._convert_to_chat_completion_request",
        "OpenAIServingChat._convert_to_internal_request",
        "OpenAIServingCompletion._convert_to_internal_request",
        "TokenizerManager._init_req_state",
        "TokenizerManager._tokenize_one_request",
        "TokenizerManager._tokenize_texts",
        "TokenizerManager._validate_one_request",
        "TokenizerManager._create_tokenized_object",
    ),
    "It arrives in the scheduler": (
        "Scheduler._add_request_to_queue",
        "Scheduler._abort_on_queued_limit",
        "Scheduler._prefetch_kvcache",
    ),
    "A batch is formed": (
        "Scheduler.get_next_batch_to_run",
        "Scheduler._get_new_batch_prefill_raw",
        "SchedulePolicy.calc_priority",
        "SchedulePolicy._compute_prefix_matches",
        "Scheduler.can_schedule_lora_req",
        "PrefillAdder.preempt_to_schedule",
        "PrefillAdder.add_one_req",
        "ScheduleBatch.prepare_for_extend",
        "ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend",
        "Scheduler.update_running_batch",
    ),
    "Its forward pass runs": (
        "TpModelWorker.forward_batch_generation",
        "EAGLEWorkerV2.forward_batch_generation",
        "FrozenKVMTPWorkerV2.forward_batch_generation",
        "ForwardBatch.init_new",
        "EagleDraftWorker._draft_extend_for_prefill",
        "PrefillCudaGraphRunner.can_run_graph",
        "EagerRunner.execute",
    ),
    "The answer leaves": (
        "SchedulerMetricsCollector.log_stats",
        "_GenerationStreamAccumulator.__init__",
        "TokenizerManager._wait_one_response",
        "TokenizerMetricsCollector.observe_one_finished_request",
        "utils.cached_tokens_details_from_dict",
        "PromptTokensDetails.__init__",
    ),
    "Nothing runs": ("Scheduler.on_idle", "Scheduler.is_fully_idle"),
    "A request is aborted": ("TokenizerManager.abort_request", "Scheduler.send_abort_output"),
    "An operator asks for something": (
        "TokenizerManager.flush_cache",
        "TokenizerManager.release_memory_occupation",
        *(f"TokenizerManager.{update}" for update in UPDATES),
        "Scheduler.get_internal_state",
        "Scheduler.flush_cache",
        "Scheduler.clear_hicache_storage_wrapped",
        "Scheduler.unload_lora_adapter",
        *(f"SchedulerWeightUpdaterManager.{update}" for update in UPDATES),
    ),
}
"""By step, the targets of hooks in the order in which SGLang calls them, each as its last two names. Repairs have none:
they stand wherever SGLang has a fault."""

HEAD = """\
# Hooks

What of SGLang's is changed, where, and what for: each row is one hook, in the order in which SGLang calls their
targets. Written by `python -m tools.hook_page`; [design](design.md#packages-and-the-port) says how hooks are
applied, [contributing](../CONTRIBUTING.md#move-to-another-sglang) how they are checked. Without a *required* hook no
process starts, and by the end of the self-test each must have run; a *feature* runs for some requests or flags only.
Either can go where SGLang asks a plugin itself, as it does for caches, attention backends and flags.
"""


def short(hook: Hook) -> str:
    """The last two names of a hook's target."""
    return ".".join(hook.target.split(".")[-2:])


def module_of(hook: Hook) -> str:
    """The module of a hook's function, as a path in the port's folder."""
    return hook.function.__module__.removeprefix("sglang_lazy.port.").replace(".", "/") + ".py"


def in_order(hooks: Iterable[Hook]) -> list[Hook]:
    """Hooks of one target, given in the order in which they are applied, in the order in which they run."""
    hooks = list(hooks)
    return [hook for hook in reversed(hooks) if hook.kind != "AFTER"] + [hook for hook in hooks if hook.kind == "AFTER"]


def table(*columns: str, rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (columns, ("---",) * len(columns), *rows)]


def page() -> str:
    hooks = plugin.declared()
    lines = [HEAD]
    for step, targets in STEPS.items():
        found = [
            hook
            for target in targets
            for hook in in_order(each for each in hooks if each.role != "repair" and short(each) == target)
        ]
        rows = [[f"`{short(hook)}`", hook.role, hook.why, f"`{module_of(hook)}`"] for hook in found]
        lines += [f"## {step}", "", *table("SGLang's", "role", "what for", "module", rows=rows), ""]
    repairs = [hook for hook in hooks if hook.role == "repair"]
    rows = [[f"`{short(hook)}`", hook.why, hook.until, f"`{module_of(hook)}`"] for hook in repairs]
    lines += ["## Repairs", "", "A server starts without them. Some have an issue or a pull request of SGLang's.", ""]
    lines += table("SGLang's", "what for", "can go when", "module", rows=rows)
    text = "\n".join(lines) + "\n"
    return re.sub(r"sglang#(\d+)", r"[sglang#\1](https://github.com/sgl-project/sglang/issues/\1)", text)


if __name__ == "__main__":
    print(page(), end="")
