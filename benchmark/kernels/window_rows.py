"""`window_rows`, which runs once per decode step for all layers with a window, as a candidate."""

import dataclasses

import torch

from benchmark.kernels.candidates import Link
from benchmark.kernels.problem import Problem
from sgl_kernel_lazy.rows import Rows
from sgl_kernel_lazy.tables import Queries, WindowTables

PROMPT_LEN, CHUNKS = 10_240, 20


class WindowRows(Link):
    """`window_rows` on prompts that end in the rows of a problem. To check it, a layer attends to what it lists."""

    def __init__(self, name: str, problem: Problem):
        tables, bs, window = problem.tables, problem.bs, problem.shape.window
        assert window is not None
        device, before = problem.dims.device, PROMPT_LEN - window
        earlier = CHUNKS - tables["segment_ends"].shape[1]

        def ints(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(torch.int32).to(device)

        def of_all(row: torch.Tensor) -> torch.Tensor:
            return ints(row.repeat(bs, 1))

        # Chunks before the window, of which the last reaches into it.
        cuts = torch.arange(1, earlier + 1) * before // (earlier + 1)
        ends = torch.cat([of_all(cuts), before + tables["segment_ends"]], dim=1)
        offsets = torch.cat([of_all(torch.zeros(earlier)), tables["segment_offsets"]], dim=1)
        slots = torch.randint(problem.tokens, (bs, before), generator=torch.Generator().manual_seed(0))
        # One token has been generated since the prompt's tail was noted.
        tail = torch.arange(before - 1, PROMPT_LEN - 1)
        memory = Rows.allocate(bs, bs * window, ends.shape[1], device, shared=False)
        self.prompts = WindowTables(
            req_to_token=torch.cat([ints(slots), tables["kv_indices"].view(bs, window)], dim=1),
            num_segments=ints(torch.full((bs,), CHUNKS)),
            segment_offsets=offsets,
            tail_ends=(ends - (before - 1)).clamp(0, window),
            tail_indices=of_all(tail),
            tail_positions=of_all(tail),
            window=window,
        )
        self.queries = Queries(torch.arange(bs, device=device), torch.full((bs,), PROMPT_LEN, device=device))
        listed = {table: getattr(memory, table) for table in tables}
        super().__init__(name, dataclasses.replace(problem, tables=listed, segment_ids=None))
        self.stepped = False

    def plan(self) -> None:
        self.ops.window_rows(self.problem.rows, self.prompts, self.queries)

    def call(self, i: int, out: torch.Tensor, lse: torch.Tensor | None = None) -> None:
        self.plan()
        if lse is not None:
            super().plan()
            super().call(i, out, lse)
