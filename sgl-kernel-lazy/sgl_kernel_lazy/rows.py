"""The rows of a batch, checked once: the layers of a model pass them to their ops as one object.

Shapes, dtypes, devices and strides are checked on all devices. What tensors contain is checked on a CPU only, since
looking at it on a GPU would mean to wait for that: kernels rely on it, and every test on a CPU checks it.
"""

import dataclasses
import functools

import torch

from sgl_kernel_lazy.validation import INTEGERS, check_indptr, check_tensor, refuse


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Rows:
    """The KV tokens of a batch's requests. Tensors may be refilled in place, as those that a CUDA graph reads are.

    A request's row lists its chunk segments in prompt order, then its text. Keys of a segment are stored at local
    positions, and its offset says where in the prompt these begin; those of text are stored at absolute positions. Text
    may be a segment, too. Where a layer has a window, rows for decode list what is in it.

    kv_indptr: [bs + 1] int32, counts tokens.  kv_indices: [>= kv_indptr[-1]] int32 or int64, slots.
    num_segments: [bs] int32, 0 for an ordinary request.
    segment_ends: [bs, max_segments] int32, in KV tokens of the request's row; segment i begins where i - 1 ended. In
        decode alone they may exceed the row, which cuts them off, as leftovers in rows that pad the batch do.
    segment_offsets: [bs, max_segments] int32, rows of an op's cos_sin_cache. The offset of a segment is -j if its keys
        are stored at positions larger than its tokens' own by j; that is row len(cos_sin_cache) - j. No table of
        segments is read beyond num_segments.
    segment_ids: [bs, max_segments] int32, for decode; None: nothing is shared. Segments of one id, at least 0, list the
        same slots in the same order, so that their keys can be read once for all requests; -1 is shared with nobody. A
        segment that reaches the end of its row is not shared either, whatever its id: rows end with the query's own
        token, which is text, so it is a leftover in a row that pads the batch.
    filled: False for memory whose contents are written later, and checked then: see `check_contents`.
    Raises ValueError on a mismatch.
    """

    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    num_segments: torch.Tensor
    segment_ends: torch.Tensor
    segment_offsets: torch.Tensor
    segment_ids: torch.Tensor | None = None
    filled: dataclasses.InitVar[bool] = True

    def __post_init__(self, filled: bool) -> None:
        self._check_tensors()
        if filled:
            self.check_contents()

    @staticmethod
    def allocate(bs: int, num_kv: int, max_segments: int, device: torch.device | str, *, shared: bool = True) -> "Rows":
        """Memory for `bs` requests with `num_kv` KV tokens, to be filled; all zeros.

        shared: whether to have `segment_ids`.
        """

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return Rows(
            kv_indptr=ints(bs + 1),
            kv_indices=ints(num_kv),
            num_segments=ints(bs),
            segment_ends=ints(bs, max_segments),
            segment_offsets=ints(bs, max_segments),
            segment_ids=ints(bs, max_segments) if shared else None,
            filled=False,
        )

    def first(self, bs: int) -> "Rows":
        """The memory of the first `bs` requests, which is to be filled."""
        return Rows(
            kv_indptr=self.kv_indptr[: bs + 1],
            kv_indices=self.kv_indices,
            num_segments=self.num_segments[:bs],
            segment_ends=self.segment_ends[:bs],
            segment_offsets=self.segment_offsets[:bs],
            segment_ids=None if self.segment_ids is None else self.segment_ids[:bs],
            filled=False,
        )

    @functools.cached_property
    def device(self) -> torch.device:
        return self.num_segments.device

    @functools.cached_property
    def bs(self) -> int:
        return self.num_segments.shape[0]

    @functools.cached_property
    def max_segments(self) -> int:
        return self.segment_ends.shape[1]

    @functools.cached_property
    def num_queries(self) -> int:
        """The rows of `q`: one per request."""
        return self.bs

    @functools.cached_property
    def num_listed(self) -> int:
        """The length of what lists the KV tokens: as many, or more."""
        return self.kv_indices.shape[0]

    def used(self) -> torch.Tensor:
        """Which elements of the tables of segments count: bool [bs, max_segments]."""
        return torch.arange(self.max_segments, device=self.device) < self.num_segments[:, None]

    def check_contents(self) -> None:
        """Check what tensors contain, on a CPU: done as they are made and, where an op fills them, by the op."""
        if self.device.type == "cpu":
            self._check_contents()

    def _check_tensors(self) -> None:
        device, ints = self.device, (torch.int32,)
        check_tensor("num_segments", self.num_segments, (None,), ints, device)
        check_tensor("kv_indptr", self.kv_indptr, (self.bs + 1,), ints, device)
        check_tensor("kv_indices", self.kv_indices, (None,), INTEGERS, device)
        check_tensor("segment_ends", self.segment_ends, (self.bs, None), ints, device)
        check_tensor("segment_offsets", self.segment_offsets, self.segment_ends.shape, ints, device)
        if self.segment_ids is not None:
            check_tensor("segment_ids", self.segment_ids, self.segment_ends.shape, ints, device)

    def _check_contents(self) -> None:
        """Rows lie within what lists their KV tokens, their segments are in order, and equal ids have equal slots."""
        check_indptr("kv_indptr", self.kv_indptr, self.num_listed)
        width = self.max_segments
        refuse((self.num_segments < 0) | (self.num_segments > width), f"num_segments: expected 0 to {width}")
        ends = self.segment_ends.masked_fill(~self.used(), 0)
        steps = ends.diff(dim=1, prepend=torch.zeros_like(ends[:, :1]))
        refuse(self.used() & (steps < 0), "segment_ends: expected to ascend from 0")
        if self.segment_ids is not None:
            self._check_shared(self.segment_ids)

    def _check_shared(self, segment_ids: torch.Tensor) -> None:
        known: dict[int, list[int]] = {}
        indptr, ends, ids = self.kv_indptr.tolist(), self.segment_ends.tolist(), segment_ids.tolist()
        for b, count in enumerate(self.num_segments.tolist()):
            for start, end, name in zip([0, *ends[b]], ends[b][:count], ids[b], strict=False):
                if name < 0 or end >= indptr[b + 1] - indptr[b]:  # shared with nobody
                    continue
                slots = self.kv_indices[indptr[b] + start : indptr[b] + end].tolist()
                if known.setdefault(name, slots) != slots:
                    raise ValueError(f"segment_ids: expected the same slots in all segments of id {name}, got others")


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ExtendRows(Rows):
    """`Rows` with queries: any number for each request, which see KV tokens by position.

    qo_indptr: [bs + 1] int32; the queries of request b are qo_indptr[b] .. qo_indptr[b + 1].
    q_positions: [nnz_qo] int32 or int64, absolute.
    kv_positions: [>= kv_indptr[-1]] int32, absolute position of each KV token of kv_indices.
    max_extend_len: the most queries of a request, known on the host.
    """

    qo_indptr: torch.Tensor
    q_positions: torch.Tensor
    kv_positions: torch.Tensor
    max_extend_len: int

    @functools.cached_property
    def num_queries(self) -> int:
        """The rows of `q`."""
        return self.q_positions.shape[0]

    @functools.cached_property
    def num_listed(self) -> int:
        return min(self.kv_indices.shape[0], self.kv_positions.shape[0])

    def _check_tensors(self) -> None:
        super()._check_tensors()
        check_tensor("qo_indptr", self.qo_indptr, (self.bs + 1,), (torch.int32,), self.device)
        check_tensor("q_positions", self.q_positions, (None,), INTEGERS, self.device)
        check_tensor("kv_positions", self.kv_positions, (None,), (torch.int32,), self.device)
        if not isinstance(self.max_extend_len, int) or self.max_extend_len < 0:
            raise ValueError(f"max_extend_len: expected a non-negative int, got {self.max_extend_len!r}")

    def _check_contents(self) -> None:
        """No request has more queries than said, and segments end within their rows, too."""
        super()._check_contents()
        check_indptr("qo_indptr", self.qo_indptr, self.num_queries)
        longest = max(self.qo_indptr.diff().tolist(), default=0)
        if longest > self.max_extend_len:
            raise ValueError(
                f"max_extend_len: expected the longest qo_len, {longest}, or more, got {self.max_extend_len}"
            )
        beyond = self.segment_ends > self.kv_indptr.diff()[:, None]
        refuse(self.used() & beyond, "segment_ends: expected at most the row's length")
