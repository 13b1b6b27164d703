"""The work items of a prefill, listed on the host: the query rows that see each range of KV tokens."""

from collections.abc import Iterator, Sequence

import numpy

# The least number of tiles per SM into which a batch is cut, and of slots in a piece.
FA2_FILL, FA3_FILL, MIN_PIECE = 1, 2, 128

Item = tuple[int, int, int, int, int]
"""First row, rows, slots, offset, causal."""


def list_items(
    qo_indptr: numpy.ndarray,
    q_positions: numpy.ndarray,
    kv_indptr: numpy.ndarray,
    kv_positions: numpy.ndarray,
    num_segments: Sequence[int],
    segment_ends: Sequence[Sequence[int]],
    segment_offsets: Sequence[Sequence[int]],
) -> tuple[list[Item], numpy.ndarray]:
    """The items in the order of kv_indices, and the query rows by position.

    The KV tokens of an item are in one segment, in the cached text or in the new text, and become visible to one row
    and all later ones. Rows are counted in the order of positions. The new text is one causal item, together with the
    cached text if all rows see all of it.
    """
    items: list[Item] = []
    order = []
    for b, count in enumerate(num_segments):
        begin, end = int(qo_indptr[b]), int(qo_indptr[b + 1])
        by_position = numpy.argsort(q_positions[begin:end], kind="stable")
        order.append(begin + by_position)
        rows = q_positions[begin:end][by_position]
        positions = kv_positions[kv_indptr[b] : kv_indptr[b + 1]]
        cached = len(positions) - (end - begin)
        bounds = [0, *segment_ends[b][:count]]
        text = bounds[-1]
        for low, high, offset in zip(bounds, bounds[1:], segment_offsets[b], strict=False):
            items += _stretches(positions[low:high], rows, begin, offset)
        new_seen = numpy.searchsorted(positions[cached:], rows, side="right")
        causal = len(rows) > 0 and numpy.array_equal(new_seen, numpy.arange(1, len(rows) + 1))
        if causal and (cached == text or positions[cached - 1] <= rows[0]):
            items.append((begin, len(rows), len(positions) - text, 0, 1))
            continue
        items += _stretches(positions[text:cached], rows, begin, 0)
        if causal:
            items.append((begin, len(rows), len(rows), 0, 1))
        else:
            items += _stretches(positions[cached:], rows, begin, 0)
    return items, numpy.concatenate([*order, numpy.zeros(0)]).astype(numpy.int32)


def _stretches(positions: numpy.ndarray, rows: numpy.ndarray, begin: int, offset: int) -> Iterator[Item]:
    """Split ascending positions into ranges by the rows, also ascending, that see them; no row may see the last one."""
    seen = numpy.searchsorted(positions, rows, side="right")
    levels, first = numpy.unique(seen, return_index=True)
    low = 0
    for level, row in zip(levels.tolist(), first.tolist(), strict=True):
        if level > low:
            yield begin + row, len(rows) - row, level - low, offset, 0
            low = level
    if low < len(positions):
        yield begin, 0, len(positions) - low, offset, 0


def cut_items(items: numpy.ndarray, backend: str, num_qo_heads: int, num_kv_heads: int, num_sms: int) -> numpy.ndarray:
    """Cut the items that are not causal into pieces, of MIN_PIECE slots at least, that keep all SMs busy.

    This is the split-KV of FlashInfer's planner, but pieces are merged together with segments.
    """
    _, rows, slots, _, causal = items.T
    if backend == "fa3":
        tiles, fill = -(-rows // 128) * num_qo_heads, FA3_FILL * num_sms
    else:
        tiles, fill = -(-rows * (num_qo_heads // num_kv_heads) // 128) * num_kv_heads, FA2_FILL * num_sms
    tiles = numpy.where(causal == 1, 0, tiles)
    size, pieces = max(MIN_PIECE, slots.max(initial=0)), numpy.ones_like(slots)
    while (tiles * pieces).sum() < fill and size > MIN_PIECE:
        size = max(MIN_PIECE, size // 2)
        pieces = numpy.where(tiles > 0, numpy.maximum(1, -(-slots // size)), 1)
    at = numpy.arange(pieces.sum()) - numpy.repeat(pieces.cumsum() - pieces, pieces)
    cut, step = items[numpy.repeat(numpy.arange(len(items)), pieces)], numpy.repeat(-(-slots // pieces), pieces)
    cut[:, 2] = numpy.minimum(step, cut[:, 2] - at * step)
    return cut
