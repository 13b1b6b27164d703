"""Sessions whose turns are replaced: SGLang removes turns from the dict that it iterates over, and by recursion. Either
ends its scheduler.

Can go once SGLang iterates over a copy, and without recursion.
"""

from collections.abc import Callable
from typing import Any

from sglang_lazy.port.hooks import on


def drop_turns(session: Any, req: Any, *_args: Any, **_kwargs: Any) -> None:
    """Before `Session.create_req`: if the new turn replaces all others, drop them, so that SGLang finds none."""
    params = req.session_params
    if params.replace and params.rid is None and not session.streaming:
        for node in [*session.req_nodes.values()]:
            node.clear(session.req_nodes)


def clear(_original: Callable, node: Any, req_dict: dict[str, Any]) -> None:
    """Around `SessionReqNode.clear`: abort and remove a turn and those after it. Another turn may have taken its id."""
    turns = [node]
    while turns:
        turn = turns.pop()
        turns += turn.children
        turn.children = []
        turn.abort()
        rid = turn.req.rid
        if req_dict.get(rid) is turn:
            del req_dict[rid]


HOOKS = (
    on("sglang.srt.session.session_controller.Session").repair(
        "create_req",
        drop_turns,
        "BEFORE",
        "replaced turns of a session do not end the scheduler",
        "SGLang iterates over a copy",
    ),
    on("sglang.srt.session.session_controller.SessionReqNode").repair(
        "clear", clear, "AROUND", "long sessions can be cut", "SGLang clears them without recursion"
    ),
)
