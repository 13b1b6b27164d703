"""The process of an `EngineProcess`: reads calls from its standard input, a socket, and sends back their results."""

import os
from multiprocessing.connection import Connection
from typing import Any

from sglang_lazy.testing.processes import ServerError


def flush_cache(engine: Any) -> None:
    result = engine.loop.run_until_complete(engine.tokenizer_manager.flush_cache(timeout_s=30))
    if not result.success:
        raise ServerError(f"the cache could not be emptied: {result.message}")


def main() -> None:
    from sglang_lazy import Engine

    calls = Connection(os.dup(0))
    engine: Any = None
    while True:
        try:
            name, arguments = calls.recv()
        except EOFError:
            return
        try:
            match name:
                case "start":
                    engine, result = Engine(**arguments), None
                case "flush_cache":
                    flush_cache(engine)
                    result = None
                case _:
                    result = getattr(engine, name)(**arguments)
        except Exception as error:
            result = error
        calls.send(result)


if __name__ == "__main__":
    main()
