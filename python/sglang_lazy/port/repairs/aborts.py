"""What the scheduler tells of aborted requests.

It tells the tokenizer worker that a waiting request was aborted, by a client, a time limit, a full queue or a lack of
memory. Of several workers it takes the address from messages only, not from requests, so the message is dropped on its
way and the request never answered. Internal requests have no client to be told.

The address can go once `SenderWrapper.send_output` takes the address from requests.
"""

from collections.abc import Callable
from typing import Any

from sglang.srt.managers.io_struct import AbortReq

from sglang_lazy.port.hooks import repair


def tell(send: Callable, sender: Any, output: Any, source: Any = None) -> None:
    """Around `SenderWrapper.send_output`: address an abort to the worker that the aborted request came from; send none
    of an internal request."""
    if type(output) is AbortReq:
        if output.rid.startswith("\0"):
            return
        if output.http_worker_ipc is None:
            output.http_worker_ipc = getattr(source, "http_worker_ipc", None)
    send(sender, output, source)


HOOKS = (
    repair(
        "sglang.srt.managers.scheduler_components.output_sender.SenderWrapper.send_output",
        tell,
        "AROUND",
        "aborted requests answer with several tokenizer workers",
        "`SenderWrapper.send_output` takes the address from requests",
    ),
)
