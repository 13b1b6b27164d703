"""On a CPU, the settings that SGLang needs to run there."""

import logging
from typing import Any

logger = logging.getLogger(__name__)

CPU_SETTINGS = {"attention_backend": "torch_native", "sampling_backend": "pytorch", "grammar_backend": "none"}


def choose_backends(args: Any, *_args: Any, **_kwargs: Any) -> None:
    """Before `ServerArgs.__post_init__`: on a CPU, give values that work to the backends that are not set.

    SGLang's own choice of attention backend needs kernels that only some CPUs have.
    """
    if args.device != "cpu":
        return
    unset = {name: value for name, value in CPU_SETTINGS.items() if getattr(args, name) is None}
    for name, value in unset.items():
        setattr(args, name, value)
    if unset:
        flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in unset.items())
        logger.warning("sglang-lazy: on a CPU, these flags were not set and are now %s", flags)
