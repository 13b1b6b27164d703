"""Rows of fills: laid out over cached KV, and published to the tree when the batch that computes them is formed."""

import time

import torch

from sglang_lazy.cache.node import Node
from sglang_lazy.chunks.row_cache import RowCache
from sglang_lazy.core.fills import Fill
from sglang_lazy.core.keys import ChunkKey
from sglang_lazy.core.request import Request
from sglang_lazy.core.row_order import FillRow
from sglang_lazy.core.state import ChunkNodes, RowNodes


def match(rows: RowCache, req: Request, fill: Fill) -> tuple[torch.Tensor, RowNodes]:
    """Lay out the row of a fill; returns the slots of the cached parts of its preamble and chunks, and their nodes.

    Sets `fill.row` and puts the request's tokens into its order. The last token of each chunk is always
    computed, as SGLang does with prompts. With recurrent layers all of it is: a chunk's beginning has no state.
    """
    fill.began = time.perf_counter()
    pieces, nodes, spreads, cached = [], [], [], []
    for part in fill.parts:
        tokens = part.tokens if part.chunk is None else part.tokens[:-1]
        if rows.store.states is not None:
            tokens = tokens[:0]
        slots, node = rows.tree.find(tokens, part.namespace, complete=part.chunk is not None)
        cached.append(len(slots))
        if cached[-1]:
            pieces.append(slots)
            nodes.append(node)
            spreads.append(cached[-1] if part.chunk is not None else 0)  # its prompts may read all of a chunk
    fill.row = FillRow([len(part.tokens) for part in fill.parts], cached, bool(fill.preamble))
    rows.requests.lay_out(req, fill.row.permuted(rows.requests.prompt(req)))
    return torch.cat(pieces) if pieces else rows.no_slots, RowNodes(ChunkNodes([], []), nodes, spreads)


def reserve(rows: RowCache, fill: Fill) -> None:
    """Give a fill that gets a row slots for the states of recurrent layers, if there are any, evicting as needed."""
    if rows.store.states is not None and not fill.states:
        fill.states = rows.store.states.allocate(len(fill.parts))
        fill.own_states = list(fill.states)


def publish(rows: RowCache, req: Request, fill: Fill, slots: torch.Tensor) -> dict[ChunkKey, Node]:
    """Give the chunks and the preamble that a fill's batch completes to the tree, locked until the fill ends.

    slots: int64, the slots that the batch writes, following the fill's cached prefix.
    Returns the node where each chunk ends, by key.

    If the tree has slots for the same tokens already, as of a chunk with the same beginning, the fill keeps its own in
    `duplicates`, since its batch writes to them.
    """
    requests, num_cached = rows.requests, rows.requests.num_cached(req)
    slots = torch.cat([rows.read(req, 0, num_cached), slots]) if num_cached else slots
    nodes_by_key, duplicates, lent, ends = {}, [rows.no_slots], [], []
    priority = requests.priority(req)
    for part, part_slots, cached in zip(fill.parts, fill.row.split(slots), fill.row.cached, strict=True):
        num_present, node, shared = rows.tree.add(part.tokens, part.namespace, part_slots, priority, cached)
        if part.chunk is not None:
            rows.store.adopt(part.chunk, node)
            nodes_by_key[part.chunk.key] = node
        if num_present > cached:
            duplicates.append(part_slots[cached:num_present])
        lent.append(shared)
        ends.append(node)
    if (states := rows.store.states) is not None:
        # Nobody else begins in the state of a preamble, since all fills compute theirs.
        computed = zip(fill.parts, ends, fill.states, strict=True)
        fill.own_states = [slot for part, node, slot in computed if part.chunk is None or not states.give(node, slot)]
    nodes = RowNodes(ChunkNodes([], []), ends, fill.row.num_computed)
    rows.move_lock(req, nodes)
    num_tokens = len(requests.prompt(req))
    requests.own(req, num_tokens)
    fill.published, fill.duplicates, fill.lent = True, torch.cat(duplicates), torch.cat(lent)
    rows.store.counts.num_filled_tokens += num_tokens - sum(fill.row.cached)
    return nodes_by_key


def end(rows: RowCache, req: Request, fill: Fill) -> None:
    """Free what a fill that ends or is retracted has beside its row, which SGLang releases."""
    if rows.store.states is not None:
        rows.store.states.pool.free(fill.own_states)
    if fill.published:
        rows.take_lent(fill.lent)
        rows.device.free(fill.duplicates)
        rows.store.back_up(rows.requests.nodes(req).spans)
        rows.store.counts.fill_seconds.observe(time.perf_counter() - fill.began)
