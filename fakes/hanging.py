"""A scheduler whose forward pass never ends, for a request with a certain id."""

import time
from typing import Any

RID = "hang"


def load() -> None:
    """As a plugin of SGLang's, in each of the processes that it starts."""
    from sglang.srt.managers.scheduler import Scheduler

    run_batch = Scheduler.run_batch

    def hang(scheduler: Any, batch: Any, *args: Any) -> Any:
        while any(req.rid == RID for req in batch.reqs):
            time.sleep(1)
        return run_batch(scheduler, batch, *args)

    Scheduler.run_batch = hang
