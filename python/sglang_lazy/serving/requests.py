"""Requests with segments: from the user's input to the token ids and the layout that the scheduler receives."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sglang_lazy.core.config import SALT_HEADER, LazyConfig
from sglang_lazy.core.names import check_name
from sglang_lazy.core.segments import LAYOUT_PARAM, ChunkLimit, PackedLayout, PromptLayout, Segment, parse_segments
from sglang_lazy.policies import get_policy
from sglang_lazy.serving.tokenization import SegmentTokenizer, TokenizedPrompt, concatenate
from sglang_lazy.serving.trained_tokens import add_trained_tokens, remove_trained_tokens, tokens_for

_TOKENIZER_ATTR = "_sglang_lazy_segment_tokenizer"

_REFUSED = {
    "input_embeds": "input embeddings",
    "positional_embed_overrides": "input embeddings",
    "mm_hashes": "hashes of images",
    "video_data": "videos",
    "audio_data": "audio",
    "session_params": "sessions",
    "multi_item_delimiter_indices": "multi-item scoring",
}
"""Request fields that cannot be combined with reused chunks."""


def segment_tokenizer(tokenizer_manager: Any) -> SegmentTokenizer:
    """The segment tokenizer of `tokenizer_manager`, made at first use."""
    cached = getattr(tokenizer_manager, _TOKENIZER_ATTR, None)
    if cached is None or cached.tokenizer is not tokenizer_manager.tokenizer:
        cached = SegmentTokenizer(tokenizer_manager.tokenizer)
        setattr(tokenizer_manager, _TOKENIZER_ATTR, cached)
    return cached


def tokenize(tokenizer_manager: Any, segments: Sequence[Segment], cache_salt: str | None = None) -> TokenizedPrompt:
    """Tokenize a prompt. Raises ValueError for text on a server without a tokenizer."""
    if tokenizer_manager.tokenizer is not None:
        return segment_tokenizer(tokenizer_manager).encode(segments, cache_salt)
    pieces = []
    for index, segment in enumerate(segments):
        if segment.input_ids is None:
            raise ValueError(f"segments[{index}]: this server has no tokenizer, give input_ids instead of text")
        pieces.append(segment.input_ids)
    return concatenate(segments, pieces)


def with_trained_tokens(tokenizer_manager: Any, prompt: TokenizedPrompt, link: str) -> TokenizedPrompt:
    """`prompt` with the trained tokens that the policy `link` needs. Raises ValueError if the model lacks them."""
    policy = get_policy(link)
    if not policy.trained:
        return prompt
    vocab_size = tokenizer_manager.model_config.vocab_size
    return add_trained_tokens(prompt, policy, tokens_for(policy, tokenizer_manager.model_path, vocab_size))


def without_trained_tokens(tokenizer_manager: Any, input_ids: list[int], layout: PromptLayout) -> TokenizedPrompt:
    """The inverse of `with_trained_tokens`: the prompt as the user wrote it."""
    policy = get_policy(layout.link)
    if not policy.trained:
        return TokenizedPrompt(input_ids, layout.chunks)
    vocab_size = tokenizer_manager.model_config.vocab_size
    trained = tokens_for(policy, tokenizer_manager.model_path, vocab_size)
    return remove_trained_tokens(input_ids, layout.chunks, policy, trained)


def is_batch(segments: Any) -> bool:
    """Whether `segments` is a list of prompts rather than one prompt."""
    return isinstance(segments, list | tuple) and bool(segments) and isinstance(segments[0], list | tuple)


def to_generate_args(
    tokenizer_manager: Any, segments: Any, cache_salt: Any = None, sampling_params: Any = None, link: Any = None
) -> dict[str, Any]:
    """The `input_ids` and `sampling_params` of a request for `segments`, one prompt or a list of prompts.

    cache_salt, link: one for all prompts, or a list with one for each. Raises ValueError, naming the segment, on bad
    input.
    """
    if not is_batch(segments):
        input_ids, layout = _prompt(tokenizer_manager, segments, cache_salt, link)
        return {"input_ids": input_ids, "sampling_params": with_layout(sampling_params, layout, tokenizer_manager)}
    salts = _spread("cache_salt", cache_salt, len(segments))
    links = _spread("link", link, len(segments))
    params = _spread("sampling_params", sampling_params, len(segments))
    prompts, merged = [], []
    for index, values in enumerate(segments):
        try:
            input_ids, layout = _prompt(tokenizer_manager, values, salts[index], links[index])
        except ValueError as error:
            raise ValueError(f"prompt {index} of the batch: {error}") from None
        prompts.append(input_ids)
        merged.append(with_layout(params[index], layout, tokenizer_manager))
    return {"input_ids": prompts, "sampling_params": merged}


def _prompt(tokenizer_manager: Any, values: Any, cache_salt: Any, link: Any) -> tuple[list[int], PromptLayout | None]:
    cache_salt, link = check_cache_salt(cache_salt), choose_link(link)
    limit = chunk_limit(link, tokenizer_manager.context_len)
    segments = parse_segments(values, tokenizer_manager.model_config.vocab_size, limit, by_id=True)
    check_length(tokenizer_manager, segments)
    prompt = tokenize(tokenizer_manager, segments, cache_salt)
    if not prompt.input_ids:
        raise ValueError("the segments give no tokens")
    prompt = with_trained_tokens(tokenizer_manager, prompt, link)
    return prompt.input_ids, prompt.layout(link, cache_salt)


def chunk_limit(link: Any, context_len: float) -> ChunkLimit:
    """The limit on the chunks of a prompt with this `link`, which need not be valid.

    Without reuse, a prompt may have as many as the model has positions, since each has a token. link: a list if a batch
    has several, of which any may be meant.
    """
    try:
        reuses = get_policy(choose_link(link)).reuses
    except ValueError:
        reuses = not isinstance(link, list)
    if reuses:
        return ChunkLimit(LazyConfig.current().max_chunks)
    return ChunkLimit(context_len, "the model's context length")


def check_length(tokenizer_manager: Any, segments: Iterable[Segment]) -> None:
    """Raise ValueError if the token ids among `segments` alone exceed the model's positions, as ids that name long
    chunks many times may, unless SGLang truncates prompts."""
    num_tokens = sum(len(segment.input_ids or ()) for segment in segments)
    if num_tokens > tokenizer_manager.context_len and not tokenizer_manager.allow_auto_truncate:
        raise ValueError(
            f"The input (at least {num_tokens} tokens) is longer than the model's context length "
            f"({tokenizer_manager.context_len} tokens)."
        )


def _spread(name: str, value: Any, batch_size: int) -> list[Any]:
    if not isinstance(value, list | tuple):
        return [value] * batch_size
    if len(value) != batch_size:
        raise ValueError(f"{name} has {len(value)} values for a batch of {batch_size} prompts")
    return list(value)


def check_cache_salt(cache_salt: Any) -> str | None:
    """`cache_salt` if it is a name or None, else ValueError."""
    return None if cache_salt is None else check_name("cache_salt", cache_salt)


def check_salts(salts: Any) -> Any:
    """`salts` if it is a name or None, or a list of such for a batch, else ValueError."""
    for salt in salts if isinstance(salts, list) else [salts]:
        check_cache_salt(salt)
    return salts


def salt_in(headers: Any) -> str | None:
    """The salt in a request's headers (Starlette's), None without one.

    Raises ValueError for several, of which a gateway may have set only one, and for one that is empty or not ASCII.
    """
    values = headers.getlist(SALT_HEADER)
    if not values:
        return None
    if len(values) > 1:
        raise ValueError(f"{SALT_HEADER} is given twice")
    if not values[0].isascii():
        raise ValueError(f"{SALT_HEADER} must be a non-empty ASCII string")
    return check_name(SALT_HEADER, values[0])


def salt_of(cache_salt: Any, headers: Any) -> Any:
    """The salt of a request, or the salts of a batch, from its body or from the header that a gateway has set.

    Raises ValueError if they disagree, or for a bad header.
    """
    header = salt_in(headers)
    if header is None:
        return cache_salt
    salts = cache_salt if isinstance(cache_salt, list) else [cache_salt]
    if any(salt is not None and salt != header for salt in salts):
        raise ValueError(f"cache_salt and {SALT_HEADER} disagree")
    return header


def choose_link(link: Any) -> str:
    """`link`, or the server's default if it is None. Raises ValueError if no policy has this name."""
    return str(get_policy(LazyConfig.current().default_link if link is None else link))


def refuse_without_segments(link: Any) -> None:
    """Raise ValueError for a link with a prompt in another form."""
    if link is not None:
        raise ValueError("link needs a prompt given as segments")


def with_layout(sampling_params: Any, layout: PromptLayout | None, tokenizer_manager: Any) -> dict[str, Any]:
    """A copy of `sampling_params` that carries `layout` beside the user's own custom_params."""
    if sampling_params is not None and not isinstance(sampling_params, Mapping):
        raise ValueError(f"sampling_params must be an object, got {type(sampling_params).__name__}")
    params = dict(sampling_params or {})
    if layout is None:
        return params
    custom_params = params.get("custom_params")
    if custom_params is None:  # the server's defaults, which SGLang applies only if the request has none
        custom_params = (tokenizer_manager.preferred_sampling_params or {}).get("custom_params")
    if custom_params is not None and not isinstance(custom_params, Mapping):
        raise ValueError(f"custom_params must be an object, got {type(custom_params).__name__}")
    params["custom_params"] = {**(custom_params or {}), LAYOUT_PARAM: layout.pack()}
    return params


def layout_of(obj: Any) -> PromptLayout | None:
    """The layout that travels with one request of a batch, None for an ordinary request.

    Raises ValueError for one that no surface of this process has made.
    """
    params = getattr(obj, "sampling_params", None)
    custom_params = params.get("custom_params") if isinstance(params, Mapping) else None
    if not isinstance(custom_params, Mapping) or LAYOUT_PARAM not in custom_params:
        return None
    packed = custom_params[LAYOUT_PARAM]
    if not isinstance(packed, PackedLayout):
        raise ValueError(f"custom_params.{LAYOUT_PARAM} is set by the server: give a prompt as segments instead")
    if obj.input_ids is None:
        raise ValueError("a prompt layout needs the input_ids that it describes")
    return PromptLayout.unpack(packed, len(obj.input_ids))


def check_request(obj: Any, layout: PromptLayout) -> None:
    """Raise ValueError if chunks cannot be reused together with the rest of a request.

    obj: the request's fields, those of `/generate`.
    """
    ChunkLimit(LazyConfig.current().max_chunks).check(len(layout.chunks))
    for field, what in _REFUSED.items():
        if getattr(obj, field, None):
            raise ValueError(f"a prompt with chunks cannot be combined with {what} ({field})")
    if (obj.sampling_params.get("beam_width") or 1) > 1:
        raise ValueError("a prompt with chunks cannot be combined with beam search (beam_width)")
    chunks_end = layout.chunks[-1][1]
    start = getattr(obj, "logprob_start_len", None)
    if getattr(obj, "return_logprob", False) and start is not None and 0 <= start < chunks_end:
        raise ValueError(
            f"prompt logprobs from position {start} need tokens that are reused from chunks: the last chunk ends at "
            f"position {chunks_end}, so logprob_start_len must be at least {chunks_end}, or -1 for none"
        )
