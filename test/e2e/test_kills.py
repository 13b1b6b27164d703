"""A process of a server is killed, as the kernel does when memory is short: the server says so and ends at once.

Half alive, it would accept requests and answer none.
"""

import contextlib
import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import requests
from http_prompts import RAILWAY, SEGMENTS, chunk, generate, text

from sglang_lazy.testing import device_flags, running_server
from sglang_lazy.testing.server import wait_for

pytestmark = pytest.mark.slow  # starts servers

PATIENCE = 30  # seconds
LONG = {"temperature": 0, "max_new_tokens": 1500, "ignore_eos": True}


def is_gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def processes_of(url: str) -> dict[str, psutil.Process]:
    """By name: the HTTP process that listens on the port or whose tokenizer workers do, its schedulers and so on."""
    port = int(url.rpartition(":")[2])
    listening = [
        c.pid for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr.port == port
    ]
    root = psutil.Process(listening[0])
    if root.name().startswith("sglang::tokenizer_worker"):
        root = root.parent()
    names = {child.name(): child for child in root.children(recursive=True)}
    prefix = "sglang::"
    return {"http": root} | {name.removeprefix(prefix): names[name] for name in names if name.startswith(prefix)}


def read_stream(url, started, ended):
    """Stream a long answer until the server is gone."""
    with contextlib.suppress(requests.RequestException):
        body = {"segments": SEGMENTS, "sampling_params": LONG, "stream": True}
        with requests.post(f"{url}/generate", json=body, stream=True, timeout=2 * PATIENCE) as response:
            for line in response.iter_lines():
                if line:
                    started.set()
    ended.set()


RANKS = ("--dp-size", "2")
WORKERS = ("--tokenizer-worker-num", "2")
WAIT_FOR_WORKERS = {"SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT": "120"}  # two busy cores start none in 10 s


@pytest.mark.parametrize(
    ("victim", "flags"),
    [
        *((victim, ()) for victim in ("scheduler", "detokenizer", "http")),
        *((victim, RANKS) for victim in ("scheduler_DP1", "data_parallel_controller")),
        *((victim, WORKERS) for victim in ("scheduler", "detokenizer", "http")),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value) or "alone",
)
def test_the_server_ends_with_each_of_its_processes(victim, flags, tiny_model, tmp_path):
    """Also with data-parallel ranks and with several tokenizer workers, where SGLang alone would go on for ever."""
    log = tmp_path / "server.log"
    flags = ["--model-path", tiny_model, "--max-total-tokens", "2000", *device_flags(), *flags]
    with running_server(flags, log, environment=WAIT_FOR_WORKERS) as url:
        num_processes = {RANKS[0]: 5, WORKERS[0]: 5}.get(flags[-2], 3)
        assert wait_for(lambda: len(processes_of(url)) == num_processes, 4 * PATIENCE), log.read_text()[-2000:]
        processes = processes_of(url)
        started, ended = threading.Event(), threading.Event()
        threading.Thread(target=read_stream, args=(url, started, ended), daemon=True).start()
        assert started.wait(PATIENCE), log.read_text()[-2000:]
        os.kill(processes[victim].pid, signal.SIGKILL)
        assert wait_for(lambda: all(map(is_gone, processes.values())), PATIENCE), log.read_text()[-2000:]
        assert ended.wait(PATIENCE), "the client is still waiting"
    if victim != "http":
        assert f"(pid={processes[victim].pid}) crashed" in log.read_text()


def test_a_server_that_is_asked_to_end_finishes_its_answers(tiny_model, tmp_path):
    """One that streams, and one that waits for its chunks."""
    log = tmp_path / "server.log"
    flags = ["--model-path", tiny_model, "--max-total-tokens", "2000", "--max-running-requests", "1", *device_flags()]
    with running_server(flags, log) as url, ThreadPoolExecutor() as clients:
        processes = processes_of(url)
        body = {"segments": SEGMENTS, "sampling_params": LONG, "stream": True}
        with requests.post(f"{url}/generate", json=body, stream=True, timeout=2 * PATIENCE) as response:
            lines = filter(None, response.iter_lines())
            next(lines)
            waiting = clients.submit(generate, url, segments=[chunk(RAILWAY), text(" Who?")])
            assert wait_for(lambda: requests.get(f"{url}/v1/loads").json()["loads"][0]["num_waiting_reqs"], PATIENCE)
            os.kill(processes["http"].pid, signal.SIGTERM)
            *_, last, done = lines
        assert done == b"data: [DONE]" and len(json.loads(last.removeprefix(b"data: "))["output_ids"]) == 1500
        assert len(waiting.result()["output_ids"]) == 8
        assert wait_for(lambda: all(map(is_gone, processes.values())), PATIENCE), log.read_text()[-2000:]
