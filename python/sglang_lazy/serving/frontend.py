"""The state of the process that takes requests."""

import functools
from typing import cast

from sglang_lazy.core.config import LazyConfig
from sglang_lazy.serving.known_chunks import KnownChunks
from sglang_lazy.serving.labels import Labels, names_of
from sglang_lazy.serving.misses import Misses
from sglang_lazy.serving.picker import Picker
from sglang_lazy.serving.pins import Pins
from sglang_lazy.serving.prompts import Prompts
from sglang_lazy.serving.registration import AT_ONCE, Registrations, WorkerRegistrations
from sglang_lazy.serving.server import Server
from sglang_lazy.serving.shadow import Shadow
from sglang_lazy.serving.shared import ObjectServer, Proxy, connect
from sglang_lazy.serving.surveys import Surveys
from sglang_lazy.serving.turns import Turns
from sglang_lazy.serving.usage import Usage


class Frontend:
    """All that an HTTP process, or the process of an `Engine`, knows; of several tokenizer workers each has its own.

    server: the server behind it.
    prompts: makes prompts of what requests give.
    known, registrations, labels: chunks that were registered, those that are being computed, and what they are called.
        Tokenizer workers share these, through stand-ins.
    usage, surveys, pins: the last prompts, the last surveys of the cache, and pins that are to end.
    misses: why chunks of the last prompts were not cached.
    picker: knows which data-parallel rank has which chunks.
    shadow: compares answers with full attention; None if that is off.
    """

    def __init__(self, config: LazyConfig, server: Server):
        self.config, self.server = config, server
        self.prompts = Prompts(config, server)
        self.known, self.registrations, self.labels = KnownChunks(), Registrations(), Labels()
        self.usage, self.surveys = Usage(), Surveys()
        self.pins = Pins(server.ask, lambda tenant, ids: names_of(self.labels, tenant, ids))
        self.misses, self.picker = Misses(server), Picker()
        self.shadow: Shadow | None = None

    def use_shared(self, address: str) -> None:
        """Use the state that tokenizer workers share, at the address that `shared_state` has returned."""
        calls = connect(address)
        self.known = cast(KnownChunks, Proxy(calls, "chunks"))
        self.registrations = cast(Registrations, Proxy(calls, "registrations"))
        self.labels = cast(Labels, Proxy(calls, "labels"))

    @functools.cached_property
    def turns(self) -> Turns:
        """The turns of registered chunks."""
        return Turns(max(1, AT_ONCE // self.server.num_workers))


def shared_state() -> str:
    """Keep in this process what its tokenizer workers share; returns its address."""
    chunks, progress, labels = KnownChunks(), Registrations(), Labels()
    shared = {"chunks": chunks, "labels": labels}
    return ObjectServer(lambda: {**shared, "registrations": WorkerRegistrations(progress)}).address
