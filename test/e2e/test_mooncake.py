"""Two servers that share Mooncake's store, for which a third process lends memory; then one server is killed."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from stored import prompt_of, started

from oracle.scenarios import Dice
from sglang_lazy.testing.server import free_ports, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("tiers")]
mooncake = pytest.importorskip(
    "mooncake.store", reason="Mooncake is not installed: mooncake-transfer-engine", exc_type=ImportError
)

LENS = (24, 40, 33)
LEND = """
import json, sys, threading
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert not store.setup("127.0.0.1", "P2PHANDSHAKE", 64 << 20, 16 << 20, "tcp", "", sys.argv[1])
print("ready", flush=True)
threading.Event().wait()
"""


@contextlib.contextmanager
def running(command, log):
    with open(log, "wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def storage(tmp_path):
    """The flags of servers over a new store, and the store's processes."""
    port, metrics_port = free_ports(2)
    address = f"127.0.0.1:{port}"
    master = [str(Path(mooncake.__file__).parent / "mooncake_master"), f"--rpc_port={port}"]
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
        running([*master, f"--metrics_port={metrics_port}"], tmp_path / "master.txt") as server,
        running([sys.executable, "-c", LEND, address], log) as lender,
    ):
        assert wait_for(lambda: "ready" in log.read_text(errors="replace")), log.read_text()
        flags = ["--hicache-storage-backend", "mooncake", "--hicache-storage-backend-extra-config", json.dumps(config)]
        yield flags, (lender, server)


def test_two_servers_share_what_they_store(storage, tiny_model, tmp_path):
    """Then one of them is killed, and finally the store."""
    storage_flags, processes = storage
    dice = Dice("mooncake")
    first, second = ([dice.chunk(length) for length in LENS] for _ in range(2))
    with started(tiny_model, tmp_path, tmp_path, *storage_flags) as survivor:
        with started(tiny_model, tmp_path, tmp_path, *storage_flags) as killed:  # it gets a SIGKILL below
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
        for process in processes:
            process.kill()
        survivor.flush()
        assert survivor.hits(prompt_of(dice, second)) == [False] * len(LENS)
        assert survivor.hits(prompt_of(dice, second[::-1])) == [True] * len(LENS)
