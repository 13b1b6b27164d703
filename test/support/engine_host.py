"""The process of an `EngineProcess`: reads calls from its standard input, a socket, and sends back their results."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from sglang_lazy.testing.processes import ServerError


def flush_cache(engine: Any) -> None:
    result = engine.loop.run_until_complete(engine.tokenizer_manager.flush_cache(timeout_s=30))
    if not result.success:
        raise ServerError(f"the cache could not be emptied: {result.message}")


async def awaited(call: Awaitable[Any]) -> Any:
    result = await call
    return [item async for item in result] if isinstance(result, AsyncIterator) else result


async def together(calls: list[Awaitable[Any]]) -> list[Any]:
    return await asyncio.gather(*map(awaited, calls))


def call(engine: Any, name: str, calls: list[tuple[tuple, dict[str, Any]]]) -> list[Any]:
    """The results of calls of a method, as lists where they are streams."""
    results = [getattr(engine, name)(*arguments, **named) for arguments, named in calls]
    if isinstance(results[0], Awaitable):
        return engine.loop.run_until_complete(together(results))
    return [list(result) if isinstance(result, Iterator) else result for result in results]


def main() -> None:
    from sglang_lazy import Engine

    received = Connection(os.dup(0))
    engine: Any = None
    while True:
        try:
            name, calls = received.recv()
        except EOFError:
            return
        result: Any = [None]
        try:
            match name:
                case "start":
                    engine = Engine(**calls[0][1])
                case "flush_cache":
                    flush_cache(engine)
                case _:
                    result = call(engine, name, calls)
        except Exception as error:
            result = error
        received.send(result)


if __name__ == "__main__":
    main()
