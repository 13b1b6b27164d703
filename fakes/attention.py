"""Attention without a model: checks that each new token sees the right KV, and fakes probe measurements."""

import itertools
import math
from collections.abc import Iterable

from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

from fakes.requests import positions_of
from sglang_lazy.attention.probes import ProbeSums
from sglang_lazy.attention.rows import LinkedBatch
from sglang_lazy.attention.table import SegmentTable
from sglang_lazy.core.state import fill_of


def weight(query_position: int, query_token: int, position: int, token: int) -> int:
    """The attention weight of a query token for a token it sees; an integer, so that sums are exact."""
    return (5 * query_token + 3 * token + query_position + 2 * position) % 7


def most_attended(req: Req, chunks: Iterable[tuple[int, int]], ratio: float) -> set[int]:
    """Positions of the `ratio` of tokens in `chunks` that get the most attention from the text after the last chunk."""
    ids = req.origin_input_ids
    text = range(min(req.layout.chunks[-1][1], len(ids) - 1), len(ids))
    candidates = [i for chunk in chunks for i in range(*chunk) if i < len(ids) - 1]
    best = sorted(candidates, key=lambda i: (-sum(weight(j, ids[j], i, ids[i]) for j in text), i))
    return set(best[: math.ceil(ratio * len(best))])


def attend(batch: ScheduleBatch, table: SegmentTable | None) -> None:
    """Check what a prefill batch attends to, and fill in its probe measurements.  table: None without chunk reuse."""
    if table is None or table.current is None:
        for req in batch.reqs:  # each new token sees all tokens before it
            positions = [_position(req, place) for place in positions_of(req, 0, req.kv.kv_committed_len)]
            start = req.prefix_len
            assert sorted(positions[:start]) + positions[start:] == list(range(len(positions)))
        return
    _check(batch, table.current)
    if table.probes is not None:
        _measure(batch, table.current, table.probes)


def _check(batch: ScheduleBatch, current: LinkedBatch) -> None:
    """Check that tokens are computed at their positions, and that a fill's tokens see no chunk but their own."""
    places = [(req, positions_of(req, req.prefix_len, req.kv.kv_committed_len)) for req in batch.reqs]
    assert current.q_positions.tolist() == [_position(req, place) for req, new in places for place in new]
    for row in current.rows:
        req = batch.reqs[row.request]
        if fill_of(req) is not None:
            seen = [_path(req.contents[place]) for part in row.ranges for place in positions_of(req, *part)]
            assert seen == [seen[-1][: i + 1] for i in range(len(seen))]


def _measure(batch: ScheduleBatch, current: LinkedBatch, probes: ProbeSums) -> None:
    """Add the batch's attention weights to the probe's sums, in place of the kernel."""
    new = [token for req in batch.reqs for token in req.get_fill_ids()[req.prefix_len :]]
    queries = [(position, new[i]) for position, i in zip(probes.q_positions.tolist(), probes.tokens, strict=True)]
    assert probes.max_extend_len == max(probes.qo_indptr.diff())
    place = 0
    for i, (start, end) in zip(current.linked, itertools.pairwise(probes.qo_indptr.tolist()), strict=True):
        row = current.rows[i]
        for key in row.positions.tolist():
            if start < end:
                token = batch.reqs[row.request].origin_input_ids[key]
                seen_by = [query for query in queries[start:end] if query[0] >= key]
                probes.sums[place] += sum(weight(*query, key, token) for query in seen_by)
            place += 1


def _path(content: tuple) -> tuple[int, ...]:
    """The tokens that the KV of a fill's token depends on, up to its own."""
    kind, _, _, path = content
    return path if kind == "text" else sum(path, ())


def _position(req: Req, place: int) -> int:
    """The position of a token; see `positions_of`."""
    return place if fill_of(req) is None else len(_path(req.contents[place])) - 1
