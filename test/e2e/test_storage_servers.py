"""Real servers over storage that fails them: every answer is the oracle's, and nothing stays held."""

import errno
import json
import os
import subprocess

import pytest
import requests
from stored import NUM_TOKENS, prompt_of, started

from oracle.scenarios import Dice
from sglang_lazy.testing.server import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("waiting")]

LENS = (24, 40, 33)
HOSTILE = {
    "backend_name": "hostile",
    "module_path": "fakes.hostile_storage",
    "class_name": "HostileFile",
    "prefetch_timeout_base": 2.0,  # seconds in which a busy machine reads a chunk
    "prefetch_timeout_max": 4.0,
}
FILE = ["--hicache-storage-backend", "file"]
DYNAMIC = ["--hicache-storage-backend", "dynamic", "--hicache-storage-backend-extra-config", json.dumps(HOSTILE)]


@pytest.fixture(scope="module")
def hostile(tiny_model, tmp_path_factory):
    """A server whose storage fails when a test says so."""
    folder = tmp_path_factory.mktemp("storage")
    with started(tiny_model, folder, tmp_path_factory.mktemp("log"), *DYNAMIC) as server:
        yield server


@pytest.fixture
def healthy(hostile):
    """The same server, whose storage works before and after the test; afterwards nothing is held anywhere."""
    yield hostile
    hostile.fault("")
    hostile.flush()
    dice = Dice("in the end")
    chunks = [dice.chunk(length) for length in LENS]
    hostile.answer(prompt_of(dice, chunks))
    hostile.flush()
    assert hostile.hits(prompt_of(dice, chunks[::-1])) == [True] * len(LENS)
    hostile.flush()
    hostile.answer([dice.text(5)])  # SGLang updates this metric when it forms a batch
    assert hostile.metric("sglang:hicache_host_used_tokens") <= 5 + NUM_TOKENS


@pytest.mark.parametrize("fault", ["hang", "reset"])
def test_storage_that_does_not_answer(healthy, fault):
    """Stored chunks are computed instead; late results and flushes do no harm."""
    dice = Dice(f"answers {fault}")
    chunks = [dice.chunk(length) for length in LENS]
    healthy.answer(prompt_of(dice, chunks))
    healthy.flush()
    healthy.fault(fault)
    assert healthy.hits(prompt_of(dice, chunks)) == [False] * len(LENS)
    assert healthy.hits(prompt_of(dice, chunks[::-1])) == [True] * len(LENS)
    healthy.flush()
    assert healthy.hits(prompt_of(dice, chunks)) == [False] * len(LENS)


def test_a_client_that_leaves_while_storage_hangs(healthy):
    dice = Dice("leaves")
    prompt = prompt_of(dice, [dice.chunk(length) for length in LENS])
    healthy.fault("hang")
    with pytest.raises(requests.Timeout):
        requests.post(
            f"{healthy.url}/generate", json={"segments": [segment.to_request() for segment in prompt]}, timeout=0.2
        )
    assert healthy.hits(prompt) in ([False] * len(LENS), [True] * len(LENS))


def test_a_full_disk(healthy):
    """Chunks stay on the host."""
    dice = Dice("full")
    chunks = [dice.chunk(length) for length in LENS]
    healthy.fault("full")
    before = healthy.state()
    healthy.answer(prompt_of(dice, chunks))
    assert wait_for(lambda: healthy.state()["unstored"] == before["unstored"] + len(LENS))
    healthy.answer([dice.text(990)])
    meta = healthy.answer(prompt_of(dice, chunks[::-1]))
    assert meta["cached_tokens_details"]["host"] == sum(LENS)


def test_storage_that_cannot_be_cleared(healthy):
    """The answer says so; chunks are found as before."""
    dice = Dice("kept")
    chunks = [dice.chunk(length) for length in LENS]
    healthy.answer(prompt_of(dice, chunks))
    healthy.fault("kept")
    answer = requests.post(f"{healthy.url}/hicache/storage-backend/clear", timeout=60)
    assert answer.status_code == 400 and "not deleted" in answer.text
    healthy.flush()
    assert healthy.hits(prompt_of(dice, chunks[::-1])) == [True] * len(LENS)


def test_metrics_of_the_tiers(healthy):
    """Under SGLang's names where they exist."""
    dice = Dice("metrics")
    chunks = [dice.chunk(length) for length in LENS]
    names = {
        "stored": ("sglang:backuped_tokens_total", {"storage_backend": "dynamic"}),
        "fetched": ("sglang:prefetched_tokens_total", {"storage_backend": "dynamic"}),
        "loaded": ("sglang:load_back_tokens_total", {}),
        "host": ("sglang:cached_tokens_total", {"cache_source": "host"}),
        "storage": ("sglang:cached_tokens_total", {"cache_source": "storage"}),
        "backed up": ("sglang_lazy:host_backup_tokens_total", {}),
        "late": ("sglang_lazy:storage_fetch_timeouts_total", {}),
        "missed": ("sglang_lazy:storage_fetch_misses_total", {}),
        "waits": ("sglang_lazy:storage_fetch_seconds_count", {}),
    }

    def values():
        return {name: healthy.metric(metric, **labels) for name, (metric, labels) in names.items()}

    before = values()
    healthy.answer(prompt_of(dice, chunks))
    healthy.flush()
    healthy.answer(prompt_of(dice, chunks[::-1]))
    healthy.answer([dice.text(990)])
    healthy.answer(prompt_of(dice, chunks))
    healthy.flush()
    healthy.fault("hang")
    healthy.answer(prompt_of(dice, chunks))
    tokens, count = sum(LENS), len(LENS)
    expected = {"stored": tokens, "fetched": tokens, "loaded": 2 * tokens, "host": tokens, "storage": tokens}
    expected |= {"late": count, "missed": count, "waits": 2 * count}
    grown = {name: value - before[name] for name, value in values().items()}
    assert grown.pop("backed up") >= tokens  # text before chunks is backed up, too
    assert grown == expected


def test_a_server_is_killed_while_it_writes(tiny_model, tmp_path):
    """Another server over the same storage uses what the first has stored; half-written objects are rejected."""
    folder = tmp_path / "storage"
    folder.mkdir()
    dice = Dice("killed")
    first, second = ([dice.chunk(length) for length in LENS] for _ in range(2))
    with started(tiny_model, folder, tmp_path, *FILE, "--served-model-name", "another") as other:
        with started(tiny_model, folder, tmp_path, *DYNAMIC) as killed:  # it gets a SIGKILL below
            killed.answer(prompt_of(dice, first))
            killed.stored(len(LENS))
            assert other.hits(prompt_of(dice, first[::-1])) == [True] * len(LENS)
            killed.fault("half")
            killed.answer(prompt_of(dice, second))
            killed.stored(len(LENS) + 1)
        answers = other.hits(prompt_of(dice, [second[0], first[0], second[1], second[2]]))
        assert answers == [False, True, False, False]
        other.flush()
        assert other.hits(prompt_of(dice, first)) == [True] * len(LENS)


def mounted(folder, options):
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    return subprocess.run(command, capture_output=True).returncode == 0


def test_a_real_disk_that_is_full_then_read_only(tiny_model, tmp_path):
    """With the file backend, which reports the two differently."""
    folder = tmp_path / "storage"
    folder.mkdir()
    if not mounted(folder, "size=512k"):
        pytest.skip("nothing can be mounted here")
    try:
        dice = Dice("disk")
        chunks = [dice.chunk(60) for _ in range(12)]
        with started(tiny_model, folder, tmp_path, *FILE) as server:
            for each in chunks:
                server.answer(prompt_of(dice, [each]))
            server.flush()
            stored = server.state()
            assert stored["stored"] > 0 and stored["unstored"] > 0 and stored["stored"] + stored["unstored"] == 12
            hits = [server.hits(prompt_of(dice, [each]))[0] for each in chunks]
            assert sum(hits) == stored["stored"]
            server.flush()
            before, objects = server.state(), sorted(folder.iterdir())
            assert mounted(folder, "remount,ro,size=4m")  # with room: only what it is now keeps writes out
            assert [server.hits(prompt_of(dice, [each]))[0] for each in chunks] == hits
            server.flush()
            after = server.state()
            assert after["stored"] == before["stored"]
            assert after["unstored"] - before["unstored"] == hits.count(False)
            assert sorted(folder.iterdir()) == objects
            log = (tmp_path / "server-0.log").read_text()
            assert log.count(os.strerror(errno.EROFS)) == hits.count(False)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
