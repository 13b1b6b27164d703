"""Records in a file what SGLang's scheduler does with requests over chunks: a word for each time."""

import functools
import os
from pathlib import Path
from typing import Any

FILE = "LAZY_TEST_SCHEDULING"
"""The environment variable that names the file."""


def load() -> None:
    """The SGLang plugin; runs in each process that SGLang starts."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.schedule_policy import PrefillAdder

    from sglang_lazy.core.state import linked

    mix, preempt, retract = (
        ScheduleBatch.mix_with_running,
        PrefillAdder.preempt_to_schedule,
        ScheduleBatch.retract_decode,
    )

    def record(word: str, reqs: list[Any]) -> None:
        with Path(os.environ[FILE]).open("a") as file:
            file.write(f"{word} " * sum(linked(req) is not None for req in reqs))

    @functools.wraps(mix)
    def mix_with_running(batch: Any, running: Any) -> Any:
        record("mixed", running.reqs)
        return mix(batch, running)

    @functools.wraps(preempt)
    def preempt_to_schedule(adder: Any, req: Any) -> bool:
        running = [*adder.running_batch.reqs]
        preempted = preempt(adder, req)
        record("preempted", [each for each in running if each not in adder.running_batch.reqs])
        return preempted

    @functools.wraps(retract)
    def retract_decode(batch: Any) -> Any:
        result = retract(batch)
        record("retracted", result[0])
        return result

    ScheduleBatch.mix_with_running, ScheduleBatch.retract_decode = mix_with_running, retract_decode
    PrefillAdder.preempt_to_schedule = preempt_to_schedule
