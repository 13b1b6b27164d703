"""The small model's tokenizer: deterministic, lossless, short for names, loadable by Hugging Face."""

import random

import pytest
from transformers import AutoTokenizer

from benchmark.sample import load_sample
from research.quality.packing import BOS
from research.quality.vocabulary import VOCAB_SIZE, Encoder, save_tokenizer, train_tokenizer
from research.quality.worlds import make_world, people
from sglang_lazy.core.segments import parse_segment
from sglang_lazy.serving.tokenization import SegmentTokenizer
from sglang_lazy.verify.prompts import INSTRUCTION, document_text


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer()


@pytest.fixture(scope="module")
def texts():
    world = make_world(random.Random(0), "test", 8)
    return [INSTRUCTION, *(document_text({"title": title, "text": text}) for title, text in world.documents)]


def test_deterministic(tokenizer):
    assert train_tokenizer().to_str() == tokenizer.to_str()
    assert tokenizer.get_vocab_size() == VOCAB_SIZE


def test_round_trip(tokenizer, texts):
    """Generated text, real text and any other text decode to themselves."""
    for text in [*texts, *(document_text(load_sample()[0]["docs"][0]),), "Füße 12\t\n  ?"]:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


def test_few_tokens_for_a_name(tokenizer):
    """A full name, held out or not, is two tokens."""
    for name in random.Random(0).sample(people("test"), 50):
        assert len(tokenizer.encode(f" {name}", add_special_tokens=False).ids) == 2


def test_encoder(tokenizer, texts):
    """Encoding word by word equals encoding the whole text, with a warm cache too."""
    encode = Encoder(tokenizer)
    for text in [*texts, *texts]:
        assert encode(text) == tokenizer.encode(text, add_special_tokens=False).ids


def test_as_the_server_sees_it(tokenizer, texts, tmp_path):
    """Saved and loaded, the server's tokens are BOS and those of training; the chat template gives the same prompt."""
    save_tokenizer(tokenizer, tmp_path, 4096)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    encode = Encoder(tokenizer)
    segments = [texts[0], *({"type": "chunk", "text": text} for text in texts[1:]), "Question: who?\nAnswer:"]
    prompt = SegmentTokenizer(loaded).encode([parse_segment(segment) for segment in segments])
    expected = [BOS, *(token for text in [*texts, "Question: who?\nAnswer:"] for token in encode(text))]
    assert prompt.input_ids == expected
    chat = loaded.apply_chat_template([{"role": "user", "content": "".join(texts)}], tokenize=False)
    assert chat == "<s>" + "".join(texts)
