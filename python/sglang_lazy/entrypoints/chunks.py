"""Methods of `Engine` that manage chunks, with the answers of the server's routes."""

from collections.abc import Iterable
from typing import Any

from sglang_lazy.port.serving.frontend import frontend_of
from sglang_lazy.serving import chunk_calls
from sglang_lazy.serving.chunk_lists import check_id, list_arguments, pin_arguments
from sglang_lazy.serving.frontend import Frontend
from sglang_lazy.serving.salts import check_cache_salt


class ChunkMethods:
    """Each method also exists as `async_…`, for use in an event loop.

    All raise ValueError for bad input. cache_salt: the tenant; None for the shared namespace.
    """

    loop: Any
    tokenizer_manager: Any

    @property
    def _frontend(self) -> Frontend:
        return frontend_of(self.tokenizer_manager)

    def register_chunks(self, chunks: Iterable[Any], **options: Any) -> dict[str, Any]:
        """Compute chunks ahead of use, so that prompts find them cached and may refer to them by id.

        chunks: 1 to 1,000 texts, `chunk(…)`s or dicts with `text` or `input_ids`.
        options: `link`, the policy that will use them; `lora_path`, the adapter that will; `pin` and `ttl`, as for
            `pin_chunks`; `cache_salt`.

        Returns {"requested": 2, "affected": [ids], "skipped": [{"id": …, "reason": …}]} after they are computed.
        """
        return self.loop.run_until_complete(self.async_register_chunks(chunks, **options))

    async def async_register_chunks(
        self,
        chunks: Iterable[Any],
        *,
        link: str | None = None,
        lora_path: str | None = None,
        pin: bool | None = None,
        ttl: float | None = None,
        cache_salt: str | None = None,
    ) -> dict[str, Any]:
        """`register_chunks` for use in an event loop."""
        body: dict[str, Any] = {"chunks": list(chunks), "link": link, "lora_path": lora_path, "wait": True}
        body |= {name: value for name, value in (("pin", pin), ("ttl", ttl)) if value is not None}
        return await chunk_calls.register_chunks(self._frontend, cache_salt, body)

    def list_chunks(self, cache_salt: str | None = None, *, everybody: bool = False, **query: Any) -> dict[str, Any]:
        """One page of a tenant's chunks, or of everybody's: {"total": 2, "next": None, "chunks": [{"id": …}, …]}.

        query: `sort`, `order`, `limit`, `cursor` and `state`, as `GET /chunks` takes them.
        """
        return self.loop.run_until_complete(self.async_list_chunks(cache_salt, everybody=everybody, **query))

    async def async_list_chunks(
        self, cache_salt: str | None = None, *, everybody: bool = False, **query: Any
    ) -> dict[str, Any]:
        """`list_chunks` for use in an event loop."""
        arguments = list_arguments(**query)
        return await chunk_calls.list_chunks(self._frontend, check_cache_salt(cache_salt), everybody, arguments)

    def get_chunk(self, chunk_id: str, cache_salt: str | None = None) -> dict[str, Any]:
        """The chunks with this id, one for each preamble: {"chunks": [{"id": …}], "registration": None}.

        Raises UnknownChunk, a ValueError, if there is none.
        """
        return self.loop.run_until_complete(self.async_get_chunk(chunk_id, cache_salt))

    async def async_get_chunk(self, chunk_id: str, cache_salt: str | None = None) -> dict[str, Any]:
        """`get_chunk` for use in an event loop."""
        return await chunk_calls.get_chunk(self._frontend, check_cache_salt(cache_salt), chunk_id)

    def pin_chunks(self, ids: Iterable[str], **options: Any) -> dict[str, Any]:
        """Pin the KV of cached chunks to the device or, with pin=False, end their pins.

        options: `pin`; `ttl`, in seconds after the pin was set or a prompt last hit the chunk, None for no end;
            `cache_salt`. An expired pin ends with the next call of the engine.

        Returns {"requested": 1, "affected": [{"id": …, "pinned": True, "pinned_until": …}], "skipped": []}.
        """
        return self.loop.run_until_complete(self.async_pin_chunks(ids, **options))

    async def async_pin_chunks(
        self, ids: Iterable[str], *, pin: bool = True, ttl: float | None = None, cache_salt: str | None = None
    ) -> dict[str, Any]:
        """`pin_chunks` for use in an event loop."""
        pin, ttl = pin_arguments({"pin": pin, "ttl": ttl})
        names = [check_id(name) for name in ids]
        return await self._frontend.pins.set(check_cache_salt(cache_salt), names, pin, ttl)

    def delete_chunks(self, ids: Iterable[str], cache_salt: str | None = None) -> dict[str, Any]:
        """Remove the KV of chunks from the cache, and forget their ids.

        Returns {"requested": 1, "affected": [{"id": …, "state": "deleted"}], "skipped": []}. The state is "in use" if
        requests hold the KV; it is removed after they have ended.
        """
        return self.loop.run_until_complete(self.async_delete_chunks(ids, cache_salt))

    async def async_delete_chunks(self, ids: Iterable[str], cache_salt: str | None = None) -> dict[str, Any]:
        """`delete_chunks` for use in an event loop."""
        return await chunk_calls.delete_chunks(self._frontend, check_cache_salt(cache_salt), list(ids))
