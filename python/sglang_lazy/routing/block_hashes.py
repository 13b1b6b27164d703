"""SGLang's block hashes of chunks, which workers' KV events refer to."""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_lazy.core.keys import as_int32
from sglang_lazy.core.segments import Segment, parse_segment
from sglang_lazy.serving.blocks import BLOCKS
from sglang_lazy.serving.tokenization import SegmentTokenizer

CAPACITY = 1 << 16
SAMPLE = "In 1889, Ænima's café sold 10,240 naïve crêpes;\n\n\tprint('數據' + \"🙂\")  # déjà-vu?"
"""A text that few tokenizers encode alike, to compare tokenizers by."""
_TOKEN_BYTES = 4


def block_hash(input_ids: Sequence[int]) -> int:
    """SGLang's hash of the last block of these tokens, in blocks of one token.

    The first 64 bits, as a signed integer, of d(n), where d(i) = SHA-256(d(i - 1), token i as little-endian int32) and
    d(0) is empty. Raises ValueError for a token that is negative or at least 2**31.
    """
    ids = as_int32(input_ids).tobytes()
    digest = b""
    for start in range(0, len(ids), _TOKEN_BYTES):
        digest = hashlib.sha256(digest + ids[start : start + _TOKEN_BYTES]).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


class BlockHashes:
    """Tokenizes chunks as the workers do and computes their `block_hash`.

    tokenizer: the Hugging Face tokenizer of the workers' model.  capacity: how many hashes to remember.
    sample: its tokens of `SAMPLE`.
    """

    def __init__(self, tokenizer: Any, capacity: int = CAPACITY):
        self.tokenizer = SegmentTokenizer(tokenizer)
        self.sample = tokenizer.encode(SAMPLE, add_special_tokens=False)
        self.capacity = capacity
        self._known: OrderedDict[bytes, int] = OrderedDict()

    @classmethod
    def load(cls, tokenizer: str) -> "BlockHashes":
        """Load a tokenizer by path or Hugging Face name. Raises OSError or ValueError if there is none."""
        from transformers import AutoTokenizer  # takes seconds, and is needed nowhere else here

        return cls(AutoTokenizer.from_pretrained(tokenizer))

    def of(self, blocks: Mapping[bytes, Mapping[str, Any]]) -> dict[bytes, int]:
        """The hashes of chunks.  blocks: the chunks of requests, by digest.

        Chunks given by id, whose tokens are unknown here, and malformed ones have no hash.
        """
        names = {digest: self._known[digest] for digest in blocks if digest in self._known}
        tokens = self._tokens({digest: block for digest, block in blocks.items() if digest not in names})
        names |= {digest: block_hash(ids) for digest, ids in tokens.items() if ids}
        for digest, name in names.items():
            self._known[digest] = name
            self._known.move_to_end(digest)
        while len(self._known) > self.capacity:
            self._known.popitem(last=False)
        return names

    def _tokens(self, blocks: Mapping[bytes, Mapping[str, Any]]) -> dict[bytes, Sequence[int]]:
        segments = {digest: segment for digest, block in blocks.items() if (segment := _segment(block))}
        texts = {digest: segment.text for digest, segment in segments.items() if segment.text is not None}
        encoded = dict(zip(texts, self.tokenizer.encode_later(texts.values()), strict=True))
        return {digest: encoded.get(digest, segment.input_ids or ()) for digest, segment in segments.items()}


def _segment(block: Mapping[str, Any]) -> Segment | None:
    """The segment that a block means to the server; None if it is malformed or given by id."""
    try:
        text_of = BLOCKS.get(block["type"])
        return parse_segment({"type": "chunk", "text": text_of(block)} if text_of else block, vocab_size=1 << 31)
    except ValueError:
        return None
