"""Import the modules of SGLang that a server's processes need, before these are forked."""

import contextlib
import importlib
import pkgutil

MODULES = (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.tp_worker",
    "sglang.srt.layers.attention.torch_native_backend",
)


def preload() -> None:
    """Import MODULES, and every model that can be imported here: SGLang's registry tries all in each scheduler."""
    for name in MODULES:
        importlib.import_module(name)
    models = importlib.import_module("sglang.srt.models")
    for module in pkgutil.iter_modules(models.__path__, "sglang.srt.models."):
        with contextlib.suppress(Exception):
            importlib.import_module(module.name)
