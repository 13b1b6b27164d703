"""What a batch's new tokens are to recurrent layers: pieces, each computed from the state before it.

A piece is text between chunks, or a chunk that is computed alone. Each is a sequence to the layers' own kernels.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from sgl_kernel_lazy.states import StateRows
from sglang_lazy.core.device import ints_to_device


class Chunk(NamedTuple):
    """A chunk between pieces, cached or computed by the same batch.  slot: in the pool of states."""

    slot: int


class Text(NamedTuple):
    """A piece of new text."""

    num_tokens: int


class TextRow(NamedTuple):
    """New text of a request, and the chunks between what came before and its end, in the prompt's order.

    slot: the request's, in SGLang's pool.
    resumed: whether it goes on from the slot's state; otherwise from zero.
    parts: end in text.
    keeps: the slot, in the pool of states, of the first part, which is text that begins the prompt; None if its state
        is not kept.
    """

    slot: int
    resumed: bool
    parts: Sequence[Chunk | Text]
    keeps: int | None = None


class ChunkRow(NamedTuple):
    """New tokens of a chunk that is computed alone, or after a preamble.

    slot: in the pool of states.
    resumed: whether an earlier batch has computed its first tokens, and left their states in the slot.
    after: the slot of the preamble, which is cached or computed before it by the same batch.
    """

    slot: int
    num_tokens: int
    resumed: bool = False
    after: int | None = None


class Owned(NamedTuple):
    """Pieces and their slots, int64 each, which PyTorch would convert others to in every layer."""

    pieces: torch.Tensor
    slots: torch.Tensor

    def store(self, of_pieces: torch.Tensor, of_slots: torch.Tensor) -> None:
        """Copy from pieces to slots.  Both: a first dimension of theirs, the others alike."""
        of_slots[self.slots] = of_pieces[self.pieces].to(of_slots.dtype)

    def load(self, of_pieces: torch.Tensor, of_slots: torch.Tensor) -> None:
        """Copy from slots to pieces."""
        of_pieces[self.pieces] = of_slots[self.slots].to(of_pieces.dtype)


class Inputs(NamedTuple):
    """The convolutions' last inputs before each piece, `width` of them.

    request_slots, chunk_slots: int64 [num_pieces], whose last inputs these are; 0 where it is the other's, or nobody's.
    of_chunk, of_nobody: bool [num_pieces].
    behind: int64 [m], the pieces that follow tokens of the same batch; None if there are none.
    tokens: int64 [m, width], these tokens, where `is_token`; elsewhere 0.
    earlier: int64 [m, width], elsewhere piece * width + column of another piece's last inputs.
    is_token: bool [m, width].
    """

    request_slots: torch.Tensor
    chunk_slots: torch.Tensor
    of_chunk: torch.Tensor
    of_nobody: torch.Tensor
    behind: torch.Tensor | None
    tokens: torch.Tensor
    earlier: torch.Tensor
    is_token: torch.Tensor

    @classmethod
    def of(cls, *tensors: torch.Tensor, width: int) -> "Inputs":
        """Of integers in the order of the fields, flat."""
        request_slots, chunk_slots, of_chunk, of_nobody, behind, *columns = (each.long() for each in tensors)
        tokens, earlier, is_token = (column.view(-1, width) for column in columns)
        return cls(
            request_slots, chunk_slots, of_chunk.bool(), of_nobody.bool(), behind if len(behind) else None,
            tokens, earlier, is_token.bool(),
        )  # fmt: skip

    def known(self, requests: torch.Tensor, chunks: torch.Tensor) -> torch.Tensor:
        """The last inputs before each piece, [..., num_pieces, dim, width], in the dtype of `requests`, of pieces that
        follow no tokens of the same batch.

        requests, chunks: [..., slots, dim, width], those of requests and of chunks.
        """
        last = torch.where(
            self.of_chunk[:, None, None], chunks[..., self.chunk_slots, :, :], requests[..., self.request_slots, :, :]
        )
        return last.masked_fill_(self.of_nobody[:, None, None], 0)

    def before(self, requests: torch.Tensor, chunks: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """A layer's last inputs before each piece.  inputs: [num_tokens, dim].  The others: see `known`."""
        last = self.known(requests, chunks)
        if self.behind is not None:
            known = last.mT.flatten(0, 1)[self.earlier]
            last[self.behind] = torch.where(self.is_token[..., None], inputs[self.tokens].to(last.dtype), known).mT
        return last


@dataclasses.dataclass(frozen=True)
class Pieces:
    """The pieces of a batch, in the order of its tokens, and where their states come from and go.

    A layer's kernel takes one or two calls. In one call every piece begins from the state before it, which `early`
    composes. Two calls are needed where that depends on what the batch itself computes: text before a chunk, a chunk
    computed by the same batch; and for chunks after a preamble, whose states are those from zero. Then the first call
    gives each piece's own transition from zero, `late` composes, and the second call gives the outputs.

    lens: the number of tokens of each piece.
    cu_seqlens: int32 [num_pieces + 1].
    indices: int32 [num_pieces], 0, 1, 2 ...: of states that are in the pieces' order.
    known: bool [num_pieces], whether there is something before each piece: True, if only zeros.
    early: rows whose states before pieces depend on nothing that the batch computes; one piece each, the last part.
    late: the other rows; None if there are none.
    two_calls: see above.
    last: each request's last piece, and its slot.
    chunks: the pieces that are chunks, or text that is kept like one, and their slots; None if there are none.
    resumed: those of them that are resumed; None if there are none.
    inputs: of convolutions; None for layers that have none.
    """

    lens: Sequence[int]
    cu_seqlens: torch.Tensor
    indices: torch.Tensor
    known: torch.Tensor
    early: StateRows | None
    late: StateRows | None
    two_calls: bool
    last: Owned | None
    chunks: Owned | None
    resumed: Owned | None
    inputs: Inputs

    @classmethod
    def of(cls, rows: Sequence[TextRow | ChunkRow], width: int, device: torch.device) -> "Pieces":
        """The pieces of a batch, without synchronizing with the device.

        rows: in the order of the batch's tokens; a fill of several chunks is several rows.
        width: how many inputs a convolution looks back.
        Raises ValueError for a row that does not end in text, for a piece without tokens, for a chunk that is computed
        twice, and for a resumed one whose preamble is in the same batch.
        """
        plan = _Plan(rows)
        bounds = np.cumsum([0, *plan.lens])
        arrays = [bounds, np.arange(len(plan.lens))]
        arrays += [*_link_rows(plan.early), *_link_rows(plan.late)]
        arrays += [*_pairs(plan.last), *_pairs(plan.chunks), *_pairs(plan.resumed)]
        tensors = iter(ints_to_device([*arrays, *_inputs(plan.before, bounds, width)], device))
        cu_seqlens, indices = itertools.islice(tensors, 2)

        def link_rows() -> StateRows | None:
            rows = StateRows(*itertools.islice(tensors, 3))
            return rows if rows.bs else None

        def owned() -> Owned | None:
            pairs = Owned(*(each.long() for each in itertools.islice(tensors, 2)))
            return pairs if len(pairs.pieces) else None

        return cls(
            lens=plan.lens,
            cu_seqlens=cu_seqlens,
            indices=indices,
            known=torch.ones_like(indices, dtype=torch.bool),
            early=link_rows(),
            late=link_rows(),
            two_calls=plan.two_calls,
            last=owned(),
            chunks=owned(),
            resumed=owned(),
            inputs=Inputs.of(*tensors, width=width),
        )

    @property
    def is_text_behind_chunks(self) -> bool:
        """Whether each row is one piece of text, behind all that its state depends on."""
        return self.chunks is None and not self.two_calls

    def in_slots(self, request_slots: torch.Tensor) -> "Pieces":
        """The same, if the slots of its rows are indices of requests.  request_slots: integers, the slot of each."""
        slots, of_rows = request_slots.long(), request_slots.to(torch.int32)

        def placed(rows: StateRows | None) -> StateRows | None:
            if rows is None:
                return None
            requests = rows.initial_slots
            initial_slots = torch.where(requests < 0, requests, of_rows[requests.clamp(min=0)])
            return dataclasses.replace(rows, initial_slots=initial_slots)

        return dataclasses.replace(
            self,
            early=placed(self.early),
            late=placed(self.late),
            last=None if self.last is None else self.last._replace(slots=slots[self.last.slots]),
            inputs=self.inputs._replace(request_slots=slots[self.inputs.request_slots]),
        )


# The host's side of it.


class _Before(NamedTuple):
    """Where a convolution's last inputs before a piece come from: a request's slot, a chunk's, or another piece of the
    batch and what is before that. Nowhere: zeros."""

    request: int | None = None
    chunk: int | None = None
    piece: int | None = None


class _Plan:
    """Fields: see `Pieces`.  early, late: (initial slot, parts) of each row.  last, chunks, resumed: (piece, slot)."""

    def __init__(self, rows: Sequence[TextRow | ChunkRow]):
        self.lens: list[int] = []
        self.before: list[_Before] = []
        self.early: list[tuple[int, list[int]]] = []
        self.late: list[tuple[int, list[int]]] = []
        self.last: list[tuple[int, int]] = []
        self.chunks: list[tuple[int, int]] = []
        self.resumed: list[tuple[int, int]] = []
        self.two_calls = False
        self._computed = self._chunks_in(rows)
        for row in rows:
            if isinstance(row, ChunkRow):
                self._add_chunk(row)
            else:
                self._add_text(row)

    @staticmethod
    def _chunks_in(rows: Sequence[TextRow | ChunkRow]) -> dict[int, int]:
        """The pieces that are chunks, by slot."""
        pieces: dict[int, int] = {}
        count = 0
        for row in rows:
            if isinstance(row, ChunkRow):
                if row.slot in pieces:
                    raise ValueError(f"expected each chunk once, got slot {row.slot} twice")
                pieces[row.slot] = count
                count += 1
            else:
                count += sum(isinstance(part, Text) for part in row.parts)
        return pieces

    def _add_piece(self, num_tokens: int, before: _Before) -> int:
        if num_tokens < 1:
            raise ValueError(f"expected pieces of at least one token, got {num_tokens}")
        self.lens.append(num_tokens)
        self.before.append(before)
        return len(self.lens) - 1

    def _behind(self, slot: int) -> _Before:
        """The last inputs of a chunk."""
        return _Before(piece=self._computed[slot]) if slot in self._computed else _Before(chunk=slot)

    def _add_chunk(self, row: ChunkRow) -> None:
        if row.resumed and row.after in self._computed:
            raise ValueError(f"expected a resumed chunk's preamble to be complete, got slot {row.after} computed")
        parts, before = [], _Before()
        if row.after is not None:
            parts, before = [row.after], self._behind(row.after)
        if row.resumed:
            parts, before = [*parts, row.slot], _Before(chunk=row.slot)
        piece = self._add_piece(row.num_tokens, before)
        self.chunks.append((piece, row.slot))
        if row.resumed:
            self.resumed.append((piece, row.slot))
        (self.late if row.after in self._computed else self.early).append((-1, [*parts, ~piece]))
        self.two_calls |= row.after is not None

    def _add_text(self, row: TextRow) -> None:
        if not row.parts or not isinstance(row.parts[-1], Text):
            raise ValueError(f"expected a row that ends in text, got {row.parts}")
        parts: list[int] = []
        before = _Before(request=row.slot) if row.resumed else _Before()
        for part in row.parts:
            if isinstance(part, Chunk):
                parts.append(part.slot)
                before = self._behind(part.slot)
            else:
                piece = self._add_piece(part.num_tokens, before)
                parts.append(~piece)
                before = _Before(piece=piece)
        self.last.append((piece, row.slot))
        if row.keeps is not None:
            self.chunks.append((~parts[0], row.keeps))
        waits = sum(part < 0 for part in parts) > 1 or any(part in self._computed for part in parts)
        (self.late if waits else self.early).append((row.slot if row.resumed else -1, parts))
        self.two_calls |= waits


def _link_rows(rows: list[tuple[int, list[int]]]) -> list[np.ndarray]:
    parts = [parts for _, parts in rows]
    indptr = np.cumsum([0, *map(len, parts)])
    return [np.array([initial for initial, _ in rows]), indptr, np.array([*itertools.chain(*parts)])]


def _pairs(pairs: list[tuple[int, int]]) -> list[np.ndarray]:
    return [*np.array(pairs).reshape(-1, 2).T]


def _inputs(before: list[_Before], cu_seqlens: np.ndarray, width: int) -> list[np.ndarray]:
    """The tensors of `Inputs`, flat: those of columns, and bools as integers."""

    @functools.cache
    def columns(piece: int) -> list[int]:
        """The inputs before a piece: tokens of the batch, or -1 - (piece * width + column), of what is not in it."""
        if (other := before[piece].piece) is None:
            return [~(piece * width + column) for column in range(width)]
        begin, end = cu_seqlens[other : other + 2].tolist()
        return [*columns(other), *range(max(begin, end - width), end)][-width:]

    behind = [piece for piece, source in enumerate(before) if source.piece is not None]
    listed = np.array([columns(piece) for piece in behind], dtype=np.int64).reshape(-1)
    return [
        np.array([source.request or 0 for source in before]),
        np.array([source.chunk or 0 for source in before]),
        np.array([source.chunk is not None for source in before]),
        np.array([source == _Before() for source in before]),
        np.array(behind),
        listed.clip(min=0),
        (~listed).clip(min=0),
        listed >= 0,
    ]
