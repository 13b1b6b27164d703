"""An `Engine` in its own process, which starts faster than in this one where it can be forked."""

import os
import socket
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from sglang_lazy.testing.processes import ServerError, end
from sglang_lazy.testing.server import free_ports
from support.forks import start

TESTS = Path(__file__).parents[1]


class EngineProcess:
    """An engine with the methods that tests call.

    installed: whether its processes find the plugin's hooks installed, or have to install them, which takes seconds.
    options: the arguments of `Engine`.
    """

    def __init__(self, *, installed: bool = True, **options: Any):
        if options.get("dp_size", 1) == 1:  # all ranks would listen on this port
            options = {"nccl_port": free_ports(1)[0], **options}
        ours, theirs = socket.socketpair()
        with theirs:
            assert sys.__stderr__ is not None
            output = sys.__stderr__
            path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
            self.process = start(
                "support.engine_host",
                [],
                environment={"PYTHONPATH": path},
                source=theirs,
                output=output,
                installed=installed,
            )
        self.calls = Connection(ours.detach())
        try:
            self.call("start", **options)
        except BaseException:
            self.shutdown()
            raise

    def generate(self, *arguments: Any, **named: Any) -> Any:
        """Call `Engine.generate`. A stream is returned as a list."""
        return self.call("generate", *arguments, **named)

    def call(self, name: str, *arguments: Any, **named: Any) -> Any:
        """Call another method of `Engine`, also one for event loops."""
        return self._call(name, [(arguments, named)])[0]

    def call_together(self, name: str, calls: list[dict[str, Any]]) -> list[Any]:
        """Call a method for event loops with each of these arguments, all at once."""
        return self._call(name, [((), named) for named in calls])

    def flush_cache(self) -> None:
        """Empty the cache as soon as the last batch has finished."""
        self.call("flush_cache")

    def shutdown(self) -> None:
        self.calls.close()
        end(self.process)

    def _call(self, name: str, calls: list[tuple[tuple, dict[str, Any]]]) -> list[Any]:
        """Call a method of the engine. Raises the exception that it raised in the engine's process."""
        try:
            self.calls.send((name, calls))
            result = self.calls.recv()
        except (EOFError, OSError) as error:
            raise ServerError(f"the engine's process ended during {name}") from error
        if isinstance(result, Exception):
            raise result
        return result
