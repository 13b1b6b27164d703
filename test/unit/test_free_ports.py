"""The ports that test servers get: no two get the same one, though each is bound only much later."""

import concurrent.futures
import socket
import subprocess
import sys
import time

import pytest

from sglang_lazy.testing import server
from sglang_lazy.testing.processes import ServerError
from sglang_lazy.testing.server import BLOCK, free_ports, running_server

LOWEST = """
import random
random.sample = lambda blocks, _count: blocks
from sglang_lazy.testing.server import free_ports
print(*free_ports(2), flush=True)
input()
"""


def test_no_port_is_given_twice():
    given = [free_ports(count) for count in (1, 2, 3)]
    assert all(ports == list(range(ports[0], ports[0] + len(ports))) for ports in given)
    assert len({port for ports in given for port in ports}) == 6


def test_threads_have_ports_of_their_own(monkeypatch):
    """Here a thread looks long at each port, so that others would come to it meanwhile."""
    is_unused = server._is_unused
    monkeypatch.setattr(server, "_is_unused", lambda port: time.sleep(0.01) or is_unused(port))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        given = [port for ports in pool.map(free_ports, [2] * 8) for port in ports]
    assert len(set(given)) == 16


def test_ports_in_use_are_left_out():
    (port,) = free_ports(1)
    with socket.create_server(("", port)):
        assert [port] not in [free_ports(1) for _ in range(BLOCK)]
    assert [port] in [free_ports(1) for _ in range(BLOCK)]


def test_a_server_is_not_started_where_another_answers(tmp_path, monkeypatch):
    """That one would be taken for it. A port that was used a moment ago is free."""

    class Started(Exception):
        pass

    def start(*_, **__):
        raise Started

    monkeypatch.setattr(server, "start", start)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with (
            pytest.raises(ServerError, match=f"port {port} is in use"),
            running_server([], tmp_path / "log", port=port),
        ):
            pass
        with socket.create_connection(("127.0.0.1", port)), other.accept()[0]:
            pass
    with pytest.raises(Started), running_server([], tmp_path / "log", port=port):
        pass


def test_processes_have_ports_of_their_own():
    """Even if all try the same first."""
    command, pipes = [sys.executable, "-c", LOWEST], dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with subprocess.Popen(command, **pipes) as one, subprocess.Popen(command, **pipes) as other:
        given = [set(map(int, process.stdout.readline().split())) for process in (one, other)]
        for process in (one, other):
            process.kill()
    assert [len(ports) for ports in given] == [2, 2] and not given[0] & given[1]
