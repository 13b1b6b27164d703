"""The entries of a prefill, listed on the host: which query rows see which stretches of keys."""

import numpy

# Tiles per multiprocessor that a batch is cut into where its entries give fewer, and the fewest slots of a piece.
FA2_FILL, FA3_FILL, MIN_PIECE = 1, 2, 128


def list_entries(qo_indptr, q_positions, kv_indptr, kv_positions, num_segments, segment_ends, segment_offsets):
    """[(first row, rows, slots, offset, causal)] in the order of kv_indices, and the query rows by position.

    A stretch is what becomes visible to one row, and so to all later ones, in one segment, in the cached text or in the
    new text. Rows count in the order of their positions. The new text is one causal entry, with the cached text where
    every row sees all of that.
    """
    entries, order = [], []
    for b, count in enumerate(num_segments):
        begin, end = int(qo_indptr[b]), int(qo_indptr[b + 1])
        by_position = numpy.argsort(q_positions[begin:end], kind="stable")
        order.append(begin + by_position)
        asked = q_positions[begin:end][by_position]
        positions = kv_positions[kv_indptr[b] : kv_indptr[b + 1]]
        cached = len(positions) - (end - begin)
        bounds = [0, *segment_ends[b][:count]]
        text = bounds[-1]
        for low, high, offset in zip(bounds, bounds[1:], segment_offsets[b], strict=False):
            entries += stretches(positions[low:high], asked, begin, offset)
        new_seen = numpy.searchsorted(positions[cached:], asked, side="right")
        causal = len(asked) > 0 and numpy.array_equal(new_seen, numpy.arange(1, len(asked) + 1))
        if causal and (cached == text or positions[cached - 1] <= asked[0]):
            entries.append((begin, len(asked), len(positions) - text, 0, 1))
            continue
        entries += stretches(positions[text:cached], asked, begin, 0)
        if causal:
            entries.append((begin, len(asked), len(asked), 0, 1))
        else:
            entries += stretches(positions[cached:], asked, begin, 0)
    return entries, numpy.concatenate([*order, numpy.zeros(0)]).astype(numpy.int32)


def stretches(positions, asked, begin, offset):
    """The stretches of ascending positions by the rows, ascending in `asked`, that see them; the last may see none."""
    seen = numpy.searchsorted(positions, asked, side="right")
    levels, first = numpy.unique(seen, return_index=True)
    low = 0
    for level, row in zip(levels.tolist(), first.tolist(), strict=True):
        if level > low:
            yield begin + row, len(asked) - row, level - low, offset, 0
            low = level
    if low < len(positions):
        yield begin, 0, len(positions) - low, offset, 0


def cut_entries(entries, backend, num_qo_heads, num_kv_heads, multiprocessors):
    """Cut the entries that are not causal into pieces, of MIN_PIECE slots at least, that keep all multiprocessors busy.

    This is the split-KV of FlashInfer's planner, but the pieces are merged where the segments are merged anyway.
    """
    _, rows, slots, _, causal = entries.T
    if backend == "fa3":
        tiles, fill = -(-rows // 128) * num_qo_heads, FA3_FILL * multiprocessors
    else:
        tiles, fill = -(-rows * (num_qo_heads // num_kv_heads) // 128) * num_kv_heads, FA2_FILL * multiprocessors
    tiles = numpy.where(causal == 1, 0, tiles)
    size, pieces = max(MIN_PIECE, slots.max(initial=0)), numpy.ones_like(slots)
    while (tiles * pieces).sum() < fill and size > MIN_PIECE:
        size = max(MIN_PIECE, size // 2)
        pieces = numpy.where(tiles > 0, numpy.maximum(1, -(-slots // size)), 1)
    at = numpy.arange(pieces.sum()) - numpy.repeat(pieces.cumsum() - pieces, pieces)
    cut, step = entries[numpy.repeat(numpy.arange(len(entries)), pieces)], numpy.repeat(-(-slots // pieces), pieces)
    cut[:, 2] = numpy.minimum(step, cut[:, 2] - at * step)
    return cut
