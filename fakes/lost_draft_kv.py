"""Lets a server lose the KV that its draft has of everything cached: before the next prefill, if there is a file.

Its path is in the environment variable `PATH_VARIABLE`; the file is removed.
"""

import os
from pathlib import Path
from typing import Any

PATH_VARIABLE = "FAKES_LOST_DRAFT_KV"


def load() -> None:
    """The SGLang plugin; runs in each process that SGLang starts."""
    from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker

    extend, file = EagleDraftWorker._draft_extend_for_prefill, Path(os.environ[PATH_VARIABLE])

    def lose_first(worker: Any, *args: Any, **kwargs: Any) -> Any:
        if file.exists():
            file.unlink()
            pool = worker.draft_runner.token_to_kv_pool
            for buffer in (*pool.k_buffer, *pool.v_buffer):
                buffer.zero_()
        return extend(worker, *args, **kwargs)

    EagleDraftWorker._draft_extend_for_prefill = lose_first
