"""Storage calls that never return cost their own requests only, on one rank and on several."""

import functools
import threading
import time

import pytest

from fakes.chunk_server import PATIENCE, A, B, C, Server, storage_with
from fakes.storage import Storage
from sglang_lazy.storage import chunk_objects
from sglang_lazy.storage.calls import MAX_STUCK, Calls, Outcome
from sglang_lazy.testing.server import wait_for

NUM_THREADS = 4
LONG = range(20, 20 + 2 * chunk_objects.NUM_READERS)


class Choosy(Storage):
    """Storage that never answers when it is asked to read or to write some keys."""

    def __init__(self):
        super().__init__()
        self.never, self.unread, self.unwritten = threading.Event(), set(), set()

    def exists(self, key):
        if key in self.unread:
            self.never.wait()
        return super().exists(key)

    def batch_set(self, keys, values):
        if self.unwritten & {*keys}:
            self.never.wait()
        return super().batch_set(keys, values)


@pytest.fixture
def storage():
    storage = Choosy()
    yield storage
    storage.never.set()


def keys_of(storage, *texts):
    """The keys of these chunks, which storage does not have yet and now has."""
    before = {*storage.objects}
    storage_with(*texts, storage=storage)
    return {*storage.objects} - before


def new_server(storage, **options):
    """Its clock runs, and its steps wait for nothing."""
    server = Server(storage, **options)
    server.storage.clock, server.slow = time.monotonic, True
    return server


def step_until(server, done):
    """Take steps until a condition holds, whatever hangs meanwhile."""
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline, "it hangs"
        server.step()
        time.sleep(1e-4)


@pytest.mark.usefixtures("sglang_context")
@pytest.mark.parametrize("tokens", [A, LONG], ids=["one piece", "more pieces than threads"])
def test_a_read_that_never_ends_costs_its_own_chunk(storage, monkeypatch, tokens):
    """It is computed after the deadline. Chunks asked for before that and after it come from storage, and a flush does
    not wait."""
    size = Server(Storage()).tree.memory.token_bytes
    monkeypatch.setattr(chunk_objects, "PIECE_BYTES", len(tokens) * size if tokens is A else size)
    storage.unread = keys_of(storage, tokens)
    keys_of(storage, B, C)
    server = new_server(storage, patience=PATIENCE._replace(base=1.0, per_ki_token=0.0, max=1e9))
    if tokens is A:
        assert server.served(A, B) == [None, "storage"]
    else:
        assert server.served(LONG) == [None]
    assert server.served(C) == ["storage"]
    assert server.numbers()["late"] == 1
    server.flush()  # for ever, if it waited for the read
    assert server.served(C, B) == ["storage", "storage"]


@pytest.mark.usefixtures("sglang_context")
def test_a_write_that_never_ends_keeps_its_own_chunk_only(storage):
    """The chunks behind it are stored, their copies are free to go, and a flush loses only its own."""
    storage.unwritten = keys_of(storage, A)
    storage.objects.clear()
    server = new_server(storage, patience=PATIENCE._replace(max=0.05))
    for tokens in (A, B, C):
        server.served(tokens)
    step_until(server, lambda: server.numbers()["stored"] == 2)
    assert server.num_protected == 4
    server.flush()
    assert server.numbers()["unstored"] == 1 and len(storage.objects) == 2


class Ranks:
    """Servers as tensor-parallel ranks, each in a thread. One runs at a time, until it needs the others' values."""

    def __init__(self, storages, patiences):
        self.turn, self.met = threading.Lock(), threading.Barrier(len(storages), timeout=60)
        self.values = [None] * len(storages)
        self.servers = [
            new_server(storage, patience=patience, agree=functools.partial(self._agree, rank))
            for rank, (storage, patience) in enumerate(zip(storages, patiences, strict=True))
        ]

    def _agree(self, rank, numbers):
        self.values[rank] = [*numbers]
        self.turn.release()
        self.met.wait()
        assert len({len(values) for values in self.values}) == 1, "the ranks ask about different things"
        least = [min(each) for each in zip(*self.values, strict=True)]
        self.met.wait()
        self.turn.acquire()
        return least

    def do(self, act):
        """Have each rank act; returns their results."""
        results, errors = [None] * len(self.servers), []

        def act_as(rank):
            try:
                with self.turn:
                    results[rank] = act(self.servers[rank])
            except BaseException as error:
                errors.append(error)
                self.met.abort()

        threads = [threading.Thread(target=act_as, args=(rank,)) for rank in range(len(self.servers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results


@pytest.mark.usefixtures("sglang_context")
def test_ranks_take_results_in_whatever_order_they_come():
    """Each rank has a read of its own that never ends, and another that fails. All compute the three chunks, and have
    the fourth from storage; its result comes behind the others'."""
    texts = [(first, 7, 7, 7) for first in (11, 12, 13, 14)]
    storages = [Choosy(), Choosy()]
    names = [[keys_of(storage, tokens) for tokens in texts] for storage in storages]
    storages[0].unread, storages[1].unread = names[0][0], names[1][1]
    del storages[1].objects[min(names[1][2])]
    ranks = Ranks(storages, [PATIENCE._replace(base=base, per_ki_token=0.0) for base in (1.0, 2.0)])
    first, second = ranks.do(lambda server: server.served(*texts))
    assert first == second == [None, None, None, "storage"]
    assert [server.numbers()["late"] for server in ranks.servers] == [2, 2]
    assert [server.numbers()["missed"] for server in ranks.servers] == [1, 1]
    ranks.do(lambda server: server.flush())
    assert ranks.do(lambda server: server.served(texts[3])) == [["storage"]] * 2
    for storage in storages:
        storage.never.set()


# The threads


def waiting(event, result=True):
    def call():
        event.wait()
        return result

    return call


def taken(calls):
    return [ended[:2] for ended in calls.take(calls.outcomes())]


def test_results_come_in_any_order():
    calls, opened, failed = Calls(NUM_THREADS), threading.Event(), threading.Event()
    calls.ask("slow", [waiting(opened), lambda: True])
    calls.ask("fast", [lambda: True] * 20)
    calls.ask("fails", [waiting(failed, result=False), lambda: True])
    failed.set()
    assert wait_for(lambda: calls.num_ended == 2)
    assert calls.outcomes() == [Outcome.PENDING, Outcome.SUCCEEDED, Outcome.FAILED]
    assert taken(calls) == [("fast", True), ("fails", False)] and len(calls) == 1
    opened.set()
    assert wait_for(lambda: calls.num_ended == 1)
    assert taken(calls) == [("slow", True)] and not len(calls)
    calls.stop()


def test_a_result_that_another_rank_lacks_is_left():
    calls = Calls(NUM_THREADS)
    for what in range(3):
        calls.ask(what, [lambda: True])
    assert wait_for(lambda: calls.num_ended == 3)
    ended = calls.take([Outcome.SUCCEEDED, Outcome.PENDING, Outcome.FAILED])
    assert [each[:2] for each in ended] == [(0, True), (2, False)]
    assert calls.num_ended == 1 and taken(calls) == [(1, True)]
    calls.stop()


@pytest.mark.parametrize("how", ["abandoned", "relieved"])
def test_other_threads_take_the_place_of_those_that_hang(how):
    """Up to a limit; those that return are not needed any more."""
    calls, never = Calls(NUM_THREADS), threading.Event()
    before = threading.active_count()
    hanging = 0
    while hanging < NUM_THREADS + MAX_STUCK:
        part = min(NUM_THREADS, NUM_THREADS + MAX_STUCK - hanging)
        calls.ask(hanging, [waiting(never)] * part)
        assert wait_for(lambda part=part: calls.num_running == part)
        calls.ask("behind", [lambda: True])
        time.sleep(0.01)
        assert not calls.num_ended
        if how == "abandoned":
            calls.abandon([hanging])
        else:
            calls.relieve(0.0)
        hanging += part
        if hanging <= MAX_STUCK:
            assert wait_for(lambda: calls.num_ended == 1) and calls.can_run
            assert taken(calls) == [("behind", True)]
    assert (
        calls.can_run == (how == "relieved") and not calls.num_ended and threading.active_count() == before + MAX_STUCK
    )
    never.set()
    assert wait_for(lambda: calls.num_ended == len(calls))
    assert wait_for(lambda: threading.active_count() == before)
    calls.stop()
    assert wait_for(lambda: threading.active_count() == before - NUM_THREADS)


def test_a_request_that_has_failed_makes_no_more_calls():
    """Of a chunk that storage does not have, not every piece need be looked for."""
    calls, made = Calls(1), []
    calls.ask("missing", [lambda: False, *[lambda: made.append(1) or True] * 9])
    assert calls.settle(patience=60) and taken(calls) == [("missing", False)] and not made
    calls.stop()


def test_calls_of_an_abandoned_request_that_have_not_begun_are_not_made():
    calls, opened, made = Calls(NUM_THREADS), threading.Event(), []
    calls.ask("left", [*[waiting(opened)] * NUM_THREADS, lambda: made.append(1) or True])
    assert wait_for(lambda: calls.num_running == NUM_THREADS)
    calls.abandon(["left"])
    assert calls.can_run
    opened.set()
    assert wait_for(lambda: calls.num_ended == 1)
    assert taken(calls) == [("left", False)] and not made
    calls.stop()


def test_dropped_requests_have_no_results():
    calls, opened = Calls(NUM_THREADS), threading.Event()
    calls.ask("ended", [lambda: True])
    assert wait_for(lambda: calls.num_ended == 1)
    calls.ask("running", [waiting(opened)])
    assert wait_for(lambda: calls.num_running)
    assert calls.drop() == ["ended", "running"]
    calls.ask("new", [lambda: True])
    opened.set()
    assert calls.settle(patience=60) and taken(calls) == [("new", True)]
    calls.stop()


def test_settling_waits_for_no_call_longer_than_it_may_run():
    """Counted from its begin; the calls behind it are made."""
    calls, never = Calls(NUM_THREADS), threading.Event()
    calls.ask("hangs", [waiting(never)])
    calls.ask("behind", [lambda: True] * 50)
    assert not calls.settle(patience=0.05)
    assert calls.outcomes() == [Outcome.PENDING, Outcome.SUCCEEDED]
    never.set()
    assert calls.settle(patience=60)
    calls.stop()


def test_settling_ends_though_all_threads_hang():
    calls, never = Calls(NUM_THREADS), threading.Event()
    calls.ask("hangs", [waiting(never)] * NUM_THREADS)
    calls.ask("behind", [lambda: True])
    assert not calls.settle(patience=0.05)
    assert calls.outcomes() == [Outcome.PENDING, Outcome.FAILED]
    never.set()
    calls.stop()


def test_settling_makes_no_call_after_a_failure():
    """Else it would wait for each call to a backend that is down and takes seconds to say so."""
    calls, made, turns = Calls(NUM_THREADS), [], threading.Semaphore(0)

    def fail():
        made.append(True)
        turns.acquire()
        return False

    for what in range(5 * NUM_THREADS):
        calls.ask(what, [lambda: True, fail])
    turns.release()
    assert wait_for(lambda: calls.num_ended == 1)
    assert not calls.settle(patience=0), "others have begun"
    turns.release(5 * NUM_THREADS)
    assert calls.settle(patience=60) and len(made) <= NUM_THREADS + 1
    assert taken(calls) == [(what, False) for what in range(5 * NUM_THREADS)]
    calls.stop()
