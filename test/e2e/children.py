"""What happens when a process of an engine ends by itself."""

import os

from sglang.srt.utils import kill_process_tree


def fail(_signal, _frame):
    """For `custom_sigquit_handler`: the test fails. SGLang's own handler would end the whole run without a word."""
    kill_process_tree(os.getpid(), include_parent=False)
    raise RuntimeError("a process of the engine has ended, see its output")
