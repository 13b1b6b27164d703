"""A server whose health checks fail after TIMEOUT seconds.

SGLang reads the limit from the environment when it is imported, which forks no longer do.
"""

TIMEOUT = 4


def load() -> None:
    """The SGLang plugin; runs in each process that SGLang starts."""
    from sglang.srt.entrypoints import http_server

    http_server.HEALTH_CHECK_TIMEOUT = TIMEOUT
