"""Servers over Mooncake's store, for which another process lends memory; a server is killed, then the store."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from stored import prompt_of, started

from oracle.scenarios import Dice
from sglang_lazy.testing.server import free_ports, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("tiers")]

BESIDE = Path(sys.prefix) / "mooncake"
LENS = (24, 40, 33)
LEND = """
import json, sys, threading
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert not store.setup("127.0.0.1", "P2PHANDSHAKE", 64 << 20, 16 << 20, "tcp", "", sys.argv[1])
print("ready", flush=True)
threading.Event().wait()
"""


@pytest.fixture(scope="module")
def mooncake():
    """The folder of Mooncake's package, which the processes that tests start can import."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(BESIDE), os.environ.get("PYTHONPATH")])))
        command = [sys.executable, "-c", "import mooncake.store; print(*mooncake.__path__)"]
        found = subprocess.run(command, capture_output=True, text=True)
        if found.returncode:
            reason = found.stderr.strip().rpartition("\n")[2]
            pytest.skip(f"{reason} (`.ci/mooncake FOLDER` installs Mooncake and the libraries it needs)")
        yield Path(found.stdout.strip())


@contextlib.contextmanager
def running(command, log):
    with open(log, "wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class Store(NamedTuple):
    """The flags of servers over a store; its master, which knows what is where; and the process that lends memory."""

    flags: list[str]
    master: subprocess.Popen
    lender: subprocess.Popen
    metrics_url: str


@pytest.fixture
def store(mooncake, tmp_path):
    port, metrics_port = free_ports(2)
    address = f"127.0.0.1:{port}"
    command = [str(mooncake / "mooncake_master"), f"--rpc_port={port}", f"--metrics_port={metrics_port}"]
    config = {
        "master_server_address": address,
        "metadata_server": "P2PHANDSHAKE",
        "protocol": "tcp",
        "local_hostname": "127.0.0.1",
        "global_segment_size": 0,
        "check_server": False,
    }
    log = tmp_path / "segment.txt"
    with (
        running(command, tmp_path / "master.txt") as master,
        running([sys.executable, "-c", LEND, address], log) as lender,
    ):
        assert wait_for(lambda: "ready" in log.read_text(errors="replace")), log.read_text()
        flags = ["--hicache-storage-backend", "mooncake", "--hicache-storage-backend-extra-config", json.dumps(config)]
        yield Store(flags, master, lender, f"http://127.0.0.1:{metrics_port}/metrics")


def test_two_servers_share_what_they_store(store, tiny_model, tmp_path):
    """Then one of them is killed, and finally the store."""
    dice = Dice("mooncake")
    first, second = ([dice.chunk(length) for length in LENS] for _ in range(2))
    with started(tiny_model, tmp_path, tmp_path, *store.flags) as survivor:
        with started(tiny_model, tmp_path, tmp_path, *store.flags) as killed:  # it gets a SIGKILL below
            killed.answer(prompt_of(dice, first))
            assert wait_for(lambda: killed.state()["stored"] == len(LENS))
            meta = survivor.answer(prompt_of(dice, first[::-1]))
            assert meta["cached_tokens_details"]["storage"] == sum(LENS)
            assert meta["cached_tokens_details"]["storage_backend"] == "MooncakeStore"
            killed.answer(prompt_of(dice, second))  # whether already written or not
        survivor.answer(prompt_of(dice, [second[0], first[0], *second[1:]]))
        survivor.flush()
        assert survivor.hits(prompt_of(dice, second)) == [True] * len(LENS)
        assert survivor.hits(prompt_of(dice, first)) == [True] * len(LENS)
        store.lender.kill()
        store.master.kill()
        survivor.flush()
        assert survivor.hits(prompt_of(dice, second)) == [False] * len(LENS)
        assert survivor.hits(prompt_of(dice, second[::-1])) == [True] * len(LENS)
