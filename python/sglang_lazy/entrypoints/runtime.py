"""Local runtime of the frontend language: SGLang's `Runtime` whose server understands chunks."""

from typing import Any

from sglang.lang.backend import runtime_endpoint
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs

from sglang_lazy.core.config import pop_keywords
from sglang_lazy.policies import check_policy
from sglang_lazy.port import plugin
from sglang_lazy.port.flag_checks import check_start


class Runtime(runtime_endpoint.Runtime):
    """`sgl.Runtime`, a server in its own process. Takes its arguments, and `lazy_…` keywords like `Engine`."""

    def __init__(self, log_level: str = "error", launch_timeout: float = 300.0, *args: Any, **kwargs: Any):
        self.pid = None  # shutdown() reads it even if the server was never started
        config = pop_keywords(kwargs)
        check_policy(config.default_link)
        if kwargs.get("tokenizer_worker_num", 1) > 1:
            raise ValueError("a Runtime has one tokenizer worker: python -m sglang_lazy.launch_server can have several")
        plugin.activate(config)
        load_plugins()
        check_start(config, ServerArgs(*args, log_level=log_level, **kwargs))
        super().__init__(log_level, launch_timeout, *args, **kwargs)
