"""Keys of requests (`--api-key`, `--admin-api-key`) that are not ASCII: SGLang answers with a 500.

Can go once SGLang compares them as bytes.
"""

from collections.abc import Callable
from typing import Any

from sglang.srt.utils.auth import AuthDecision

from sglang_lazy.port.hooks import repair


def decide(original: Callable, **request: Any) -> AuthDecision:
    """Around `decide_request_auth`: a key that is not ASCII is a wrong one. Comparing it raises TypeError."""
    try:
        return original(**request)
    except TypeError:
        return AuthDecision(allowed=False)


HOOKS = (
    repair(
        "sglang.srt.utils.auth.decide_request_auth",
        decide,
        "AROUND",
        "API keys that are not ASCII",
        "SGLang compares keys as bytes",
    ),
)
