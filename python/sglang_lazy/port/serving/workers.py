"""Several tokenizer workers. Our command's process spawns them, so that each imports the command first, and has all
hooks; what they must know in common is kept by that process."""

import os
import sys
from typing import Any

from sglang.srt.managers.multi_tokenizer_mixin import MultiTokenizerRouter, TokenizerWorker

from sglang_lazy.serving import known_chunks, registration
from sglang_lazy.serving.shared import Keeper, Kept, connect

_COMMAND = "sglang_lazy.launch_server"
_ADDRESS = "SGLANG_LAZY_KEEPER"
"""The variable that tells workers where the keeper is."""


def share(_result: Any, global_state: Any) -> None:
    """After `http_server.set_global_state`, which the workers call, and before them the process that spawns them.

    Raises RuntimeError in a process whose workers would lack the hooks.
    """
    manager = global_state.tokenizer_manager
    if isinstance(manager, MultiTokenizerRouter):
        if getattr(sys.modules["__main__"].__spec__, "name", None) != _COMMAND:
            raise RuntimeError(f"several tokenizer workers need a server that python -m {_COMMAND} has started")
        chunks, progress = known_chunks.KnownChunks(), registration.Registrations()
        keeper = Keeper(lambda: {"chunks": chunks, "registrations": registration.OfOneWorker(progress)})
        os.environ[_ADDRESS] = keeper.address
    elif isinstance(manager, TokenizerWorker):
        connection = connect(os.environ[_ADDRESS])
        known_chunks.replace(manager, Kept(connection, "chunks"))
        registration.replace(manager, Kept(connection, "registrations"))
