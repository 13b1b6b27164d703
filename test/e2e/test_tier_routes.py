"""Every route of SGLang's that touches the host tier or storage does what it says, or says why it does not."""

import contextlib

import pytest
import requests
from stored import TIERS, Server, prompt_of

from fakes import no_gpu_to_wait_for
from oracle.block_mask import Oracle
from oracle.scenarios import Dice
from sglang_lazy.testing import device_flags, running_server
from sglang_lazy.testing.server import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("waiting")]

LENS = (24, 40, 33)
CLEARING = "POST", "/hicache/storage-backend/clear"


class Managed(Server):
    """A server whose administrative routes need a key."""

    def manage(self, method, route, **options):
        headers = {"Authorization": "Bearer admin"}
        return requests.request(method, self.url + route, headers=headers, timeout=60, **options)

    def flush(self):
        assert self.manage("POST", "/flush_cache?timeout=30").ok

    @property
    def files(self):
        return sorted(self.folder.glob("*.bin"))


@contextlib.contextmanager
def managed(tiny_model, tmp_path, *flags):
    flags = ["--model-path", tiny_model, *flags, *device_flags(), "--admin-api-key", "admin"]
    variables = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path / "storage")}
    with running_server(flags, tmp_path / "server.log", environment=variables) as url:
        yield Managed(url, tmp_path / "storage", Oracle(tiny_model))


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory, with_plugin):
    flags = [*TIERS, "--hicache-storage-backend", "file"]
    with with_plugin(no_gpu_to_wait_for.load), managed(tiny_model, tmp_path_factory.mktemp("tiers"), *flags) as server:
        yield server


@pytest.fixture
def prompts(server, request):
    """Prompts with the same chunks in both orders, which the server has stored."""
    dice = Dice(request.node.name)
    chunks = [dice.chunk(length) for length in LENS]
    server.answer(prompt_of(dice, chunks))
    server.flush()
    assert len(server.files) >= len(LENS)
    return [prompt_of(dice, chunks[::-1]), prompt_of(dice, chunks)]


def refused(answer, reason):
    return answer.status_code == 400 and reason in answer.text and "cleared" not in answer.text


def test_a_flush_leaves_what_is_stored(server, prompts):
    assert server.hits(prompts[0]) == [True] * len(LENS)


def test_clearing_deletes_what_is_stored(server, prompts):
    """Also what is read or has just been read; chunks in other tiers are stored when they are used again."""
    assert server.hits(prompts[0]) == [True] * len(LENS)
    assert server.manage(*CLEARING).status_code == 200 and not server.files
    assert server.hits(prompts[1]) == [True] * len(LENS), "they are on the device and the host"
    assert wait_for(lambda: len(server.files) == len(LENS))
    assert server.manage(*CLEARING).status_code == 200
    server.flush()
    assert not server.files and server.hits(prompts[0]) == [False] * len(LENS)


def test_attaching_is_refused(server):
    body = {"hicache_storage_backend": "file"}
    answer = server.manage("PUT", "/hicache/storage-backend", json=body)
    assert refused(answer, "--hicache-storage-backend")
    assert server.manage("GET", "/hicache/storage-backend").json()["hicache_storage_backend"] == "file"


def test_internal_state_has_no_flags_of_tiers(server):
    body = {"server_args": {"hicache_size": 3}}
    assert refused(server.manage("POST", "/set_internal_state", json=body), "nothing was changed")


def test_memory_that_is_released_is_flushed(server, prompts):
    """Chunks come back from storage."""
    assert server.manage("POST", "/release_memory_occupation", json={}).status_code == 200
    assert refused(server.manage("POST", "/release_memory_occupation", json={}), "released before")
    assert server.manage("POST", "/flush_cache").ok
    assert server.manage("POST", "/resume_memory_occupation", json={}).status_code == 200
    assert refused(server.manage("POST", "/resume_memory_occupation", json={}), "not released")
    assert server.hits(prompts[0]) == [True] * len(LENS)


def test_detached_storage_is_used_no_more(tiny_model, tmp_path):
    """What it has stays. The other tiers serve on; later calls have nothing to do."""
    dice = Dice("detached")
    chunks, new = [dice.chunk(length) for length in LENS], dice.chunk(30)
    with managed(tiny_model, tmp_path, *TIERS, "--hicache-storage-backend", "file") as server:
        server.answer(prompt_of(dice, chunks))
        answer = server.manage("DELETE", "/hicache/storage-backend")
        assert answer.status_code == 200, answer.text
        assert server.manage("GET", "/hicache/storage-backend").json()["hicache_storage_backend"] is None
        stored = server.files
        assert len(stored) == len(LENS), "detaching waits until chunks are stored"
        assert server.hits(prompt_of(dice, [new, *chunks])) == [False, True, True, True]
        server.answer([dice.text(990)])  # chunks leave the device
        assert server.answer(prompt_of(dice, chunks))["cached_tokens_details"]["host"] == sum(LENS)
        server.flush()
        assert server.hits(prompt_of(dice, chunks)) == [False] * len(LENS) and server.files == stored
        assert server.manage("DELETE", "/hicache/storage-backend").status_code == 200
        assert refused(server.manage(*CLEARING), "there is no storage")
        assert server.files == stored


def test_a_server_without_tiers_says_so(tiny_model, tmp_path):
    with managed(tiny_model, tmp_path) as server:
        assert refused(server.manage(*CLEARING), "there is no storage")
        assert refused(server.manage("DELETE", "/hicache/storage-backend"), "not enabled")
        body = {"hicache_storage_backend": "file"}
        assert refused(server.manage("PUT", "/hicache/storage-backend", json=body), "not enabled")
