"""Has a server on a CPU append what its model drafts to a file, a line for each pass: it tells what KV was read. The
path is in the environment variable `PATH_VARIABLE`. Verified are `remembered_drafts`."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fakes import remembered_drafts

PATH_VARIABLE = "FAKES_NOTED_DRAFTS"


def load() -> None:
    """The SGLang plugin; runs in each process that SGLang starts."""
    from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker
    from sglang.srt.speculative.frozen_kv_mtp_worker_v2 import FrozenKVMTPDraftWorker

    for worker in (EagleDraftWorker, FrozenKVMTPDraftWorker):
        worker.draft_forward = _noting(worker.draft_forward, Path(os.environ[PATH_VARIABLE]))
    remembered_drafts.load()


def _noting(draft: Callable, file: Path) -> Callable:
    def run(worker: Any, forward_batch: Any) -> Any:
        parents, scores, tokens, *rest = draft(worker, forward_batch)
        with file.open("a") as notes:
            notes.write(f"{tokens.tolist()}\n")
        return parents, scores, tokens, *rest

    return run
