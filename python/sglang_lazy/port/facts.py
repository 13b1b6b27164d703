"""Facts about SGLang's flags, ranks and requests, whose places move with its releases: each is read here alone."""

from typing import Any

from sglang.srt.arg_groups.model_override_base import attention_backends_of, resolved_view
from sglang.srt.runtime_context import get_parallel

from sglang_lazy.attention.rows import Pass
from sglang_lazy.core.state import lazy_state


def flags_of(args: Any) -> Any:
    """A server's flags as SGLang has resolved them.  args: its `ServerArgs`, which keep what the user gave."""
    return resolved_view(args)


def attention_backends(args: Any) -> set[str | None]:
    """The names of the attention backends for prefill and decode, and of the one that both default to."""
    flags = flags_of(args)
    return {flags.attention_backend, *attention_backends_of(flags)}


def pass_of(batch: Any) -> Pass:
    """A `ScheduleBatch` that is about to run."""
    states = [lazy_state(req) for req in batch.reqs]
    return (
        Pass(states) if batch.forward_mode.is_decode_or_idle() else Pass(states, batch.prefix_lens, batch.extend_lens)
    )


def dp_size() -> int:
    return get_parallel().dp_size


def dp_rank() -> int:
    """This process's data-parallel rank; 0 without data parallelism."""
    return get_parallel().dp_rank or 0


def tp_size() -> int:
    return get_parallel().tp_size


def tp_rank() -> int:
    return get_parallel().tp_rank
