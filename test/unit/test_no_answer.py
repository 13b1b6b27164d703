"""What clients say of servers that do not answer: a sentence with the URL, and what to do."""

import contextlib
import importlib
import socket
import threading
from pathlib import Path

import pytest
import requests

from sglang_lazy import bench
from sglang_lazy.verify import connect
from sglang_lazy.verify.remote import no_answer

EXAMPLES = Path(__file__).parents[2] / "examples"


@contextlib.contextmanager
def listening(answer):
    """The address of a server that sends `answer` to its first client, and then closes."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            client, _ = server.accept()
            with client:
                client.recv(65536)
                client.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield "127.0.0.1:{1}".format(*server.getsockname())
        thread.join()


@pytest.fixture
def nobody():
    """The URL of a port at which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


def without_traces(said):
    return "\n" not in said and not any(word in said for word in ("HTTPConnectionPool", "Max retries", "object at"))


def test_no_server(nobody):
    for url in (nobody, "http://no-such-host.invalid:30000"):
        with pytest.raises(ValueError, match="no server answers at") as refused:
            connect(url)
        said = str(refused.value)
        assert url in said and "sglang-lazy serve" in said and without_traces(said), said


@pytest.mark.parametrize(
    "scheme, answer, words",
    [
        ("http", b"", "has broken off"),
        ("http", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n", "has broken off"),
        ("https", b"HTTP/1.1 400 Bad Request\r\n\r\n", "is at http://"),
    ],
    ids=["without an answer", "within an answer", "a server without TLS"],
)
def test_a_server_that_does_not_answer(scheme, answer, words):
    with listening(answer) as address, pytest.raises(ValueError, match=words) as refused:
        connect(f"{scheme}://{address}")
    assert f"{scheme}://{address}" in str(refused.value) and without_traces(str(refused.value))


def test_a_server_that_hangs():
    said = no_answer("http://a:1", requests.ReadTimeout("HTTPConnectionPool(host='a'): Read timed out."))
    assert said.startswith("http://a:1 has not answered in time") and without_traces(said)


def test_bench_says_the_same(capsys, nobody):
    with pytest.raises(SystemExit) as ended:
        bench.main(["--url", nobody])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: no server answers at {nobody}: start one")


def test_examples_say_the_same(monkeypatch, nobody):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    with pytest.raises(SystemExit, match=f"error: no server answers at {nobody}: start one"):
        importlib.import_module("tiny_model").server_or_tiny(nobody)
