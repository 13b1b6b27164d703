"""A process of a server is killed, as the kernel does when memory is short, or hangs: the server says so and ends.

Half alive, it would accept requests and answer none. And what becomes of requests when a server is asked to end.
"""

import contextlib
import json
import os
import re
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import requests
from http_prompts import LIBRARY, RAILWAY, SEGMENTS, chunk, generate, text
from served import TWO_RANKS

from fakes import hanging, short_health_checks
from sglang_lazy.testing import device_flags, running_server
from sglang_lazy.testing.server import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("waiting")]

PATIENCE = 30  # seconds
LONG = {"temperature": 0, "max_new_tokens": 300, "ignore_eos": True}


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
    names = {}
    for child in root.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # libraries start programs that end at once
            names[child.name()] = child
    prefix = "sglang::"
    return {"http": root} | {name.removeprefix(prefix): names[name] for name in names if name.startswith(prefix)}


def all_processes_of(url: str, flags: list[str]) -> dict[str, psutil.Process]:
    """The same, once all are there."""
    expected = 5 if {"--dp-size", "--tokenizer-worker-num"} & set(flags) else 3
    assert wait_for(lambda: len(processes_of(url)) == expected, 4 * PATIENCE)
    return processes_of(url)


def read_stream(url, started, ended, rid=None):
    """Stream a long answer until the server is gone."""
    with contextlib.suppress(requests.RequestException):
        body = {"segments": SEGMENTS, "sampling_params": LONG, "stream": True, "rid": rid}
        with requests.post(f"{url}/generate", json=body, stream=True, timeout=2 * PATIENCE) as response:
            for line in response.iter_lines():
                if line:
                    started.set()
    ended.set()


def check_whole(lines):
    """The rest of a stream has all of a long answer."""
    *_, last, done = lines
    tokens = json.loads(last.removeprefix(b"data: "))["output_ids"]
    assert done == b"data: [DONE]" and len(tokens) == LONG["max_new_tokens"]


RANKS = ("--dp-size", "2")
WORKERS = ("--tokenizer-worker-num", "2")
WAIT_FOR_WORKERS = {"SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT": "120"}  # two busy cores start none in 10 s


@pytest.mark.parametrize(
    ("victim", "flags"),
    [
        ("scheduler", ()),
        *(pytest.param(victim, (), marks=pytest.mark.nightly) for victim in ("detokenizer", "http")),
        ("scheduler_DP1", RANKS),
        pytest.param("data_parallel_controller", RANKS, marks=pytest.mark.nightly),
        *((victim, WORKERS) for victim in ("detokenizer", "http")),
        pytest.param("scheduler", WORKERS, marks=pytest.mark.nightly),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value) or "alone",
)
def test_the_server_ends_with_each_of_its_processes(victim, flags, tiny_model, tmp_path):
    """Also with data-parallel ranks and with several tokenizer workers, where SGLang alone would go on for ever."""
    log = tmp_path / "server.log"
    flags = ["--model-path", tiny_model, "--max-total-tokens", "2000", *device_flags(), *flags]
    with running_server(flags, log, environment={**WAIT_FOR_WORKERS, **TWO_RANKS}) as url:
        processes = all_processes_of(url, flags)
        started, ended = threading.Event(), threading.Event()
        threading.Thread(target=read_stream, args=(url, started, ended), daemon=True).start()
        assert started.wait(PATIENCE), log.read_text()[-2000:]
        # The data-parallel controller takes its ranks with it, and the first one seen to be dead is the one named.
        dying = {process.pid for process in (processes[victim], *processes[victim].children())}
        os.kill(processes[victim].pid, signal.SIGKILL)
        assert wait_for(lambda: all(map(is_gone, processes.values())), PATIENCE), log.read_text()[-2000:]
        assert ended.wait(PATIENCE), "the client is still waiting"
    if victim != "http":
        crashed = {int(pid) for pid in re.findall(r"\(pid=(\d+)\) crashed", log.read_text())}
        assert crashed and crashed <= dying


def test_a_scheduler_that_hangs_ends_the_server(tiny_model, tmp_path, with_plugin):
    """In a forward pass. SGLang's watchdog first reads the stacks of all schedulers, which may take half a minute."""
    log = tmp_path / "server.log"
    flags = ["--model-path", tiny_model, "--max-total-tokens", "2000", "--watchdog-timeout", "10", *device_flags()]
    with with_plugin(hanging.load), running_server(flags, log) as url:
        processes = processes_of(url)
        ended = threading.Event()
        ask = threading.Thread(target=read_stream, args=(url, threading.Event(), ended, hanging.RID), daemon=True)
        ask.start()
        assert wait_for(lambda: all(map(is_gone, processes.values())), 4 * PATIENCE), log.read_text()[-2000:]
        assert ended.wait(PATIENCE), "the client is still waiting"
    assert "Scheduler watchdog timeout" in log.read_text()


def test_a_scheduler_that_is_stopped_fails_health_checks_until_it_goes_on(tiny_model, tmp_path, with_plugin):
    """In the middle of an answer, which is finished in the end, as is one that came meanwhile."""
    log = tmp_path / "server.log"
    flags = ["--model-path", tiny_model, "--max-total-tokens", "2000", *device_flags()]
    with (
        with_plugin(short_health_checks.load),
        running_server(flags, log) as url,
        ThreadPoolExecutor() as clients,
    ):
        scheduler = processes_of(url)["scheduler"]
        expected = generate(url, segments=[chunk(RAILWAY), text(" Who?")])
        body = {"segments": SEGMENTS, "sampling_params": LONG, "stream": True}
        with requests.post(f"{url}/generate", json=body, stream=True, timeout=4 * PATIENCE) as response:
            lines = filter(None, response.iter_lines())
            next(lines)
            scheduler.suspend()
            waiting = clients.submit(generate, url, segments=[chunk(RAILWAY), text(" Who?")])
            assert requests.get(f"{url}/health_generate", timeout=4 * PATIENCE).status_code == 503
            assert not waiting.done()
            scheduler.resume()
            check_whole(lines)
        assert waiting.result()["output_ids"] == expected["output_ids"]
        assert requests.get(f"{url}/health_generate", timeout=4 * PATIENCE).status_code == 200


def test_a_server_that_is_asked_to_end_finishes_its_answers(tiny_model, tmp_path):
    """One that streams, one that waits for its chunks, and one to a request that comes only then."""
    log = tmp_path / "server.log"
    flags = ["--model-path", tiny_model, "--max-total-tokens", "4000", "--max-running-requests", "2", *device_flags()]
    with running_server(flags, log) as url, ThreadPoolExecutor() as clients:
        processes = processes_of(url)
        late = [chunk(RAILWAY), text(" Who?")]
        expected = generate(url, segments=late)["output_ids"]
        body = {"segments": SEGMENTS, "sampling_params": LONG, "stream": True}
        with contextlib.ExitStack() as stack:
            streams = []
            for _ in range(2):
                response = requests.post(f"{url}/generate", json=body, stream=True, timeout=2 * PATIENCE)
                streams.append(filter(None, stack.enter_context(response).iter_lines()))
                next(streams[-1])
            waiting = clients.submit(generate, url, segments=[chunk(LIBRARY), text(" Who?")])
            assert wait_for(lambda: requests.get(f"{url}/v1/loads").json()["loads"][0]["num_waiting_reqs"], PATIENCE)
            os.kill(processes["http"].pid, signal.SIGTERM)
            assert wait_for(lambda: requests.get(f"{url}/health", timeout=PATIENCE).status_code == 503, PATIENCE)
            assert generate(url, segments=late)["output_ids"] == expected
            for lines in streams:
                check_whole(lines)
        assert len(waiting.result()["output_ids"]) == 8
        assert wait_for(lambda: all(map(is_gone, processes.values())), PATIENCE), log.read_text()[-2000:]


def test_a_tokenizer_worker_without_requests_ends_no_answer(tiny_model, tmp_path):
    """Asked to end, it does so while another one still sends an answer."""
    log = tmp_path / "server.log"
    flags = ["--model-path", tiny_model, "--max-total-tokens", "4000", *device_flags(), *WORKERS]
    with running_server(flags, log, environment=WAIT_FOR_WORKERS) as url, ThreadPoolExecutor(16) as clients:
        processes = all_processes_of(url, flags)
        workers = [process for name, process in processes.items() if name.startswith("tokenizer_worker")]
        list(clients.map(lambda _: generate(url, segments=SEGMENTS), range(64)))  # both have served, surely
        body = {"segments": SEGMENTS, "sampling_params": LONG, "stream": True}
        with requests.post(f"{url}/generate", json=body, stream=True, timeout=4 * PATIENCE) as response:
            lines = filter(None, response.iter_lines())
            next(lines)
            processes["scheduler"].suspend()
            os.kill(processes["http"].pid, signal.SIGTERM)
            assert wait_for(lambda: any(map(is_gone, workers)), PATIENCE), log.read_text()[-2000:]
            processes["scheduler"].resume()
            check_whole(lines)
        assert wait_for(lambda: all(map(is_gone, processes.values())), PATIENCE), log.read_text()[-2000:]


def test_a_server_that_ends_refuses_connections(tiny_model, tmp_path):
    """Its scheduler takes long to end: meanwhile nobody is kept waiting, on a new connection or an old one."""
    log = tmp_path / "server.log"
    flags = ["--model-path", tiny_model, "--max-total-tokens", "2000", *device_flags()]
    with running_server(flags, log) as url:
        processes = processes_of(url)
        address = "127.0.0.1", int(url.rpartition(":")[2])
        processes["scheduler"].suspend()
        with (
            socket.create_connection(address, timeout=PATIENCE) as idle,
            socket.create_connection(address, timeout=PATIENCE) as slow,
        ):
            slow.sendall(b"POST /generate HTTP/1.1\r\nHost: any\r\nContent-Length: 9\r\n\r\n{")  # and never the rest
            os.kill(processes["http"].pid, signal.SIGTERM)
            assert idle.recv(1) == b""
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(address, timeout=PATIENCE)
            assert not is_gone(processes["http"])
            processes["scheduler"].resume()
            assert wait_for(lambda: all(map(is_gone, processes.values())), PATIENCE), log.read_text()[-2000:]
