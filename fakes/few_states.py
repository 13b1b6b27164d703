"""A small pool of states, however much memory there is: as many as the environment variable LAZY_TEST_STATES says."""

import os
from typing import Any

VARIABLE = "LAZY_TEST_STATES"


def load() -> None:
    """The SGLang plugin; runs in each process that SGLang starts."""
    from sglang_lazy.recurrent.pool import StateMemory

    within = StateMemory.within

    def few(num_bytes: float, layout: Any) -> StateMemory:
        return within(num_bytes, layout)._replace(num_states=int(os.environ[VARIABLE]))

    StateMemory.within = few
