"""An `Engine` in its own process, which starts faster than in this one where it can be forked."""

import socket
import sys
from multiprocessing.connection import Connection
from typing import Any

from sglang_lazy.testing.processes import ServerError, end, start
from sglang_lazy.testing.server import free_ports

HOST = "sglang_lazy.testing.engine_host"


class EngineProcess:
    """An engine with the methods that tests call.  options: the arguments of `Engine`."""

    def __init__(self, **options: Any):
        if options.get("dp_size", 1) == 1:  # all ranks would listen on this port
            options = {"nccl_port": free_ports(1)[0], **options}
        ours, theirs = socket.socketpair()
        with theirs:
            assert sys.__stderr__ is not None
            self.process = start(HOST, [], environment={}, source=theirs, output=sys.__stderr__)
        self.calls = Connection(ours.detach())
        try:
            self._call("start", options)
        except BaseException:
            self.shutdown()
            raise

    def generate(self, **prompt: Any) -> Any:
        """Call `Engine.generate`, without streaming."""
        return self._call("generate", prompt)

    def call(self, name: str, **arguments: Any) -> Any:
        """Call another method of `Engine`."""
        return self._call(name, arguments)

    def flush_cache(self) -> None:
        """Empty the cache as soon as the last batch has finished."""
        self._call("flush_cache", {})

    def shutdown(self) -> None:
        self.calls.close()
        end(self.process)

    def _call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Call a method of the engine. Raises the exception that it raised in the engine's process."""
        try:
            self.calls.send((name, arguments))
            result = self.calls.recv()
        except (EOFError, OSError) as error:
            raise ServerError(f"the engine's process ended during {name}") from error
        if isinstance(result, Exception):
            raise result
        return result
