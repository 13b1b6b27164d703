"""Offline engine: SGLang's `Engine` with prompts made of segments."""

import dataclasses
from collections.abc import AsyncIterator, Iterator
from typing import Any

from sglang.srt.entrypoints import engine

from sglang_lazy.core.config import LazyConfig
from sglang_lazy.port import plugin
from sglang_lazy.serving.requests import refuse_without_chunks, to_generate_args


def pop_config(kwargs: dict[str, Any]) -> LazyConfig:
    """Take the `lazy_…` keywords, one for each field of `LazyConfig`, out of `kwargs`. Raises TypeError on others."""
    names = {f"lazy_{field.name}": field.name for field in dataclasses.fields(LazyConfig)}
    given = [name for name in kwargs if name.startswith("lazy_")]
    for name in given:
        if name not in names:
            raise TypeError(f"unexpected keyword {name!r}, expected one of {', '.join(names)}")
    return LazyConfig(**{names[name]: kwargs.pop(name) for name in given})


class Engine(engine.Engine):
    """`sgl.Engine` whose prompts may be segments: strings and `chunk(…)`s.

    Takes the arguments of `sgl.Engine`, and `lazy_…` keywords for the fields of `LazyConfig`. From its creation on,
    engines and servers that this process starts reuse chunks.
    """

    def __init__(self, **kwargs: Any):
        config = pop_config(kwargs)
        if config.shadow_rate:
            raise ValueError("shadow_rate watches the traffic of a server; for an engine there is sglang_lazy.verify")
        plugin.activate(config)
        server_args = kwargs.get("server_args")
        if server_args is not None and server_args.radix_cache_backend is None:  # made before the plugin was there
            server_args.override("sglang_lazy", radix_cache_backend=plugin.CACHE_BACKEND)
        super().__init__(**kwargs)

    def generate(
        self,
        prompt: Any = None,
        sampling_params: Any = None,
        *args: Any,
        segments: Any = None,
        salt: Any = None,
        link: Any = None,
        **kwargs: Any,
    ) -> dict | list[dict] | Iterator[dict]:
        """`sgl.Engine.generate` with `segments` (one prompt, or a list of prompts) in place of `prompt`.

        salt: private namespace of the chunks. link: "block" to reuse chunks, "full" to answer the same tokens as one
        ordinary prompt, None for the default of the engine. Each is one for all prompts or one for each. Raises
        ValueError on bad input.
        """
        if segments is None:
            refuse_without_chunks(salt, link, "segments")
            return super().generate(prompt, sampling_params, *args, **kwargs)
        request = self._segmented(prompt, sampling_params, args, segments, salt, link, kwargs)
        return super().generate(**request)

    async def async_generate(
        self,
        prompt: Any = None,
        sampling_params: Any = None,
        *args: Any,
        segments: Any = None,
        salt: Any = None,
        link: Any = None,
        **kwargs: Any,
    ) -> dict | list[dict] | AsyncIterator[dict]:
        """`generate` for use in an event loop."""
        if segments is None:
            refuse_without_chunks(salt, link, "segments")
            return await super().async_generate(prompt, sampling_params, *args, **kwargs)
        request = self._segmented(prompt, sampling_params, args, segments, salt, link, kwargs)
        return await super().async_generate(**request)

    def _segmented(
        self,
        prompt: Any,
        sampling_params: Any,
        args: tuple,
        segments: Any,
        salt: Any,
        link: Any,
        kwargs: dict[str, Any],
    ) -> dict[str, Any]:
        if prompt is not None or args or kwargs.get("input_ids") is not None:
            raise ValueError("both segments and a prompt or input_ids are given: a prompt is one or the other")
        return {**kwargs, **to_generate_args(self.tokenizer_manager, segments, salt, sampling_params, link)}
