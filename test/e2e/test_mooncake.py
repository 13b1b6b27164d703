"""Servers over Mooncake's store, for which another process lends memory; a server is killed, then the store."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import requests
from stored import prompt_of, started

from oracle.scenarios import Dice
from sglang_lazy.storage.chunk_objects import NUM_READERS
from sglang_lazy.testing.server import free_ports, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("waiting")]

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

    def num_found(self):
        """How many reads the master has answered; they go on with the lender."""
        name = "master_batch_get_replica_list_requests_total"
        (count,) = re.findall(rf"^{name} (\d+)$", requests.get(self.metrics_url, timeout=10).text, re.M)
        return int(count)


@pytest.fixture
def store(mooncake, tmp_path):
    port, metrics_port = free_ports(2)
    address = f"127.0.0.1:{port}"
    command = [str(mooncake / "mooncake_master"), f"--rpc_port={port}", f"--metrics_port={metrics_port}"]
    command += ["--default_kv_lease_ttl=600000"]  # ms; a read that takes longer is in vain
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
    """Then one of them is killed, and finally the store. The survivor waits for its reads, however slow they are."""
    dice = Dice("mooncake")
    first, second = ([dice.chunk(length) for length in LENS] for _ in range(2))
    wait = ["--hicache-storage-prefetch-policy", "wait_complete"]
    with started(tiny_model, tmp_path, tmp_path, *store.flags, *wait) as survivor:
        with started(tiny_model, tmp_path, tmp_path, *store.flags) as killed:  # it gets a SIGKILL below
            killed.answer(prompt_of(dice, first))
            assert wait_for(lambda: killed.state()["stored"] == len(LENS))
            meta = survivor.answer(prompt_of(dice, first[::-1]))
            assert meta["cached_tokens_details"]["storage"] == sum(LENS)
            assert meta["cached_tokens_details"]["storage_backend"] == "MooncakeStore"
            killed.answer(prompt_of(dice, second))
            # Of a write that is cut off Mooncake keeps the key for a while, and refuses to write it again.
            assert wait_for(lambda: killed.state()["stored"] == 2 * len(LENS))
        survivor.answer(prompt_of(dice, [second[0], first[0], *second[1:]]))
        survivor.flush()
        assert survivor.hits(prompt_of(dice, second)) == [True] * len(LENS)
        assert survivor.hits(prompt_of(dice, first)) == [True] * len(LENS)
        store.lender.kill()
        store.master.kill()
        survivor.flush()
        assert survivor.hits(prompt_of(dice, second)) == [False] * len(LENS)
        assert survivor.hits(prompt_of(dice, second[::-1])) == [True] * len(LENS)


@pytest.mark.parametrize(
    "killed, num_read", [pytest.param("master", NUM_READERS, marks=pytest.mark.nightly), ("lender", 0)]
)
def test_the_store_is_killed_while_chunks_are_read(store, tiny_model, tmp_path, killed, num_read):
    """Without the master, the reads that it has answered succeed. What cannot be read is computed; prompts wait for as
    long as reads take, so none may hang."""
    dice = Dice(f"the {killed} is killed")
    chunks = dice.chunks(NUM_READERS + 4, 24, 40)
    prompts = [prompt_of(dice, chunks[first::4]) for first in range(4)]
    wait = ["--hicache-storage-prefetch-policy", "wait_complete"]
    with started(tiny_model, tmp_path, tmp_path, *store.flags, *wait) as server:
        server.answer(prompt_of(dice, chunks))
        assert wait_for(lambda: server.state()["stored"] == len(chunks))
        server.flush()
        num_found = store.num_found() + NUM_READERS
        store.lender.send_signal(signal.SIGSTOP)  # so that reads begin and do not end
        with ThreadPoolExecutor(len(prompts)) as pool:
            hits = pool.map(server.hits, prompts)
            assert wait_for(lambda: store.num_found() == num_found)
            getattr(store, killed).kill()
            store.lender.send_signal(signal.SIGCONT)
            assert sum(map(sum, hits)) == num_read
        assert server.hits(prompt_of(dice, chunks)) == [True] * len(chunks)
        server.flush()
        assert server.hits(prompts[0]) == [False] * len(chunks[::4])
        assert server.hits(prompts[0]) == [True] * len(chunks[::4])
