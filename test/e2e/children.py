"""What happens when a process of an engine ends by itself."""

import os

from sglang.srt.managers.tokenizer_manager import SignalHandler
from sglang.srt.utils import kill_process_tree


def fail(_signal, _frame):
    """For `custom_sigquit_handler`: the test fails. SGLang's own handler would end the whole run without a word."""
    kill_process_tree(os.getpid(), include_parent=False)
    raise RuntimeError("a process of the engine has ended, see its output")


# From the first request on, SGLang's handler replaces the custom one.
SignalHandler.running_phase_sigquit_handler = lambda _self, signal=None, frame=None: fail(signal, frame)
