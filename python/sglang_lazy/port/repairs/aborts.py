"""Aborted requests of several tokenizer workers.

SGLang's scheduler tells the worker that a waiting request was aborted, by a client, a time limit, a full queue or a
lack of memory. It takes the worker's address from messages only, not from requests, so the message is dropped on its
way and the request never answered.

Can go once `SenderWrapper.send_output` takes the address from requests.
"""

from typing import Any

from sglang.srt.managers.io_struct import AbortReq

from sglang_lazy.port.hooks import Hook


def address(_sender: Any, output: Any, source: Any = None) -> None:
    """Before `SenderWrapper.send_output`: address an abort to the worker that the aborted request came from."""
    if type(output) is AbortReq and output.http_worker_ipc is None:
        output.http_worker_ipc = getattr(source, "http_worker_ipc", None)


HOOKS = (Hook("sglang.srt.managers.scheduler_components.output_sender.SenderWrapper.send_output", address, "BEFORE"),)
