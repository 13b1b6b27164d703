"""Which contender is asked when, and what happens when one fails or falls behind; servers are stand-ins."""

import contextlib
import json

import bench
import pytest
from case import parse_case
from contenders import Server
from serving import ServerError

CHAT = "chat --num-prompts 1 --cold-prompts 0"


@pytest.fixture
def compared(tmp_path, monkeypatch):
    """compared(contenders, cases, answer): run them, and return who was asked at which rate, in order, and the results.

    answer(name, rate): whether the contender could follow; may raise.
    """
    up, asked = [], []

    @contextlib.contextmanager
    def running(server, flags, log, timeout):
        log.write_text("a log")
        if server.module == "broken":
            raise ServerError("it did not start")
        up.append(server.module)
        try:
            yield f"http://{server.module}"
        finally:
            up.remove(server.module)

    monkeypatch.setattr(bench, "running", running)

    def run(contenders, cases, answer=lambda name, rate: True):
        results = bench.Results(tmp_path / "results", {})
        monkeypatch.setattr(results, "add_row", lambda row: None)

        def measure(url, name, run):
            assert url == f"http://{name}" and name in up
            asked.append((name, run.request_rate))
            return [{"phase": "cold", "saturated": True}, {"phase": "steady", "saturated": not answer(*asked[-1])}]

        runners = [bench.Runner(Server(name), [name], [], results, measure) for name in contenders]
        runs = [run for line in cases for run in parse_case(line).runs(0, None)]
        bench.compare(runners, runs, timeout=1)
        assert not up
        results.write_environment()
        servers = json.loads((results.folder / "environment.json").read_text())["servers"]
        return asked, {server["contenders"][0]: server["failure"] for server in servers}

    return run


def test_a_case_for_nobody(monkeypatch, tmp_path, capsys):
    """A case whose contenders are not in the run is an error, before a server is started."""
    command = ["bench.py", "--contenders", "lazy", "--out", str(tmp_path), "--case", f"{CHAT} --contenders stock"]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit):
        bench.parse_args()
    assert "a chat case is for stock only" in capsys.readouterr().err


def test_turns(compared):
    """Who was last is first in the next run; a case can be for some only."""
    asked, failures = compared(
        ["stock", "lazy"], [f"{CHAT} --request-rate 2 1", f"{CHAT} --request-rate 3 --contenders lazy,materialize"]
    )
    assert asked == [("stock", 1), ("lazy", 1), ("lazy", 2), ("stock", 2), ("lazy", 3)]
    assert failures == {"stock": None, "lazy": None}


def test_falling_behind(compared):
    """Faster rates of the case are left out for who fell behind, other cases are not, not even the same once more."""
    asked, _ = compared(
        ["stock", "lazy"],
        [f"{CHAT} --request-rate 1 2 3"] * 2,
        lambda name, rate: name == "lazy" or rate != 2,
    )
    assert [rate for name, rate in asked if name == "stock"] == [1, 2] * 2
    assert [rate for name, rate in asked if name == "lazy"] == [1, 2, 3] * 2


def test_failures(compared):
    """A server that does not start or fails later is noted and left out; the others go on."""

    def answer(name, rate):
        if name == "lazy" and rate == 2:
            raise ServerError("it died")
        return True

    asked, failures = compared(["broken", "lazy", "stock"], [f"{CHAT} --request-rate 1 2 3"], answer)
    assert asked == [("lazy", 1), ("stock", 1), ("stock", 2), ("lazy", 2), ("stock", 3)]
    assert failures == {"broken": "it did not start", "lazy": "it died", "stock": None}
