"""Several tokenizer workers. The process of our command spawns them, so that each imports the command first and has all
hooks; it also keeps the state that they share."""

import os
import sys
from typing import Any, cast

from sglang.srt.managers.multi_tokenizer_mixin import MultiTokenizerRouter, TokenizerWorker
from sglang.srt.utils import kill_itself_when_parent_died

from sglang_lazy.port.serving.frontend import frontend_of
from sglang_lazy.serving.known_chunks import KnownChunks
from sglang_lazy.serving.labels import Labels
from sglang_lazy.serving.registration import Registrations, WorkerRegistrations
from sglang_lazy.serving.shared import ObjectServer, Proxy, connect

_COMMAND = "sglang_lazy.launch_server"
_ADDRESS = "SGLANG_LAZY_SHARED"
"""Environment variable with the address of the `ObjectServer`."""


def share(_result: Any, global_state: Any) -> None:
    """After `http_server.set_global_state`, called first by the spawning process and then by each worker: share state.

    Raises RuntimeError in a process whose workers would lack the hooks.
    """
    manager = global_state.tokenizer_manager
    if isinstance(manager, MultiTokenizerRouter):
        if getattr(sys.modules["__main__"].__spec__, "name", None) != _COMMAND:
            raise RuntimeError(f"several tokenizer workers need a server that python -m {_COMMAND} has started")
        chunks, progress, labels = KnownChunks(), Registrations(), Labels()
        server = ObjectServer(
            lambda: {"chunks": chunks, "registrations": WorkerRegistrations(progress), "labels": labels}
        )
        os.environ[_ADDRESS] = server.address
    elif isinstance(manager, TokenizerWorker):
        kill_itself_when_parent_died()  # it would go on listening, and nobody would answer
        calls = connect(os.environ[_ADDRESS])
        frontend = frontend_of(manager)
        frontend.known = cast(KnownChunks, Proxy(calls, "chunks"))
        frontend.registrations = cast(Registrations, Proxy(calls, "registrations"))
        frontend.labels = cast(Labels, Proxy(calls, "labels"))
