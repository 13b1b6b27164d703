"""Requests with messages whose parts are chunks, in any API of chats: what is taken out of their bodies before they are
parsed, and put into the prompt that is rendered of them."""

from collections.abc import Callable
from typing import Any, ClassVar

from pydantic import BaseModel, ModelWrapValidatorHandler, PrivateAttr, model_validator

from sglang_lazy.core.labels import Label
from sglang_lazy.serving.chat import ChunkParts, fill_placeholders
from sglang_lazy.serving.malformed import reading
from sglang_lazy.serving.plans import Plan
from sglang_lazy.serving.prompts import Prompts
from sglang_lazy.serving.rendering import Rendering
from sglang_lazy.serving.salts import check_cache_salt
from sglang_lazy.serving.validation import taking_chunks


class MessagesWithChunks(BaseModel):
    """A request with messages whose chunks are taken out before its other fields are read."""

    link: str | None = None
    chunk_separator: str | None = None
    chunk_roles: list[str] | None = None

    blocks: ClassVar[dict[str, Callable]] = {}
    """Types of content blocks, besides chunk parts, that are chunks in this API, and functions that read their text."""

    _chunk_parts: ChunkParts = PrivateAttr(default_factory=ChunkParts)

    @classmethod
    def prompts(cls) -> Prompts:
        """Of the process that takes the request."""
        raise NotImplementedError

    @model_validator(mode="wrap")
    @classmethod
    def _take_chunks(cls, data: Any, handler: ModelWrapValidatorHandler) -> "MessagesWithChunks":
        if not isinstance(data, dict):
            raise ValueError("the body must be an object")
        prompts, separator, roles = cls.prompts(), data.get("chunk_separator"), data.get("chunk_roles")
        chunk_parts = ChunkParts(
            prompts.separator(separator if isinstance(separator, str) else None),
            [role for role in roles if isinstance(role, str)] if isinstance(roles, list) else prompts.roles,
            cls.blocks,
            prompts.limit(data.get("link")),
        )
        with taking_chunks(), reading():
            parsed = handler(cls.take_chunks(data, chunk_parts))
        parsed._chunk_parts = chunk_parts
        return parsed

    @classmethod
    def take_chunks(cls, data: dict[str, Any], chunk_parts: ChunkParts) -> dict[str, Any]:
        """A copy of the request's body with placeholders in place of the chunks."""
        return {**data, "messages": chunk_parts.take_from(data.get("messages"))}

    @property
    def has_chunks(self) -> bool:
        return bool(self._chunk_parts.parts)

    def refuse_without_chunks(self) -> None:
        """Raise ValueError for fields that need chunks if there are none."""
        if self.link is not None and not self._chunk_parts.of_text:
            raise ValueError("link needs a prompt with chunk parts")

    def refuse_unread(self, input_ids: Any, template_kwargs: dict[str, Any] | None) -> None:
        """Raise ValueError for what looks like chunks where none are taken.

        input_ids: the request's, in place of messages.  template_kwargs: arguments of the chat template.
        """
        if input_ids is not None and (self.chunk_separator or self.chunk_roles):
            raise ValueError("chunk_separator and chunk_roles divide messages, which input_ids replace")
        if (self.has_chunks or self.link is not None) and (template_kwargs or {}).get("documents"):
            raise ValueError(
                "documents in chat_template_kwargs are text: give them as chunk parts of a message instead"
            )
        if input_ids is not None and self.has_chunks:
            raise ValueError("chunk parts cannot be combined with input_ids, which replace the messages")


def check_chunks(prompts: Prompts, chunk_parts: ChunkParts) -> None:
    """Raise ValueError for errors that can be found before the template is rendered."""
    if prompts.server.tokenizer is None:
        raise ValueError("chunk parts need a tokenizer, and this server has none (--skip-tokenizer-init)")
    chunk_parts.parse(prompts.server.vocab_size)


def put_chunks(
    prompts: Prompts, link: str | None, cache_salt: str | None, rendered: Any, chunk_parts: ChunkParts
) -> tuple[list[int], Plan | None]:
    """The token ids and the plan of a prompt rendered with placeholders.

    link, cache_salt: the request's. Raises ValueError for bad chunks, naming the part.
    """
    policy, chunks = prompts.policy(link), chunk_parts.parse(prompts.server.vocab_size)
    tokens = prompts.tokenizer.tokens(chunks, cache_salt)
    prompt = fill_placeholders(rendered, tokens, chunk_parts.names)
    labels: list[Label | None] = []
    if any(chunk.label for chunk in chunks):
        labels = [chunks[-1 - token].label for token in rendered if token < 0]  # the ids of placeholders
    return prompts.planned(prompt, policy, check_cache_salt(cache_salt), labels)


def with_texts(messages: list[Any], rendering: Rendering) -> list[Any]:
    """Copies of a conversation's parsed messages with the chunks' texts in place of their placeholders."""

    def replaced(content: Any) -> Any:
        if isinstance(content, str):
            return rendering.plain(content)
        if isinstance(content, list):
            return [replaced(part) for part in content]
        if isinstance(text := getattr(content, "text", None), str):
            return content.model_copy(update={"text": rendering.plain(text)})
        return content

    return [message.model_copy(update={"content": replaced(message.content)}) for message in messages]


def refuse_media(rendered: Any, *kinds: str) -> None:
    """Raise ValueError if a chat with chunk parts also has parts of these kinds, under any policy.

    rendered: has the parts of each kind as `KIND_data`.
    """
    for kind in kinds:
        if getattr(rendered, f"{kind}_data", None):
            raise ValueError(f"chunk parts cannot be combined with {kind} parts")
