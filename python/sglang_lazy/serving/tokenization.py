"""Tokenization by segment: the tokens of a segment never depend on its neighbours or its place in the prompt."""

import json
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from sglang_lazy.core.remembered import Remembered
from sglang_lazy.core.segments import Segment

_SENTINELS = ("\n", ".", "x")
_REMEMBERED_BYTES = 1 << 26


class TokenizedPrompt(NamedTuple):
    """A prompt's token ids and the (start, end) position of each chunk in them."""

    input_ids: list[int]
    chunks: tuple[tuple[int, int], ...]


def concatenate(
    segments: Sequence[Segment], pieces: Sequence[Sequence[int]], before: Sequence[int] = (), after: Sequence[int] = ()
) -> TokenizedPrompt:
    """The prompt made of `pieces`, the tokens of each segment. Raises ValueError for a chunk without tokens."""
    input_ids, chunks = list(before), []
    for index, (segment, tokens) in enumerate(zip(segments, pieces, strict=True)):
        start = len(input_ids)
        input_ids.extend(tokens)
        if segment.is_chunk:
            if not tokens:
                raise ValueError(f"segments[{index}]: the text of a chunk segment gives no tokens")
            chunks.append((start, len(input_ids)))
    input_ids.extend(after)
    return TokenizedPrompt(input_ids, tuple(chunks))


class RecentTokens:
    """The tokens of the most recently used texts, which take up to `capacity` bytes in all. Thread-safe.

    Encoding a document takes longer than finding its KV, and its tokens never change. Entries are per tenant: the time
    to first token must not reveal whether another tenant has sent a document.
    """

    def __init__(self, capacity: int):
        self._tokens = Remembered[tuple[str | None, str], array](capacity)

    def get(self, tenant: str | None, text: str) -> list[int] | None:
        tokens = self._tokens.get((tenant, text))
        return None if tokens is None else tokens.tolist()

    def add(self, tenant: str | None, text: str, tokens: list[int]) -> None:
        self._tokens.put((tenant, text), array("i", tokens))


class SegmentTokenizer:
    """Encodes segments with a Hugging Face tokenizer.

    The tokenizer's special tokens (BOS) are added once, around the whole prompt, and belong to no chunk; none is added
    at an end that is given as token ids. The space that SentencePiece-style tokenizers put before a text is added only
    before a text segment that opens the prompt, so that decoding the prompt gives the segments' texts in sequence.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self._no_specials = {"add_special_tokens": False} if len(tokenizer.encode("")) else {}
        self.before, self.after = self._special_tokens()
        self._spaceless = _without_dummy_prefix(tokenizer) if getattr(tokenizer, "is_fast", False) else None
        self._adds_space = self._spaceless is None and _adds_dummy_prefix(tokenizer, self._no_specials)
        self._recent_chunks = RecentTokens(_REMEMBERED_BYTES)

    def _special_tokens(self) -> tuple[list[int], list[int]]:
        """The special tokens that the tokenizer puts before and after a text."""
        if not self._no_specials:
            return [], []
        whole, bare = self.tokenizer.encode("x"), self.tokenizer.encode("x", **self._no_specials)
        for start in range(len(whole) - len(bare) + 1):
            if whole[start : start + len(bare)] == bare:
                return whole[:start], whole[start + len(bare) :]
        raise ValueError("the tokenizer's special tokens are not simply a prefix and a suffix of the text's tokens")

    def encode(self, segments: Sequence[Segment], tenant: str | None = None) -> TokenizedPrompt:
        """Concatenate the tokens of `segments`. Raises ValueError, naming the index, for a chunk without tokens.

        tenant: the request's salt, None for the shared namespace.
        """
        first, last = segments[0], segments[-1]
        if first.text is not None and not first.is_chunk:
            pieces = [self.tokenizer.encode(first.text, **self._no_specials), *self.tokens(segments[1:], tenant)]
        else:
            pieces = self.tokens(segments, tenant)
        before = self.before if first.text is not None else ()
        after = self.after if last.text is not None else ()
        return concatenate(segments, pieces, before, after)

    def tokens(self, segments: Sequence[Segment], tenant: str | None = None) -> list[Sequence[int]]:
        """The tokens of each segment as it stands inside a prompt."""
        pieces: list[Sequence[int]] = [segment.input_ids or () for segment in segments]
        missing: list[tuple[int, str]] = []
        for index, segment in enumerate(segments):
            if segment.text is not None:
                known = self._recent_chunks.get(tenant, segment.text) if segment.is_chunk else None
                if known is None:
                    missing.append((index, segment.text))
                else:
                    pieces[index] = known
        encoded = self.encode_later(text for _, text in missing)
        for (index, text), tokens in zip(missing, encoded, strict=True):
            pieces[index] = tokens
            if segments[index].is_chunk:
                self._recent_chunks.add(tenant, text, tokens)
        return pieces

    def encode_later(self, texts: Iterable[str]) -> list[list[int]]:
        """The tokens of each text as it stands inside a prompt: no special tokens and no space before it."""
        texts = list(texts)
        if not texts:
            return []
        if self._spaceless is not None:
            return [encoding.ids for encoding in self._spaceless.encode_batch(texts, add_special_tokens=False)]
        if self._adds_space:
            return [self._encode_after_sentinel(text) for text in texts]
        if getattr(self.tokenizer, "is_fast", False):
            return self.tokenizer(texts, **self._no_specials)["input_ids"]
        return [self.tokenizer.encode(text, **self._no_specials) for text in texts]

    def decode_later(self, input_ids: Sequence[int]) -> str:
        """The text of tokens as it stands inside a prompt."""
        sentinel = self.encode_later(["x"])[0]
        text = self.tokenizer.decode([*sentinel, *input_ids], clean_up_tokenization_spaces=False)
        return text[len(self.tokenizer.decode(sentinel)) :]

    def _encode_after_sentinel(self, text: str) -> list[int]:
        """Encode after a short text that the tokenizer does not merge with this one, and drop that text's tokens."""
        for sentinel in _SENTINELS:
            before = self.tokenizer.encode(sentinel, **self._no_specials)
            tokens = self.tokenizer.encode(sentinel + text, **self._no_specials)
            if tokens[: len(before)] == before:
                return tokens[len(before) :]
        raise ValueError("this tokenizer puts a space before every text; use its fast version (--tokenizer-mode auto)")


def _without_dummy_prefix(tokenizer: Any) -> Any | None:
    """A copy of the fast tokenizer's backend that adds no space before a text; None if the original adds none."""
    backend = tokenizer.backend_tokenizer
    parts = [part for part in (backend.normalizer, backend.pre_tokenizer) if part is not None]
    if not any(_strip_dummy_prefix(json.loads(part.__getstate__())) for part in parts):
        return None
    state = json.loads(backend.to_str())
    for name in ("normalizer", "pre_tokenizer"):
        if state[name] is not None and _strip_dummy_prefix(state[name]) and state[name]["type"] == "Prepend":
            state[name] = None
    state["truncation"] = state["padding"] = None
    copy = type(backend).from_str(json.dumps(state))
    copy.encode_special_tokens = backend.encode_special_tokens
    return copy


def _strip_dummy_prefix(part: dict) -> bool:
    """Remove in place whatever adds a space before a text from a serialized normalizer or pre-tokenizer.

    Returns whether there was any. If the whole part is a `Prepend`, the caller must remove it.
    """
    found = False
    for steps in (part.get("normalizers"), part.get("pretokenizers")):
        if steps is not None:
            found |= any([_strip_dummy_prefix(step) for step in steps])
            steps[:] = [step for step in steps if step["type"] != "Prepend"]
    if part["type"] == "Prepend":
        found = True
    elif part["type"] == "Metaspace" and part.get("prepend_scheme", "always") != "never":
        part["prepend_scheme"] = "never"
        found = True
    elif part["type"] == "ByteLevel" and part.get("add_prefix_space"):
        part["add_prefix_space"] = False
        found = True
    return found


def _adds_dummy_prefix(tokenizer: Any, no_specials: dict) -> bool:
    """Whether a slow tokenizer adds a space before a text."""
    tokens = tokenizer.encode("x", **no_specials)
    return bool(tokens) and str(tokenizer.convert_ids_to_tokens(tokens[:1])[0]).startswith("▁")
