"""Has a server append the new tokens of each batch with chunks that runs in a prefill graph to a file, a line for each.
The path is in the environment variable `PATH_VARIABLE`."""

import functools
import os
from pathlib import Path
from typing import Any

PATH_VARIABLE = "FAKES_NOTED_GRAPHS"


def load() -> None:
    """The SGLang plugin; runs in each process that SGLang starts."""
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner

    from sglang_lazy.attention.table import table_of

    execute = PrefillCudaGraphRunner.execute

    @functools.wraps(execute)
    def noting(graph_runner: Any, forward_batch: Any, **kwargs: Any) -> Any:
        table = table_of(graph_runner.model_runner.req_to_token_pool)
        if table is not None and table.has_chunks:
            with Path(os.environ[PATH_VARIABLE]).open("a") as notes:
                notes.write(f"{len(forward_batch.input_ids)}\n")
        return execute(graph_runner, forward_batch, **kwargs)

    PrefillCudaGraphRunner.execute = noting
