"""The order in which contenders are measured, and what happens when one fails or saturates; servers are stand-ins."""

import contextlib
import json

import pytest

from benchmark.serving import bench
from benchmark.serving.case import parse_case
from benchmark.serving.contenders import Server
from sglang_lazy.testing import ServerError

CHAT = "chat --num-prompts 1 --cold-prompts 0"


@pytest.fixture
def compared(tmp_path, monkeypatch):
    """compared(contenders, cases, answer): run them; returns (contender, rate) in the order measured, and the results.

    answer(name, rate): whether the contender kept up; may raise.
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
            for stage in run.stages:
                asked.append((name, run.request_rate))
                saturated = {"cold": True, "steady": not answer(*asked[-1])}
                yield [
                    {"phase": phase, "saturated": saturated[phase]} for phase in dict.fromkeys(["cold", stage.phase])
                ]

        runners = [bench.Runner(Server(name), [name], [], results, measure) for name in contenders]
        runs = [run for line in cases for run in parse_case(line).runs(0, None)]
        bench.compare(runners, runs, timeout=1)
        assert not up
        results.write_environment()
        servers = json.loads((results.folder / "environment.json").read_text())["servers"]
        return asked, {server["contenders"][0]: server["failure"] for server in servers}

    return run


def test_a_case_for_nobody(monkeypatch, tmp_path, capsys):
    """A case whose contenders are all absent from the run is an error before any server starts."""
    command = ["bench.py", "--contenders", "lazy", "--out", str(tmp_path), "--case", f"{CHAT} --contenders stock"]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit):
        bench.parse_args()
    assert "a chat case is for stock only" in capsys.readouterr().err


def test_help_about_a_workload_needs_nothing_else(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bench.py", "--case", "agent --help"])
    with pytest.raises(SystemExit) as ended:
        bench.parse_args()
    assert ended.value.code == 0 and "tokens of a tool output" in capsys.readouterr().out


def test_turns(compared):
    """The last contender of one run is the first of the next; a case may be for some contenders only."""
    asked, failures = compared(
        ["stock", "lazy"], [f"{CHAT} --request-rate 2 1", f"{CHAT} --request-rate 3 --contenders lazy,copy"]
    )
    assert asked == [("stock", 1), ("lazy", 1), ("lazy", 2), ("stock", 2), ("lazy", 3)]
    assert failures == {"stock": None, "lazy": None}


def test_turns_by_stage(compared):
    """A run of several stages alternates stage by stage: no contender is measured twice before the others."""
    asked, failures = compared(["stock", "lazy"], ["chat --num-prompts 3 --rounds 3 --cold-prompts 0"] * 2)
    assert [name for name, _ in asked] == ["stock", "lazy", "lazy", "stock", "stock", "lazy"] + [
        "lazy", "stock", "stock", "lazy", "lazy", "stock",
    ]  # fmt: skip
    assert failures == {"stock": None, "lazy": None}


def test_contenders_of_one_server(tmp_path, monkeypatch):
    """They share a cache, which each run flushes, so one runs to its end before the next begins."""
    asked = []

    def measure(url, name, run):
        for _ in run.stages:
            asked.append(name)
            yield []

    monkeypatch.setattr(bench, "running", lambda *given: contextlib.nullcontext("http://lazy"))
    results = bench.Results(tmp_path / "one", {})
    runner = bench.Runner(Server("lazy"), ["lazy", "lazy-plain"], [], results, measure)
    cases = [parse_case("chat --num-prompts 2 --rounds 2 --cold-prompts 0") for _ in range(2)]
    bench.compare([runner], [run for case in cases for run in case.runs(0, None)], timeout=1)
    assert asked == [name for name in ("lazy", "lazy-plain", "lazy-plain", "lazy") for _ in range(2)]
    assert runner.facts["contenders"] == ["lazy", "lazy-plain"]


def test_falling_behind(compared):
    """A contender that fell behind skips the faster rates of that case, but no other case, not even the same one
    repeated."""
    asked, _ = compared(
        ["stock", "lazy"],
        [f"{CHAT} --request-rate 1 2 3"] * 2,
        lambda name, rate: name == "lazy" or rate != 2,
    )
    assert [rate for name, rate in asked if name == "stock"] == [1, 2] * 2
    assert [rate for name, rate in asked if name == "lazy"] == [1, 2, 3] * 2


def test_failures(compared):
    """A server that fails at the start or later is recorded and skipped; the others continue."""

    def answer(name, rate):
        if name == "lazy" and rate == 2:
            raise ServerError("it died")
        return True

    asked, failures = compared(["broken", "lazy", "stock"], [f"{CHAT} --request-rate 1 2 3"], answer)
    assert asked == [("lazy", 1), ("stock", 1), ("stock", 2), ("lazy", 2), ("stock", 3)]
    assert failures == {"broken": "it did not start", "lazy": "it died", "stock": None}
