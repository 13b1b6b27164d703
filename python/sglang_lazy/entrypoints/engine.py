"""Offline engine: SGLang's `Engine` with prompts made of segments."""

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from sglang.srt.entrypoints import engine
from sglang.srt.plugins import load_plugins

from sglang_lazy.core.config import pop_keywords
from sglang_lazy.entrypoints.chunks import ChunkMethods
from sglang_lazy.policies import check_policy
from sglang_lazy.port import plugin
from sglang_lazy.port.flag_checks import check_start
from sglang_lazy.port.serving import selftest
from sglang_lazy.port.serving.frontend import frontend_of
from sglang_lazy.serving.known_chunks import with_tokens
from sglang_lazy.serving.prompts import refuse_without_segments
from sglang_lazy.serving.text import segments_in


class Engine(ChunkMethods, engine.Engine):
    """`sgl.Engine` whose prompts may be segments: strings and `chunk(…)`s.

    Takes the arguments of `sgl.Engine`, and `lazy_…` keywords for the fields of `LazyConfig`. Creating one activates
    chunk reuse for all engines and servers that this process starts later.
    """

    def __init__(self, **kwargs: Any):
        config = pop_keywords(kwargs)
        check_policy(config.default_link)
        if config.shadow_rate:
            raise ValueError("shadow_rate watches the traffic of a server; for an engine there is sglang_lazy.verify")
        if config.keys:
            raise ValueError("keys open the routes of a server; an engine has none")
        plugin.activate(config)
        load_plugins()
        server_args = kwargs.get("server_args")
        if server_args is None:
            server_args = self.server_args_class(**{"log_level": "error", **kwargs})
        check_start(config, server_args, in_process=True)
        super().__init__(server_args=server_args)
        selftest.of_engine(self)

    def generate(
        self, *args: Any, segments: Any = None, cache_salt: Any = None, link: Any = None, **kwargs: Any
    ) -> dict | list[dict] | Iterator[dict]:
        """`sgl.Engine.generate`, which takes the other arguments, with `segments` in place of `prompt`.

        segments: one prompt, or a list of prompts; {"type": "chunk", "id": …} refers to a registered chunk.
        cache_salt: namespace of the KV; requests with another one, or with none, do not reuse it. link: policy of the
        chunks, like "block" or "query:ratio=0.3"; None for the engine's default. Both may be lists with a value for
        each prompt. Raises ValueError for bad input.
        """
        args, kwargs = self._arguments(args, kwargs, segments, cache_salt, link)
        return super().generate(*args, **kwargs)

    async def async_generate(
        self, *args: Any, segments: Any = None, cache_salt: Any = None, link: Any = None, **kwargs: Any
    ) -> dict | list[dict] | AsyncIterator[dict]:
        """`generate` for use in an event loop."""
        args, kwargs = self._arguments(args, kwargs, segments, cache_salt, link)
        return await super().async_generate(*args, **kwargs)

    def _arguments(
        self, args: tuple, kwargs: dict[str, Any], segments: Any, cache_salt: Any, link: Any
    ) -> tuple[tuple, dict[str, Any]]:
        """Arguments of `sgl.Engine.generate` for the prompt made of `segments`, or of text with separators."""
        stock, kwargs = kwargs, {**dict(zip(("prompt", "sampling_params"), args, strict=False)), **kwargs}
        if segments is None:
            _refuse_segments(kwargs.get("prompt"))
        frontend = frontend_of(self.tokenizer_manager)
        prompts = frontend.prompts
        limit, separator = prompts.limit(link), prompts.separator(None)
        if segments is None:
            segments = segments_in(kwargs.get("prompt"), separator, limit)
            if segments is None:
                refuse_without_segments(None if separator else link)
                return args, {**stock, "cache_salt": cache_salt}
            del kwargs["prompt"]
        if len(args) > 2 or kwargs.pop("prompt", None) is not None or kwargs.get("input_ids") is not None:
            raise ValueError("both segments and a prompt or input_ids are given: a prompt is one or the other")
        params = kwargs.pop("sampling_params", None)
        segments = with_tokens(frontend.known, segments, cache_salt, limit=limit)
        return (), {**kwargs, **prompts.to_generate_args(segments, cache_salt, params, link)}


def _refuse_segments(prompt: Any) -> None:
    """Raise ValueError if a prompt, or one of a batch, is made of segments."""
    prompts = prompt if isinstance(prompt, list | tuple) else [prompt]
    for part in (part for one in prompts for part in (one if isinstance(one, list | tuple) else [one])):
        if hasattr(part, "to_segment") or (isinstance(part, Mapping) and "type" in part):
            raise ValueError("a prompt with chunks is no text: pass segments=[…] in place of the prompt")
