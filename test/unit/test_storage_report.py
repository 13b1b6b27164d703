"""What the host tier and storage count, for /metrics, the server's state and SGLang's log."""

from array import array
from types import SimpleNamespace

import pytest

from sglang_lazy.storage.report import COUNTERS, HOST_COUNTERS, HostReport, StorageReport


class Counter:
    value = 0

    def inc(self, count):
        self.value += count


def values(counters):
    return {name: counter.value for name, counter in counters.items()}


@pytest.mark.parametrize("measured", [True, False])
def test_tokens_of_the_host(measured):
    """The server's state has them without /metrics, too."""
    counters, loaded = {name: Counter() for name in HOST_COUNTERS if measured}, []
    report = HostReport(loaded.append, counters)
    for num_tokens in (3, 4):
        report.copied(array("q", range(num_tokens)))
    report.gave_up(2)
    report.gave_up(5)
    report.loaded(array("q", range(6)))
    assert report.numbers() == {"backup_tokens": 7, "given_up_tokens": 7} and loaded == [6]
    assert values(counters) == ({"backup_tokens": 7, "given_up_tokens": 7} if measured else {})


@pytest.mark.parametrize("measured", [True, False])
def test_chunks_of_storage(measured):
    counters, waits = {name: Counter() for name in COUNTERS if measured}, []
    report = StorageReport(1, counters=counters, waits=waits.append)
    report.stored(10, 1.0)
    report.unstored()
    report.unstored(3)
    report.fetched(10, 1.0, wait=0.5)
    report.fetched(10, 1.0, wait=0.25)
    for wait in (0.1, 0.2, 0.3):
        report.missed(wait)
    for _ in range(5):
        report.late()
    assert report.numbers() == {"stored": 1, "unstored": 4, "fetched": 2, "missed": 3, "late": 5}
    assert values(counters) == ({"unstored": 4, "fetch_misses": 3, "fetch_timeouts": 5} if measured else {})
    assert waits == [0.5, 0.25, 0.1, 0.2, 0.3]


def test_speeds_are_those_of_all_bytes_of_a_chunk():
    """1,000 tokens of 3 MB and a state of 1 GB are 4 GB."""
    said = SimpleNamespace(stored=[], fetched=[])
    report = StorageReport(
        3_000_000,
        1_000_000_000,
        log_stored=lambda *of: said.stored.append(of),
        log_fetched=lambda *of: said.fetched.append(of),
    )
    report.stored(1000, 2.0)
    report.fetched(1000, 0.5, wait=9.0)
    assert said.stored == [(1000, 2.0)] and said.fetched == [(1000, 8.0)]
