"""What SGLang's modules need around them to be built outside a server."""

import contextlib
from collections.abc import Iterator

from sglang.srt import runtime_context
from sglang.srt.server_args import ServerArgs

from sglang_lazy.port import plugin


@contextlib.contextmanager
def published() -> Iterator[None]:
    """Default flags published for a CPU, and the rotary import that SGLang misses there."""
    plugin._provide_rotary_import()
    runtime_context.publish(ServerArgs(model_path="dummy", device="cpu"), role="scheduler")
    try:
        yield
    finally:
        runtime_context.reset_context()
