"""Tools for examples, tests and benchmarks: server launchers, a client and a tiny model.

They need no files of the repository.
"""

from sglang_lazy.testing.client import Client, Generation
from sglang_lazy.testing.processes import ServerError
from sglang_lazy.testing.server import (
    CPU_OPTIONS,
    device_flags,
    device_options,
    log_tail,
    running_server,
)

__all__ = [
    "CPU_OPTIONS",
    "Client",
    "Generation",
    "ServerError",
    "device_flags",
    "device_options",
    "log_tail",
    "running_server",
]
