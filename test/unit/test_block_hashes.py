"""The hashes by which KV events identify a request's chunks."""

import json
import random

import pytest
from sglang.srt.mem_cache.utils import get_hash_str, hash_str_to_int64
from transformers import AutoTokenizer

from sglang_lazy.core.policy import TrainedTokens
from sglang_lazy.policies import POLICIES
from sglang_lazy.routing import BlockHashes, chunks_in
from sglang_lazy.routing.block_hashes import block_hash
from sglang_lazy.routing.bodies import TOKENS_INSIDE

DOCUMENT = "The river rises in the hills.\n\n"
CHUNK = {"type": "chunk", "text": DOCUMENT}
TEXT = {"type": "text", "text": "a question"}


def sglang_name(tokens):
    """SGLang's hash of the block that ends with the last of these tokens."""
    return hash_str_to_int64(get_hash_str(list(tokens), None, page_size=1)[-1])


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture
def hashes(tiny_model):
    return BlockHashes.load(tiny_model)


def names(hashes, **body):
    return [name for name, _ in chunks_in(body, hashes)]


def test_hashes_equal_sglangs():
    rng = random.Random(0)
    for length in (1, 2, 3, 40):
        tokens = [rng.choice([0, 1, 255, 256, 2**31 - 1, rng.randrange(2**31)]) for _ in range(length)]
        assert block_hash(tokens) == sglang_name(tokens)


def test_texts_are_tokenized_as_the_server_does(hashes, tokenizer):
    """Each by itself, without BOS, wherever it stands in the prompt."""
    source = {"type": "text", "media_type": "text/plain", "data": DOCUMENT}
    result = {"type": "search_result", "title": "Hills", "source": "web", "content": [{"type": "text", "text": "far"}]}
    blocks = [CHUNK, {"type": "document", "source": source, "title": "River"}, result]
    texts = [DOCUMENT, f"Title: River\nContent: {DOCUMENT}", "Title: Hills\nSource: web\nContent: far"]
    tokens = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    assert tokenizer.bos_token_id not in sum(tokens, [])
    expected = [sglang_name(ids) for ids in tokens]
    assert names(hashes, messages=[{"role": "user", "content": [*blocks, TEXT]}]) == expected
    assert names(hashes, segments=[TEXT, CHUNK], link="epic:tokens=3") == expected[:1]
    assert names(hashes, segments=[{"type": "chunk", "input_ids": tokens[0]}]) == expected[:1]


@pytest.mark.parametrize(
    "private",
    [{"cache_salt": "tenant"}, {"extra_key": "key"}, {"lora_path": "legal"}, {"model": "tiny:legal"}, {"link": "base"},
     {"link": "base:preamble=lead"}, {"link": "base+epic:tokens=3"}, {"link": "packet"}],
    ids=str,
)  # fmt: skip
def test_chunks_without_events_keep_their_own_names(hashes, private):
    assert names(hashes, segments=[CHUNK], **private) == names(None, segments=[CHUNK], **private)
    assert names(None, segments=[CHUNK], **private) != names(None, segments=[CHUNK])


def test_policies_that_add_tokens_to_chunks():
    trained = TrainedTokens((1,), (2,), (3,))
    around = {name: policy().around(trained, 0) for name, policy in POLICIES.items()}
    assert {name for name, tokens in around.items() if tokens.before or tokens.behind} == {TOKENS_INSIDE}


@pytest.mark.parametrize(
    "bad",
    [{"id": "5f2b6c01a9d3e847"}, {"text": ""}, {"text": 3}, {"text": "\ud800"}, {"input_ids": [2**31]}, {},
     {"input_ids": [2**70]}, {"input_ids": [-1]}, {"input_ids": ["1"]}, {"input_ids": []}],
    ids=str,
)  # fmt: skip
def test_chunks_of_unknown_tokens_keep_their_own_names(hashes, bad):
    bad = json.loads(json.dumps({"type": "chunk", **bad}))
    good = names(hashes, segments=[CHUNK])
    assert names(hashes, segments=[bad, CHUNK]) == [*names(None, segments=[bad]), *good]


def test_tokenized_texts_are_cached(tokenizer, hashes):
    class Counted:
        is_fast = False

        def __init__(self):
            self.encoded = []

        def __getattr__(self, name):
            return getattr(tokenizer, name)

        def encode(self, text, **kwargs):
            self.encoded.append(text)
            return tokenizer.encode(text, **kwargs)

    counted = Counted()
    few = BlockHashes(counted, capacity=2)
    counted.encoded.clear()
    for text in ("a", "b", "a", "c", "a", "b"):
        chunk = {"type": "chunk", "text": text}
        assert names(few, segments=[chunk, chunk]) == names(hashes, segments=[chunk]) * 2
    assert counted.encoded == ["a", "b", "c", "b"]
