"""SGLang's own server on a CPU, with PyTorch for its kernels and without the plugin."""

import os
from collections.abc import Mapping
from typing import Any

import requests

FLAGS = ["--max-total-tokens", "2048", "--max-running-requests", "4", "--context-length", "1024"]
FLAGS += ["--disable-cuda-graph", "--skip-tokenizer-init", "--skip-server-warmup"]


def flags_of(options: Mapping[str, Any]) -> list[str]:
    """The flags of a small server with these options of an engine."""
    flags = list(FLAGS)
    for option, value in options.items():
        flags += [f"--{option.replace('_', '-')}", *([] if value is True else [str(value)])]
    return flags


def without_plugin(stock_path: str, fake: str) -> dict[str, str]:
    """The environment of a server that loads `fake` and not our plugin.  stock_path: of the fixture."""
    return {"PYTHONPATH": os.pathsep.join([stock_path, os.environ["PYTHONPATH"]]), "SGLANG_PLUGINS": fake}


def ask(url: str, prompts: list[list[int]], num_tokens: int, **more: Any) -> list[dict]:
    """The answers to a batch of prompts.  more: other fields of the request."""
    params = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
    body = {"input_ids": prompts, "sampling_params": params, **more}
    response = requests.post(f"{url}/generate", json=body, timeout=60)
    assert response.ok, response.text
    return response.json()
