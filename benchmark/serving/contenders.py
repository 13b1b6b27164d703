"""The servers to compare, as data, and how to start one."""

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmark.serving.prompts import as_chunks, as_plain
from sglang_lazy.policies import get_policy
from sglang_lazy.testing import running_server
from sglang_lazy.verify.policies import split_policies

STOCK = "sglang.launch_server"
LAZY = "sglang_lazy.launch_server"
COMB = {
    "architectures": ["CombLlamaForConditionalGeneration"],
    "cross_attention_layers": [3, 7, 11, 15, 19, 23, 27, 31],
}
"""Turns a Llama with random weights and 32 layers into a Comb model, which reads chunks through an encoder of 8."""
HOST_TIER = ("--enable-hierarchical-cache",)
"""Its size, `--hicache-size` in GB, is among the flags for every server; servers without the tier ignore it."""

DRAFTS = ("--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "3", "--speculative-eagle-topk", "1",
          "--speculative-num-draft-tokens", "4")  # fmt: skip
"""Chains of three. The draft, `--speculative-draft-model-path`, is among the flags for every server."""


@dataclasses.dataclass(frozen=True)
class Server:
    """A launcher, and its flags beyond those of all servers.

    number: distinguishes servers with the same command.
    """

    module: str
    flags: tuple[str, ...] = ()
    number: int = 0


@dataclasses.dataclass(frozen=True)
class Contender:
    """A server and the form in which it is sent prompts: `as_chunks`, or `as_plain`."""

    server: Server
    form: Callable[[list[dict]], dict]


CONTENDERS = {
    "stock": Contender(Server(STOCK), as_plain),
    "stock-again": Contender(Server(STOCK, number=1), as_plain),
    "stock-host": Contender(Server(STOCK, HOST_TIER), as_plain),
    "stock-drafts": Contender(Server(STOCK, DRAFTS), as_plain),
    "stock-flashinfer": Contender(Server(STOCK, ("--attention-backend", "flashinfer")), as_plain),
    "stock-no-cache": Contender(Server(STOCK, ("--disable-radix-cache",)), as_plain),
    "lazy": Contender(Server(LAZY), as_chunks),
    "lazy-host": Contender(Server(LAZY, HOST_TIER), as_chunks),
    "lazy-drafts": Contender(Server(LAZY, DRAFTS), as_chunks),
    "lazy-triton": Contender(Server(LAZY, ("--lazy-kernels", "triton")), as_chunks),
    "copy": Contender(Server(LAZY, ("--lazy-default-link", "copy")), as_chunks),
    "lazy-plain": Contender(Server(LAZY), as_plain),
    "comb": Contender(Server(LAZY, ("--json-model-override-args", json.dumps(COMB))), as_chunks),
}


POLICY = "lazy@"
"""Prefix of contenders that get the same prompts as `lazy`, under the policy named after it."""


def contender(name: str) -> Contender:
    """The contender with this name. Raises ValueError if it is neither in CONTENDERS nor names a policy."""
    if name.startswith(POLICY):
        link = str(get_policy(name.removeprefix(POLICY)))
        return Contender(Server(LAZY), lambda segments: {**as_chunks(segments), "link": link})
    if name not in CONTENDERS:
        raise ValueError(f"unknown contender {name!r}: expected one of {', '.join(CONTENDERS)}, or {POLICY}POLICY")
    return CONTENDERS[name]


def server_of(name: str) -> Server:
    return contender(name).server


def parse_contenders(names: str) -> list[str]:
    """The names in a comma-separated list, grouped by server so that each is started once.

    Raises ValueError for a name that `contender` does not know.
    """
    wanted = split_policies(names)
    servers = [server_of(name) for name in wanted]
    return sorted(dict.fromkeys(wanted), key=lambda name: servers.index(server_of(name)))


@contextlib.contextmanager
def running(server: Server, flags: list[str], log: Path, timeout: float) -> Iterator[str]:
    """Run `server` with `flags` for the length of a `with` block; yields its URL. timeout: seconds to wait for it."""
    on_gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as scratch:
        lacks_stand_in = server.module == STOCK and not on_gpu
        environment = _with_rotary_stand_in(Path(scratch)) if lacks_stand_in else {}
        how = dict(module=server.module, timeout=timeout, usual=90 if on_gpu else 25, environment=environment)
        with running_server([*flags, *server.flags], log, **how) as url:
            yield url


def _with_rotary_stand_in(folder: Path) -> dict[str, str]:
    """Environment variables with a stub for a vLLM kernel that stock SGLang imports off CUDA but never calls."""
    package = folder / "vllm"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "_custom_ops.py").write_text("rotary_embedding = None\n")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))}
