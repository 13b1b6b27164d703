"""Tokenization by segment, with tokenizers that add special tokens, spaces, both or neither."""

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from sglang_lazy.core.segments import Segment
from sglang_lazy.serving.tokenization import RecentTokens, SegmentTokenizer

CORPUS = ["The river rises in the northern hills and flows south to the sea.", "Who built the bridge over it?"] * 4


def text(value):
    return Segment(False, text=value)


def chunk(value):
    return Segment(True, text=value)


def metaspace(scheme, specials="<s> $A"):
    """As converted from SentencePiece: words carry their leading space as ▁."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return _train(tokenizer, specials)


def legacy():
    """As Llama-2's: a normalizer puts the space before a text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return _train(tokenizer, "<s> $A")


def byte_level(add_prefix_space=False, specials=None):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    return _train(tokenizer, specials, pre_tokenizers.ByteLevel.alphabet())


def _train(tokenizer, specials, alphabet=tuple("abcdefghijklmnopqrstuvwxyzTWP▁.?\n")):
    names = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=names, show_progress=False, initial_alphabet=sorted(alphabet)
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if specials:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=specials, special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


ALL = {
    "metaspace-first": lambda: metaspace("first"),
    "metaspace-always": lambda: metaspace("always"),
    "metaspace-never": lambda: metaspace("never"),
    "legacy": legacy,
    "byte-level": byte_level,
    "byte-level-space": lambda: byte_level(add_prefix_space=True),
    "byte-level-bos": lambda: byte_level(specials="<s> $A"),
    "byte-level-bos-eos": lambda: byte_level(specials="<s> $A </s>"),
}


@pytest.fixture(params=ALL, scope="module")
def tokenizer(request):
    return ALL[request.param]()


def test_one_text_segment_has_sglangs_tokens(tokenizer):
    prompt = SegmentTokenizer(tokenizer).encode([text("The river rises.")])
    assert prompt.input_ids == tokenizer.encode("The river rises.")
    assert prompt.chunks == ()


def test_a_chunk_has_the_same_tokens_wherever_it_stands(tokenizer):
    seen = set()
    for segments in (
        [chunk("Who built it?")],
        [chunk("Who built it?"), text("the sea")],
        [text("The river"), chunk("Who built it?"), text(" the sea")],
        [text("The river "), chunk("the hills"), chunk("Who built it?")],
    ):
        prompt = SegmentTokenizer(tokenizer).encode(segments)
        place = [segment for segment in segments if segment.is_chunk].index(chunk("Who built it?"))
        start, end = prompt.chunks[place]
        seen.add(tuple(prompt.input_ids[start:end]))
    assert len(seen) == 1


def test_the_prompt_decodes_to_the_segments_texts(tokenizer):
    texts = ["The river ", "Who built it?", "the sea", " in the hills"]
    segments = [text(texts[0]), chunk(texts[1]), chunk(texts[2]), text(texts[3])]
    prompt = SegmentTokenizer(tokenizer).encode(segments)
    for (start, end), expected in zip(prompt.chunks, texts[1:3], strict=True):
        pieces = tokenizer.convert_ids_to_tokens(prompt.input_ids[start:end])
        assert "".join(pieces).replace("▁", " ").replace("Ġ", " ") == expected
    assert tokenizer.decode(prompt.input_ids, skip_special_tokens=True).strip() == "".join(texts)


def test_special_tokens_are_added_once_outside_chunks(tokenizer):
    prompt = SegmentTokenizer(tokenizer).encode([chunk("the hills"), text(" and "), chunk("the sea")])
    whole = tokenizer.encode("x")
    for special in (1, 2):
        assert prompt.input_ids.count(special) == whole.count(special)
    assert prompt.chunks[0][0] == (1 if 1 in whole else 0)
    assert prompt.chunks[-1][1] == len(prompt.input_ids) - (1 if 2 in whole else 0)


def test_known_chunks_are_not_encoded_again(tokenizer, monkeypatch):
    segments = [text("The river "), chunk("Who built it?"), chunk("the hills"), text("Who built it?")]
    expected = SegmentTokenizer(tokenizer).encode(segments)
    segment_tokenizer, encoded = SegmentTokenizer(tokenizer), []
    encode_later = segment_tokenizer.encode_later
    monkeypatch.setattr(
        segment_tokenizer, "encode_later", lambda texts: encode_later([encoded.append(one) or one for one in texts])
    )
    segment_tokenizer.encode([chunk("Who built it?")]).input_ids.clear()
    encoded.clear()
    assert segment_tokenizer.encode(segments) == expected
    assert encoded == ["the hills", "Who built it?"], "only text and new chunks are encoded"


def test_the_least_recently_used_tokens_are_dropped():
    one = RecentTokens(1 << 20)
    one.add(None, "aa", [97])
    recent = RecentTokens(capacity=3 * one._tokens.num_bytes)
    for text in ("aa", "bb", "cc"):
        recent.add(None, text, [ord(text[0])])
    assert recent.get(None, "aa") == [97]
    recent.add(None, "cc", [99])
    recent.add(None, "dd", [100])
    assert [recent.get(None, text) for text in ("aa", "bb", "cc", "dd")] == [[97], None, [99], [100]]
    recent.add(None, "longer than that" * 100, [1])
    assert recent.get(None, "longer than that" * 100) is None and recent.get(None, "dd") == [100]


def test_a_tenant_does_not_profit_from_what_another_sent(tokenizer, monkeypatch):
    """Encoding takes time, so whether a document is encoded must not depend on other tenants."""
    segment_tokenizer = SegmentTokenizer(tokenizer)
    encode_later, encoded = segment_tokenizer.encode_later, []
    monkeypatch.setattr(
        segment_tokenizer, "encode_later", lambda texts: encode_later([encoded.append(one) or one for one in texts])
    )
    prompt = [text("Read: "), chunk("a document that only one of them has")]
    for tenant in ("a", "b", None, "a", "b", None):
        segment_tokenizer.encode(prompt, tenant)
    assert encoded == ["a document that only one of them has"] * 3


def test_token_ids_are_used_unchanged(tokenizer):
    ids = Segment(True, input_ids=[7, 8]), Segment(False, input_ids=[9])
    prompt = SegmentTokenizer(tokenizer).encode(ids)
    assert prompt == ([7, 8, 9], ((0, 2),))


def test_a_chunk_without_tokens_is_refused():
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.normalizer = normalizers.Strip()
    with pytest.raises(ValueError, match=r"segments\[1\].*gives no tokens"):
        SegmentTokenizer(tokenizer).encode([text("The"), chunk("  ")])


def test_slow_tokenizers_encode_behind_a_sentinel():
    """A slow tokenizer always prepends a space, which the sentinel absorbs."""

    class Slow:
        is_fast = False
        fast = metaspace("always")

        def encode(self, text, **kwargs):
            return self.fast.encode(text, **kwargs)

        def convert_ids_to_tokens(self, ids):
            return self.fast.convert_ids_to_tokens(ids)

    segments = [text("The river "), chunk("the hills"), text("\n\nWho?")]
    assert SegmentTokenizer(Slow()).encode(segments) == SegmentTokenizer(Slow.fast).encode(segments)
