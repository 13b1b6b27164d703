"""How a prompt is cut into slices of chunks and spans of text, how these are named, and the order of its row."""

import itertools
from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_lazy.core.keys import Namespace
from sglang_lazy.core.prompt import Images, LinkedPrompt
from sglang_lazy.core.row_order import Row
from sglang_lazy.core.segments import PromptLayout

TEXT, CHUNK = False, True
LEADING = Namespace("text", None, None)
repeatable = settings(derandomize=True, deadline=None, database=None)

tokens = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)
tenants = st.sampled_from([(None, None), ("a", None), (None, "a"), ("", None), ("a", "a"), ("chunk", None)])


@st.composite
def chunks_with_holes(draw):
    """The kept ranges of a chunk, and its tokens."""
    chunk = draw(tokens)
    bounds = st.integers(0, len(chunk))
    cuts = sorted(draw(st.one_of(st.just([0, len(chunk)]), st.sets(bounds, max_size=2), st.sets(bounds, max_size=4))))
    return tuple(zip(cuts[: len(cuts) // 2 * 2 : 2], cuts[1::2], strict=True)), chunk


segments = st.lists(st.one_of(st.tuples(st.just(TEXT), tokens), chunks_with_holes()), min_size=1, max_size=5)


def build(segments, extra_key=None, cache_salt=None, preamble=None):
    """The prompt of `segments`: pairs of CHUNK, TEXT or a chunk's kept ranges, and tokens."""
    ids, chunks, kept = array("q"), [], []
    for use, segment in segments:
        if use is not TEXT:
            chunks.append((len(ids), len(ids) + len(segment)))
            kept.append(((0, len(segment)),) if use is CHUNK else use)
        ids.extend(segment)
    return ids, LinkedPrompt.build(ids, PromptLayout(tuple(chunks), cache_salt), kept, extra_key, preamble)


def path_before(segments, start):
    """What a text token at position `start` sees: text token by token, and kept ranges with all that they depend on."""
    path, position = [], 0
    prompt_len = sum(len(segment) for _, segment in segments)
    for use, segment in segments:
        limit = min(len(segment), prompt_len - 1 - position)
        ranges = {TEXT: (), CHUNK: ((0, len(segment)),)}.get(use, use)
        i = 0
        while i < len(segment) and position + i < start:
            end = next((min(end, limit) for begin, end in ranges if begin == i < limit), None)
            path.append(segment[i] if end is None else (i, segment[:end]))
            i = i + 1 if end is None else end
        position += len(segment)
    return tuple(path)


@st.composite
def rows(draw):
    """A prompt, the number of cached tokens of each span, and the number of tokens generated before."""
    ids, prompt = build(draw(segments))
    cached = [draw(st.integers(0, len(span.positions))) for span in prompt.spans]
    return ids, prompt, cached, draw(st.integers(0, 3))


@repeatable
@given(segments)
def test_cut_covers_every_position_once(segments):
    """Slices and text spans partition the prompt, and the last token is text."""
    ids, prompt = build(segments)
    kept = [position for chunk in prompt.chunks for position in chunk.positions.tolist()]
    assert prompt.num_chunk_tokens == len(kept)
    assert all(span.positions.dtype == np.int32 for span in prompt.spans)
    text = [position for span in prompt.spans for position in span.positions.tolist()]
    assert all(one.end <= other.start for one, other in itertools.pairwise(prompt.spans))
    assert text == sorted(text) and sorted(kept + text) == list(range(len(ids)))
    assert prompt.spans[-1].end == len(ids)


@repeatable
@given(segments)
def test_slices_keep_what_the_policy_keeps(segments):
    """Except for the prompt's last token; a chunk that keeps nothing is no slice."""
    ids, prompt = build(segments)
    slices, position, index = {chunk.index: chunk for chunk in prompt.chunks}, 0, 0
    for use, segment in segments:
        if use is not TEXT:
            ranges = ((0, len(segment)),) if use is CHUNK else use
            expected = {position + i for begin, end in ranges for i in range(begin, end)} - {len(ids) - 1}
            chunk = slices.pop(index, None)
            kept = set() if chunk is None else set(chunk.positions.tolist())
            assert kept == expected and (chunk is not None) == bool(expected)
            if chunk is not None:
                assert tuple(chunk.tokens) == segment and chunk.start == position
                assert chunk.num_kept == len(kept)
                assert chunk.num_needed == max(kept) + 1 - position
            index += 1
        position += len(segment)
    assert not slices


@repeatable
@given(rows())
def test_row_is_a_permutation(row_case):
    """A row holds every position once: kept tokens, then cached text, then the rest, each in position order."""
    ids, prompt, cached, generated = row_case
    row = Row(prompt, cached, len(ids) + generated)
    assert sorted(row.positions) == list(range(len(ids) + generated))
    ids += array("q", range(generated))
    assert list(row.permuted(ids)) == [ids[position] for position in row.positions]
    in_chunks, in_cached = prompt.num_chunk_tokens, sum(cached)
    kept = [position for chunk in prompt.chunks for position in chunk.positions]
    assert list(row.positions[:in_chunks]) == kept
    for part in (row.positions[in_chunks : in_chunks + in_cached], row.positions[in_chunks + in_cached :]):
        assert list(part) == sorted(part)


@repeatable
@given(rows(), st.data())
def test_row_queries_match_brute_force(row_case, data):
    """`positions_of` goes on with generated tokens; `available` counts how much of a span's beginning is in the row."""
    ids, prompt, cached, generated = row_case
    row = Row(prompt, cached, len(ids) + generated)
    entries = [*row.positions.tolist(), *range(len(row.positions), len(row.positions) + 4)]
    start = data.draw(st.integers(0, len(entries)))
    end = data.draw(st.integers(start, len(entries)))
    positions = row.positions_of(start, end)
    assert positions.tolist() == entries[start:end]
    assert positions.dtype == np.int32

    row_len = data.draw(st.integers(prompt.num_chunk_tokens + sum(cached), len(entries)))
    present = set(entries[:row_len])
    for i, span in enumerate(prompt.spans):
        positions = span.positions.tolist()
        if i == len(prompt.spans) - 1:
            positions += range(len(ids), len(entries))
            for end in range(len(entries)):
                assert span.count_before(end) == sum(position < end for position in positions)
        count = next((k for k, position in enumerate(positions) if position not in present), len(positions))
        assert row.available(i, row_len) == count
        assert span.first(count).tolist() == positions[:count]


def test_chunk_last_leaves_its_last_token_in_context():
    """A chunk that ends the prompt is used without its last token, though all of it is computed and cached."""
    ids, prompt = build([(TEXT, (9,)), (CHUNK, (1, 2, 3))])
    (chunk,) = prompt.chunks
    assert (chunk.start, chunk.kept, chunk.tokens) == (1, ((0, 2),), array("q", [1, 2, 3]))
    assert [span.positions.tolist() for span in prompt.spans] == [[0], [3]]


def test_chunk_of_one_token_last_is_text():
    """A final chunk of one token has nothing to share and becomes text."""
    for before in ([], [(TEXT, (9,))], [(CHUNK, (2,))]):
        _, prompt = build([*before, (CHUNK, (1,))])
        assert len(prompt.chunks) == sum(is_chunk for is_chunk, _ in before)
        assert prompt.spans[-1].end == len(before) + 1


def test_adjacent_chunks_have_no_text_between():
    """No empty span is made."""
    _, prompt = build([(CHUNK, (1, 2)), (CHUNK, (3,)), (TEXT, (4,))])
    assert [chunk.positions.tolist() for chunk in prompt.chunks] == [[0, 1], [2]]
    assert [span.positions.tolist() for span in prompt.spans] == [[3]]


def test_recomputed_tokens_join_the_adjacent_text():
    """Tokens before the first kept one join the text before the chunk."""
    _, prompt = build([(TEXT, (9,)), (((1, 2), (3, 4)), (1, 2, 3, 4, 5)), (TEXT, (8,)), (CHUNK, (1,)), (TEXT, (7,))])
    assert [span.positions.tolist() for span in prompt.spans] == [[0, 1], [3, 5, 6], [8]]


def test_chunks_and_text_behind_them_depend_on_the_preamble():
    """But leading text does not depend on it, nor does a prompt without slices."""
    segments = [(TEXT, (7,)), (CHUNK, (1, 2)), (TEXT, (3,))]
    prompts = [build(segments, preamble=array("q", ids))[1] for ids in ((), (1,), (1, 2))]
    assert len({prompt.chunks[0].key for prompt in prompts}) == 3
    assert len({prompt.spans[1].namespace for prompt in prompts}) == 3
    assert {prompt.spans[0].namespace for prompt in prompts} == {LEADING}
    assert [prompt.chunks[0].offset for prompt in prompts] == [1, 0, -1]


@pytest.mark.parametrize("token", [-1, 1 << 31, (1 << 32) + 1])
@pytest.mark.parametrize("kind", [TEXT, CHUNK])
def test_token_ids_that_no_vocabulary_has_are_refused(token, kind):
    """Paths are hashed over 32 bits of each id; ids that differ only above them would collide."""
    with pytest.raises(ValueError, match=f"token id {token} "):
        build([(CHUNK, (1,)), (kind, (2, token)), (TEXT, (3,))])


def test_same_chunk_has_one_key():
    """Uses of a chunk share their key at any position, in full or without the last token."""
    _, prompt = build([(CHUNK, (1, 2)), (TEXT, (4,)), (CHUNK, (1, 2)), (CHUNK, (1, 2, 3)), (CHUNK, (1, 2))])
    first, second, longer, last = (chunk.key for chunk in prompt.chunks)
    assert first == second == last != longer
    assert [chunk.num_kept for chunk in prompt.chunks] == [2, 2, 3, 1]


@repeatable
@given(segments, segments, tenants, tenants)
def test_namespaces_name_paths(one, other, one_tenant, other_tenant):
    """Text after chunks shares a namespace exactly if the path up to the last kept token and the tenant are the
    same."""
    prompts = []
    for segments, tenant in ((one, one_tenant), (other, other_tenant)):
        _, prompt = build(segments, *tenant)
        slices = [(chunk.start + chunk.kept[0][0], chunk.start + chunk.num_needed) for chunk in prompt.chunks]
        prompts.append(
            [
                (span, path_before(segments, max(end for first, end in slices if first < span.start)), tenant)
                for span in prompt.spans
                if span.namespace.variant is not None
            ]
        )
    for span, path, tenant in prompts[0]:
        for other_span, other_path, other_tenant in prompts[1]:
            assert (span.namespace == other_span.namespace) == (path == other_path and tenant == other_tenant)


@pytest.mark.parametrize(
    "other",
    [
        [(TEXT, (1, 2)), (CHUNK, (3, 4)), (TEXT, (5,))],
        [(CHUNK, (1, 2, 3)), (CHUNK, (4,)), (TEXT, (5,))],
        [(CHUNK, (1,)), (CHUNK, (2, 3, 4)), (TEXT, (5,))],
        [(CHUNK, (1, 2, 3, 4)), (TEXT, (5,))],
        [(CHUNK, (1, 2)), (TEXT, (3, 4, 5))],
        [(CHUNK, (3, 4)), (CHUNK, (1, 2)), (TEXT, (5,))],
        [(CHUNK, (1, 2)), (((0, 1),), (3, 4)), (TEXT, (5,))],
        [(CHUNK, (1, 2)), (((1, 2),), (3, 4)), (TEXT, (5,))],
        [(((1, 2),), (1, 2)), (CHUNK, (3, 4)), (TEXT, (5,))],
        [(CHUNK, (1, 2)), ((), (3, 4)), (TEXT, (5,))],
    ],
    ids=[
        "text for chunk",
        "boundary right",
        "boundary left",
        "merged",
        "chunk for text",
        "other order",
        "hole at the end",
        "hole at the beginning",
        "hole before",
        "nothing kept",
    ],
)
def test_text_after_different_paths_never_shares(other):
    """The same tokens under other boundaries or of other kinds have other namespaces."""
    _, prompt = build([(CHUNK, (1, 2)), (CHUNK, (3, 4)), (TEXT, (5,))])
    _, other_prompt = build(other)
    namespaces = [{span.namespace for span in prompt.spans} for prompt in (prompt, other_prompt)]
    assert not (namespaces[0] & namespaces[1] - {LEADING})


def test_a_slice_depends_on_what_stands_before_it_in_its_chunk():
    """Chunks that differ only in a hole give different KV to the kept token after it."""
    one, other = (build([(((1, 2),), (token, 2)), (TEXT, (3,))])[1].spans[-1] for token in (1, 7))
    assert one.namespace != other.namespace


def test_slice_and_whole_chunk_are_different_paths():
    """Text after a whole chunk must not match the last token of a prompt that ends with that chunk, but matches that of
    a longer one."""
    whole = build([(CHUNK, (1, 2)), (TEXT, (3,))])[1].spans[-1]
    ends_in_same = build([(CHUNK, (1, 2))])[1].spans[-1]
    ends_in_longer = build([(CHUNK, (1, 2, 3))])[1].spans[-1]
    assert whole.namespace != ends_in_same.namespace
    assert whole.namespace == ends_in_longer.namespace  # both are text token 3 after the tokens 1, 2 seen as one chunk


@pytest.mark.parametrize("extra_key", [None, "tenant"])
def test_cache_salt_and_extra_key_separate_tenants(extra_key):
    """Chunks, the text after them and the text before them are separated by extra_key and cache_salt."""
    prompts = {
        (key, salt): build([(TEXT, (7,)), (CHUNK, (1, 2)), (TEXT, (3,))], key, salt)[1]
        for key in (extra_key, "other", "")
        for salt in (None, "salt", "")
    }
    names = [
        name
        for prompt in prompts.values()
        for name in (prompt.chunks[0].key.namespace, *(span.namespace for span in prompt.spans))
    ]
    assert len(set(names)) == len(names)
    assert all(isinstance(name, tuple) for name in names)


def with_images(digests, places=None):
    """Text 7, an image, a chunk and an image of two tokens each, text 7; the images share a pad value, of 63 bits."""
    pad = (1 << 62) + 9
    ids = array("q", [7, pad, pad, 1, 2, pad, pad, 7])
    images = Images([None, None], [(1, 3), (5, 7)], digests, np.arange(8) if places is None else np.array(places))
    return LinkedPrompt.build(ids, PromptLayout(((3, 5),)), [((0, 2),)], None, images=images)


def test_images_start_spans():
    prompt = with_images([b"a", b"b"], [0, 1, 1, 2, 3, 4, 4, 5])
    assert [(span.positions.tolist(), span.image_len) for span in prompt.spans] == [
        ([0], 0),
        ([1, 2], 2),
        ([5, 6, 7], 2),
    ]
    assert prompt.spans[0].namespace == LEADING and all(span.namespace.variant for span in prompt.spans[1:])
    assert [chunk.offset for chunk in prompt.chunks] == [2]


def test_images_that_share_a_pad_value_share_no_path():
    """The first image is part of every later path, the second only of its own span's."""
    one, other, later = with_images([b"a", b"b"]), with_images([b"c", b"b"]), with_images([b"a", b"c"])
    namespaces = [[span.namespace for span in prompt.spans] for prompt in (one, other, later)]
    assert namespaces[0][1] == namespaces[2][1] and namespaces[0][1] != namespaces[1][1]
    assert len({names[2] for names in namespaces}) == 3
    assert with_images([b"a", b"b"]).spans[2].namespace == namespaces[0][2]
