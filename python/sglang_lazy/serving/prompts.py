"""Prompts of what requests give: token ids, and plans for their chunks."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sglang_lazy.core.config import LazyConfig
from sglang_lazy.core.labels import Label
from sglang_lazy.core.policy import Policy, TrainedTokens
from sglang_lazy.core.segments import LAYOUT_PARAM, ChunkLimit, Segment, parse_segments
from sglang_lazy.policies import get_policy
from sglang_lazy.serving.plans import Plan
from sglang_lazy.serving.salts import check_cache_salt
from sglang_lazy.serving.server import Server
from sglang_lazy.serving.text import check_separator, segments_in
from sglang_lazy.serving.tokenization import SegmentTokenizer, TokenizedPrompt, concatenate
from sglang_lazy.serving.trained_tokens import add_trained_tokens, remove_trained_tokens, tokens_for
from sglang_lazy.serving.validation import taking_chunks


def is_batch(segments: Any) -> bool:
    """Whether `segments` is a list of prompts rather than one prompt."""
    return isinstance(segments, list | tuple) and bool(segments) and isinstance(segments[0], list | tuple)


def refuse_without_segments(link: Any) -> None:
    """Raise ValueError for a link with a prompt in another form."""
    if link is not None:
        raise ValueError("link needs a prompt given as segments")


class Prompts:
    """Makes the prompts of a server with this configuration."""

    def __init__(self, config: LazyConfig, server: Server):
        self.config, self.server = config, server
        self._tokenizer: SegmentTokenizer | None = None

    def policy(self, link: Any) -> Policy:
        """The policy that `link` names, or the server's default if it is None. Raises ValueError if there is none."""
        return get_policy(self.config.default_link if link is None else link)

    def limit(self, link: Any) -> ChunkLimit:
        """The limit on the chunks of a prompt with this `link`, which need not be valid.

        link: a list if a batch has several, of which any may be meant.
        """
        if isinstance(link, list):
            return self._every_position
        try:
            return self.limit_under(self.policy(link))
        except ValueError:
            return self.max_chunks

    def limit_under(self, policy: Policy) -> ChunkLimit:
        """The limit on the chunks of a prompt. Without reuse, it may have as many as the model has positions, since
        each has a token."""
        return self.max_chunks if policy.reuses else self._every_position

    @property
    def max_chunks(self) -> ChunkLimit:
        """The limit on the chunks of a prompt that reuses them."""
        return ChunkLimit(self.config.max_chunks)

    @property
    def _every_position(self) -> ChunkLimit:
        return ChunkLimit(self.server.context_len, "the model's context length")

    def separator(self, given: str | None) -> str:
        """The separator that a request has given, or the server's if it names none; empty for none."""
        return self.config.chunk_separator if given is None else given

    def take_segments(self, body: Mapping[str, Any]) -> tuple[Mapping[str, Any], frozenset[str]]:
        """A completion's body, with the segments of its prompt if that is text with a separator; and which of its
        fields are given.  Raises ValueError for a separator of what is no text."""
        separator = body.get("chunk_separator")
        if body.get("segments") is not None:
            check_separator(separator, None)
        elif isinstance(separator, str | None):
            with taking_chunks():
                segments = segments_in(body.get("prompt"), self.separator(separator), self.limit(body.get("link")))
            body = body if segments is None else {**body, "segments": segments, "prompt": None}
        given = frozenset(name for name, value in body.items() if value is not None)
        # OpenAI's client does not let one leave the prompt out.
        return body, given - {"prompt"} if body.get("prompt") in ("", []) else given

    @functools.cached_property
    def roles(self) -> Sequence[str]:
        """The roles of the server's messages whose text is a chunk."""
        return [role for role in map(str.strip, self.config.chunk_roles.split(",")) if role]

    @property
    def tokenizer(self) -> SegmentTokenizer:
        """Made at first use, and again for another tokenizer."""
        if self._tokenizer is None or self._tokenizer.tokenizer is not self.server.tokenizer:
            self._tokenizer = SegmentTokenizer(self.server.tokenizer)
        return self._tokenizer

    def tokenize(self, segments: Sequence[Segment], cache_salt: str | None = None) -> TokenizedPrompt:
        """Tokenize a prompt. Raises ValueError for text on a server without a tokenizer."""
        if self.server.tokenizer is not None:
            return self.tokenizer.encode(segments, cache_salt)
        pieces = []
        for index, segment in enumerate(segments):
            if segment.input_ids is None:
                raise ValueError(f"segments[{index}]: this server has no tokenizer, give input_ids instead of text")
            pieces.append(segment.input_ids)
        return concatenate(segments, pieces)

    def with_trained_tokens(self, prompt: TokenizedPrompt, policy: Policy) -> TokenizedPrompt:
        """`prompt` with the trained tokens that its policy needs. Raises ValueError if the model lacks them."""
        return add_trained_tokens(prompt, policy, self._trained(policy)) if policy.trained else prompt

    def without_trained_tokens(self, input_ids: list[int], plan: Plan) -> TokenizedPrompt:
        """The inverse of `with_trained_tokens`: the prompt as the user wrote it."""
        chunks = plan.layout.chunks
        if not plan.policy.trained:
            return TokenizedPrompt(input_ids, chunks)
        return remove_trained_tokens(input_ids, chunks, plan.policy, self._trained(plan.policy))

    def _trained(self, policy: Policy) -> TrainedTokens:
        return tokens_for(policy, self.server.model_path, self.server.vocab_size)

    def to_generate_args(
        self, segments: Any, cache_salt: Any = None, sampling_params: Any = None, link: Any = None
    ) -> dict[str, Any]:
        """The `input_ids` and `sampling_params` of a request for `segments`, one prompt or a list of prompts.

        cache_salt, link: one for all prompts, or a list with one for each. Raises ValueError, naming the segment, on
        bad input.
        """
        if not is_batch(segments):
            input_ids, plan = self._prompt(segments, cache_salt, link)
            return {"input_ids": input_ids, "sampling_params": self.with_plan(sampling_params, plan)}
        salts = _spread("cache_salt", cache_salt, len(segments))
        links = _spread("link", link, len(segments))
        params = _spread("sampling_params", sampling_params, len(segments))
        prompts, merged = [], []
        for index, values in enumerate(segments):
            try:
                input_ids, plan = self._prompt(values, salts[index], links[index])
            except ValueError as error:
                raise ValueError(f"prompt {index} of the batch: {error}") from None
            prompts.append(input_ids)
            merged.append(self.with_plan(params[index], plan))
        return {"input_ids": prompts, "sampling_params": merged}

    def _prompt(self, values: Any, cache_salt: Any, link: Any) -> tuple[list[int], Plan | None]:
        cache_salt, policy = check_cache_salt(cache_salt), self.policy(link)
        segments = parse_segments(values, self.server.vocab_size, self.limit_under(policy), by_id=True)
        self._check_length(segments)
        prompt = self.tokenize(segments, cache_salt)
        if not prompt.input_ids:
            raise ValueError("the segments give no tokens")
        labels = [segment.label for segment in segments if segment.is_chunk]
        return self.planned(prompt, policy, cache_salt, labels)

    def planned(
        self, prompt: TokenizedPrompt, policy: Policy, cache_salt: str | None, labels: Sequence[Label | None]
    ) -> tuple[list[int], Plan | None]:
        """The token ids and the plan of a prompt, which has none if it is an ordinary one. A prompt without chunks
        keeps its cache salt.  labels: of each chunk, or empty."""
        prompt = self.with_trained_tokens(prompt, policy)
        if prompt.chunks:
            return prompt.input_ids, Plan.of(prompt.chunks, policy, cache_salt).labelled(labels)
        return prompt.input_ids, None if cache_salt is None else Plan.salted(cache_salt)

    def _check_length(self, segments: Iterable[Segment]) -> None:
        """Raise ValueError if the token ids among `segments` alone exceed the model's positions, as ids that name long
        chunks many times may, unless SGLang truncates prompts."""
        num_tokens = sum(len(segment.input_ids or ()) for segment in segments)
        if num_tokens > self.server.context_len and not self.server.truncates:
            raise ValueError(
                f"The input (at least {num_tokens} tokens) is longer than the model's context length "
                f"({self.server.context_len} tokens)."
            )

    def with_plan(self, sampling_params: Any, plan: Plan | None) -> dict[str, Any]:
        """A copy of `sampling_params` that carries `plan` beside the user's own custom_params."""
        if sampling_params is not None and not isinstance(sampling_params, Mapping):
            raise ValueError(f"sampling_params must be an object, got {type(sampling_params).__name__}")
        params = dict(sampling_params or {})
        if plan is None:
            return params
        custom_params = params.get("custom_params")
        if custom_params is None:  # the server's defaults, which SGLang applies only if the request has none
            custom_params = self.server.default_params.get("custom_params")
        if custom_params is not None and not isinstance(custom_params, Mapping):
            raise ValueError(f"custom_params must be an object, got {type(custom_params).__name__}")
        params["custom_params"] = {**(custom_params or {}), LAYOUT_PARAM: plan.pack()}
        return params


def _spread(name: str, value: Any, batch_size: int) -> list[Any]:
    if not isinstance(value, list | tuple):
        return [value] * batch_size
    if len(value) != batch_size:
        raise ValueError(f"{name} has {len(value)} values for a batch of {batch_size} prompts")
    return list(value)
