"""A scheduler whose forward pass hangs on any batch that has a request with the id RID."""

import time
from typing import Any

RID = "hang"


def load() -> None:
    """The SGLang plugin; runs in each process that SGLang starts."""
    from sglang.srt.managers.scheduler import Scheduler

    run_batch = Scheduler.run_batch

    def hang(scheduler: Any, batch: Any, *args: Any) -> Any:
        while any(req.rid == RID for req in batch.reqs):
            time.sleep(1)
        return run_batch(scheduler, batch, *args)

    Scheduler.run_batch = hang
