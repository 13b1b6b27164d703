"""Storage that hangs, is slow, fails or lies: all requests are answered, and no slot of device or host is lost."""

import errno

import pytest

from fakes.chunk_server import PATIENCE, A, B, C, D, Server, chunk_of, storage_with
from fakes.storage import Storage
from sglang_lazy.storage import chunk_objects
from sglang_lazy.storage.calls import MAX_STUCK
from sglang_lazy.storage.chunk_objects import NUM_READERS
from sglang_lazy.testing.server import wait_for

pytestmark = pytest.mark.usefixtures("sglang_context")

WAITS, LACKING = "on its way", None


@pytest.fixture(autouse=True, params=[0, 60], ids=["KV", "states"])
def num_states(request, monkeypatch):
    """Storage of KV alone, and of states with it, in objects of their own."""
    monkeypatch.setattr(Server, "num_states", request.param)


@pytest.fixture
def two_pieces(monkeypatch):
    """Store chunks of three or four tokens in two pieces."""
    monkeypatch.setattr(chunk_objects, "PIECE_BYTES", 2 * Server(Storage()).tree.memory.token_bytes)


@pytest.fixture
def storage():
    return storage_with(A, B)


@pytest.fixture
def hanging(storage):
    """A server whose storage has A and B but does not answer. Its clock stands still."""
    server = Server(storage)
    hang(server, storage)
    yield server
    storage.open.set()


def hang(server, storage):
    server.slow = True
    storage.open.clear()


def answer(server, storage):
    """Storage answers what it was asked so far."""
    storage.open.set()
    server.slow = False
    server.settle()


def asked(server, *texts):
    """A prompt for these chunks, once storage has been asked for all of them."""
    prompt, num_objects = server.ask(*texts), len(texts) * (1 + (server.num_states > 0))
    assert wait_for(lambda: server.storage.objects.read.num_running == min(NUM_READERS, num_objects))
    return prompt


def test_requests_wait_until_the_deadline_and_no_longer(hanging):
    """Two seconds, plus a tenth for every 1,024 tokens."""
    prompt = hanging.ask(A, B)
    for now in (0.0, 1.99):
        hanging.now = now
        hanging.step()
        assert hanging.states(prompt) == [WAITS, WAITS]
    hanging.now = 2.01
    assert hanging.answer(prompt) == [LACKING, LACKING] and hanging.numbers()["late"] == 2


def test_the_deadline_counts_all_that_is_being_fetched(hanging):
    """A state takes as long as the 2 tokens whose KV is as large."""
    hanging.storage.patience = PATIENCE._replace(base=0.0, per_ki_token=1024.0, max=20.0)
    long = (*A, 7, 7, 7, 7)
    short, both = hanging.ask(A), hanging.ask(long)
    one, two = (4 + 2, 12 + 4) if hanging.num_states else (4, 12)
    for now, states in ((one - 0.1, [WAITS] * 2), (two - 0.1, [LACKING, WAITS]), (two + 0.1, [LACKING] * 2)):
        hanging.now = now
        hanging.step()
        assert hanging.states(short) + hanging.states(both) == states, now


def test_the_deadline_has_a_limit(hanging):
    hanging.storage.patience = PATIENCE._replace(base=0.0, per_ki_token=1024.0, max=3.0)
    prompt = hanging.ask(A)
    for now, state in ((2.9, WAITS), (3.1, LACKING)):
        hanging.now = now
        hanging.step()
        assert hanging.states(prompt) == [state], now


def test_nobody_waits_once_all_threads_hang(two_pieces, hanging, storage):
    """Later requests compute their chunks at once, until storage answers. That reads of which no piece was asked for
    have ended means nothing."""
    chunks = [(first, 7, 7) for first in range(10, 10 + NUM_READERS + MAX_STUCK)]
    for part in (chunks[:NUM_READERS], chunks[NUM_READERS:]):
        prompt = asked(hanging, *part)
        assert hanging.states(prompt) == [WAITS] * len(part), "threads are left"
        hanging.now += 10.0
        hanging.answer(prompt)
        hanging.evict()
    for chunk in (B, C):
        assert hanging.served(chunk) == [LACKING] and hanging.numbers()["late"] == len(chunks)
    answer(hanging, storage)
    hanging.flush()
    assert hanging.served(A, B) == ["storage", "storage"]


@pytest.mark.parametrize("moment", ["computing", "resident", "on the host", "gone"])
def test_late_answers_are_harmless(hanging, storage, moment):
    """Whatever became of the chunk meanwhile. Each step checks all slots and their contents."""
    prompt = asked(hanging, A)
    hanging.now = 10.0
    if moment == "computing":
        hanging.step()
        node = hanging.tree.compute(prompt.chunks[0].tokens, prompt.chunks[0].key.namespace)
    else:
        hanging.answer(prompt)
    if moment in ("on the host", "gone"):
        hanging.evict()
    if moment == "gone":
        hanging.tree.host.evict(4)
    answer(hanging, storage)
    assert hanging.numbers()["fetched"] == 1 and not hanging.storage.fetches
    if moment == "computing":
        assert node.host is None
        hanging.compute(prompt.chunks)
        hanging.settle()
    hanging.evict()
    assert hanging.states(prompt) == ["host"]
    assert hanging.served(A) == ["host"]


def test_policy_best_effort_never_waits(hanging, storage):
    hanging.storage.patience = PATIENCE._replace(policy="best_effort")
    assert hanging.served(A) == [LACKING] and hanging.served(B) == [LACKING]
    answer(hanging, storage)
    assert hanging.numbers()["fetched"] == 2


def test_policy_wait_complete_waits_forever(hanging, storage):
    hanging.storage.patience = PATIENCE._replace(policy="wait_complete")
    prompt = hanging.ask(A)
    hanging.now = 1e9
    hanging.step()
    assert hanging.states(prompt) == [WAITS]
    answer(hanging, storage)
    assert hanging.answer(prompt) == ["storage"]


def test_hanging_storage_holds_at_most_half_of_the_host(storage):
    server = Server(storage, host_size=16)
    server.warm(C)
    hang(server, storage)
    prompt = server.ask(A, B, D)
    assert server.states(prompt) == [WAITS, WAITS, LACKING]
    assert sum(len(fetch.slots) for fetch in server.storage.fetches) == 8
    answer(server, storage)


def test_a_flush_abandons_storage_that_hangs(hanging, storage):
    """While it reads and while it writes. Its late answers touch no slot, though all slots have new owners."""
    hanging.storage.patience = PATIENCE._replace(base=0.0, per_ki_token=0.0, max=2.0)
    ended, objects = [], hanging.storage.objects
    for act in ("_read", "_write"):
        setattr(objects, act, noting(ended, getattr(objects, act)))
    prompt = asked(hanging, A, C)
    hanging.now = 10.0
    hanging.answer(prompt)
    assert wait_for(lambda: objects.written.num_running == 1)
    hanging.flush()
    assert hanging.numbers()["unstored"] == 2 and not (hanging.storage.fetches or objects.written)
    taken = hanging.tree.host.alloc(hanging.tree.memory.slots.size)
    (rows,) = hanging.tree.memory.groups
    rows.host.fill_(7)
    storage.open.set()
    num_reads = 2 * (1 + (hanging.num_states > 0))
    assert wait_for(lambda: len(ended) == num_reads + 1), "all reads, and the first of the writes"
    assert (rows.host == 7).all()
    hanging.tree.host.free(taken)
    hanging.slow = False
    assert hanging.served(A, B) == ["storage", "storage"]


def noting(ended, act):
    def noted(*args):
        try:
            return act(*args)
        finally:
            ended.append(act)

    return noted


def raising(error):
    def fail(*_args):
        raise error

    return fail


def half(storage, then=None):
    """A `batch_get` that fills half of an object, then fails or claims success."""

    def batch_get(keys, targets):
        for key, target in zip(keys, targets, strict=True):
            data = storage.objects[key][: len(target) // 2]
            target.fill_(255)
            target[: len(data)] = data
        if then is not None:
            raise then
        return targets

    return batch_get


@pytest.mark.parametrize("fault", ["refused", "killed", "half", "nothing", "none"])
def test_storage_that_fails_while_it_reads(storage, fault):
    """Chunks are computed; once storage works again, they are found."""
    faults = {
        "refused": raising(ConnectionRefusedError()),
        "killed": half(storage, then=ConnectionResetError()),
        "half": half(storage),
        "nothing": lambda keys, targets: targets,
        "none": lambda keys, targets: None,
    }
    server = Server(storage)
    batch_get, storage.batch_get = storage.batch_get, faults[fault]
    assert server.served(A, B) == [LACKING, LACKING]
    assert server.numbers()["missed"] == 2
    storage.batch_get = batch_get
    server.flush()
    assert server.served(A, B) == ["storage", "storage"]


@pytest.mark.parametrize("fault", ["full", "read-only", "refuses"])
def test_storage_that_takes_nothing(fault):
    """Chunks stay on the host, unprotected; nothing stays held."""
    storage = Storage()
    errors = {"full": OSError(errno.ENOSPC, "full"), "read-only": OSError(errno.EROFS, "read-only")}
    storage.batch_set = raising(errors[fault]) if fault in errors else lambda *_: False
    server = Server(storage)
    server.warm(A, B)
    assert server.numbers() == {"stored": 0, "unstored": 2, "fetched": 0, "missed": 2, "late": 0}
    assert not server.num_protected
    server.evict()
    assert server.served(A, B) == ["host", "host"]


def test_slow_writes_hold_at_most_half_of_the_host(storage):
    """Storage holds at most half of the host, so that the other half can be reused."""
    server = Server(storage, host_size=20)
    hang(server, storage)
    for tokens in (C, D, *((first, 7, 7, 7) for first in (6, 7, 8))):
        server.compute([chunk_of(tokens)])
        server.settle()
    assert server.num_protected == 8 and server.numbers()["unstored"] == 3
    answer(server, storage)
    assert server.numbers()["stored"] == 2 and not server.num_protected
