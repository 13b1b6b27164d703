"""SGLang's keys (`--api-key`, `--admin-api-key`).

A key of a request that is not ASCII is answered with a 500, and `/server_info` shows all keys to whoever has the lesser
one, or to everybody if there is none. Can go once SGLang compares keys as bytes, and hides them.
"""

import re
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


HIDDEN = "<redacted>"
_SECRETS = ("api_key", "admin_api_key", "ssl_keyfile_password")
"""Flags whose values open something."""


def hide(original: Callable, value: Any, **options: Any) -> Any:
    """Around `redact_watermark_secrets`, which goes through all that the server shows of itself: hide keys as well.

    It calls itself for each value of a dictionary, so one level at a time is seen to here.
    """
    result = original(value, **options)
    if not isinstance(result, dict):
        return result
    secrets = {name: result[name] for name in _SECRETS if result.get(name)}
    result = {**result, **dict.fromkeys(secrets, HIDDEN)}
    if isinstance(command := result.get("launch_command"), str):
        for secret in secrets.values():
            command = re.sub(rf"(--\S+[ =]){re.escape(secret)}(?!\S)", rf"\1{HIDDEN}", command)
        result["launch_command"] = command
    return result


HOOKS = (
    repair(
        "sglang.srt.sampling.watermarking.core.redact_watermark_secrets",
        hide,
        "AROUND",
        "`/server_info` shows no keys",
        "SGLang hides them",
    ),
    repair(
        "sglang.srt.utils.auth.decide_request_auth",
        decide,
        "AROUND",
        "API keys that are not ASCII",
        "SGLang compares keys as bytes",
    ),
)
