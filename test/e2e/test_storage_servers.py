"""Real servers over one storage that fails them: every answer is the oracle's, and nothing is held afterwards."""

import contextlib
import json
import re
import subprocess

import pytest
import requests
import torch

from fakes.hostile_storage import FAULTS
from oracle.block_mask import Oracle
from oracle.scenarios import Dice
from sglang_lazy.testing import device_flags, running_server
from sglang_lazy.testing.server import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("tiers")]

NUM_TOKENS = 4
TOLERANCE = 1e-4  # of a log-probability
LENS = (24, 40, 33)
HOSTILE = {
    "backend_name": "hostile",
    "module_path": "fakes.hostile_storage",
    "class_name": "HostileFile",
    "prefetch_timeout_base": 0.5,
    "prefetch_timeout_max": 1.0,
}
TIERS = ["--enable-hierarchical-cache", "--hicache-ratio", "4", "--max-total-tokens", "1000"]
FILE = ["--hicache-storage-backend", "file"]
DYNAMIC = ["--hicache-storage-backend", "dynamic", "--hicache-storage-backend-extra-config", json.dumps(HOSTILE)]


class Server:
    """A server at `url` over the storage in `folder`, with prompts of its own and the oracle of its model."""

    def __init__(self, url, folder, oracle):
        self.url, self.folder, self.oracle = url, folder, oracle

    def ask(self, prompt, **options):
        body = {
            "segments": [segment.to_request() for segment in prompt],
            "sampling_params": {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True},
            "return_logprob": True,
        }
        return requests.post(f"{self.url}/generate", json=body, timeout=60, **options)

    def answer(self, prompt):
        """The report on a prompt, whose answer must be the oracle's."""
        answer = self.ask(prompt)
        assert answer.status_code == 200, answer.text
        tokens = answer.json()["output_ids"]
        meta = answer.json()["meta_info"]
        expected = self.oracle.logprobs(prompt, tokens[:-1])
        chosen = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        reported = torch.tensor([entry[0] for entry in meta["output_token_logprobs"]])
        assert len(tokens) == NUM_TOKENS and (chosen - reported).abs().max() <= TOLERANCE
        assert (expected.amax(-1) - chosen).max() <= TOLERANCE
        return meta

    def hits(self, prompt):
        return [entry["hit"] for entry in self.answer(prompt)["chunks"]]

    def fault(self, name):
        assert name in FAULTS
        (self.folder / "fault").write_text(name)

    def flush(self):
        assert requests.post(f"{self.url}/flush_cache?timeout=30", timeout=60).ok

    def metric(self, name, **labels):
        """The sum of a metric's samples that have these labels."""
        lines = re.findall(rf"^{re.escape(name)}\{{(.*)\}} (\S+)$", requests.get(f"{self.url}/metrics").text, re.M)
        asked = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(float(value) for found, value in lines if all(each in found for each in asked))

    def state(self):
        (state,) = requests.get(f"{self.url}/server_info", timeout=10).json()["internal_states"]
        return state["lazy_storage"]

    def stored(self, count):
        """Wait until storage has this many objects."""
        assert wait_for(lambda: len(list(self.folder.glob("*.bin"))) >= count, timeout=20)


@contextlib.contextmanager
def started(tiny_model, folder, tmp_path, *flags):
    log = tmp_path / f"server-{len(list(tmp_path.glob('*.log')))}.log"
    flags = ["--model-path", tiny_model, *TIERS, *flags, *device_flags(), "--enable-metrics"]
    variables = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(folder)}
    with running_server(flags, log, environment=variables) as url:
        yield Server(url, folder, Oracle(tiny_model))


def prompt_of(dice, chunks):
    return [dice.text(3), *chunks, dice.text(5)]


@pytest.fixture(scope="module")
def hostile(tiny_model, tmp_path_factory):
    """A server whose storage has a fault when a test says so."""
    folder = tmp_path_factory.mktemp("storage")
    with started(tiny_model, folder, tmp_path_factory.mktemp("log"), *DYNAMIC) as server:
        yield server


@pytest.fixture
def healthy(hostile):
    """The same, whose storage works at first and in the end; then nothing is held anywhere."""
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
    """What it has is computed, late results and flushes harm nothing."""
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
    assert wait_for(lambda: healthy.state()["unstored"] == before["unstored"] + len(LENS), timeout=20)
    healthy.answer([dice.text(990)])
    meta = healthy.answer(prompt_of(dice, chunks[::-1]))
    assert meta["cached_tokens_details"]["host"] == sum(LENS)


def test_metrics_of_the_tiers(healthy):
    """Under SGLang's names where it has them."""
    dice = Dice("metrics")
    chunks = [dice.chunk(length) for length in LENS]
    names = {
        "stored": ("sglang:backuped_tokens_total", {"storage_backend": "dynamic"}),
        "fetched": ("sglang:prefetched_tokens_total", {"storage_backend": "dynamic"}),
        "loaded": ("sglang:load_back_tokens_total", {}),
        "host": ("sglang:cached_tokens_total", {"cache_source": "host"}),
        "storage": ("sglang:cached_tokens_total", {"cache_source": "storage_HostileFile"}),
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
    assert grown == expected


def test_a_server_is_killed_while_it_writes(tiny_model, tmp_path):
    """Another one over the same storage goes on, with what the first has stored; half objects are not believed."""
    folder = tmp_path / "storage"
    folder.mkdir()
    dice = Dice("killed")
    first, second = ([dice.chunk(length) for length in LENS] for _ in range(2))
    with started(tiny_model, folder, tmp_path, *FILE) as other:
        with started(tiny_model, folder, tmp_path, *DYNAMIC) as killed:  # with SIGKILL, in the end
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
    """The file backend, which reports both in its own way."""
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
            assert mounted(folder, "remount,ro")
            server.flush()
            assert [server.hits(prompt_of(dice, [each]))[0] for each in chunks] == hits
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
