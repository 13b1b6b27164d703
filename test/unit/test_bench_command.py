"""What `sglang-lazy bench` sends, and how it sums up what it measured."""

import numpy as np
import pytest

from sglang_lazy import bench
from sglang_lazy.testing import Generation


class Server:
    """Remembers for each salt the chunks that it was sent; each segment is a token."""

    def __init__(self):
        self.seen: dict[str, set[str]] = {}
        self.sent = []

    def __call__(self, segments, link, cache_salt):
        self.sent.append((link, cache_salt, [segment["text"] for segment in segments]))
        known = self.seen.setdefault(cache_salt, set())
        chunks = [segment["text"] for segment in segments if segment["type"] == "chunk" and link != "full"]
        hits = len(known.intersection(chunks))
        known.update(chunks)
        return Generation("", len(segments), prefix_tokens=0, chunk_tokens=hits, ttft=0.001)


def prompt(*chunks):
    return [*({"type": "chunk", "text": text} for text in chunks), {"type": "text", "text": "Who?"}]


def reused(samples, link):
    """By phase, tokens reused of each prompt."""
    found = {}
    for sample in samples:
        if sample.link == link:
            found.setdefault(sample.phase, []).append(sample.reused)
    return found


def test_each_prompt_is_cold_then_warm_then_reordered_and_at_last_all_follow_one_another():
    server = Server()
    samples = list(bench.measure(server, [prompt("a", "b"), prompt("c"), prompt("b", "c", "d")], ["block", "full"]))
    assert reused(samples, "block") == {
        "cold": [0, 0, 0],
        "warm": [2, 1, 3],
        "reordered": [2, 3],  # one chunk has one order
        "in turn": [0, 0, 2],
    }
    assert not any(sum(each) for each in reused(samples, "full").values())
    texts = [text for link, _, text in server.sent if link == "full"]
    assert texts[:3] == [["a", "b", "Who?"], ["a", "b", "Who?"], ["b", "a", "Who?"]]


def test_no_policy_is_always_first_and_none_shares_a_cache():
    server = Server()
    prompts = [prompt("a", "b")] * 4
    list(bench.measure(server, prompts, ["block", "full"]))
    first = [link for link, _, _ in server.sent[::2]]
    assert first.count("block") == first.count("full")
    links_of_salts = {salt: {link for link, each, _ in server.sent if each == salt} for _, salt, _ in server.sent}
    assert all(len(links) == 1 for links in links_of_salts.values()) and len(links_of_salts) == 2 * (4 + 1)
    again = Server()
    list(bench.measure(again, prompts, ["block", "full"]))
    assert not links_of_salts.keys() & {salt for _, salt, _ in again.sent}


@pytest.mark.parametrize("count", [1, 2, 7, 99, 100, 101, 1000])
def test_quantiles_are_numpys(count):
    values = list(np.random.default_rng(count).exponential(size=count))
    assert bench.quantile(values, 0.5) == pytest.approx(np.quantile(values, 0.5))
    assert bench.quantile(values, 0.99) == np.quantile(values, 0.99, method="inverted_cdf")


def test_the_table_has_a_row_for_each_phase_and_link():
    links = ["base+query:ratio=0.15,static=0.05", "full"]
    samples = [
        bench.Sample(phase, link, ttft, 200, 50) for phase in bench.PHASES for link in links for ttft in (0.01, 0.03)
    ]
    lines = bench.table(bench.rows(samples)).splitlines()
    assert len(lines) == 1 + 8 and max(map(len, lines)) <= 100
    assert lines[1].split() == ["cold", links[0], "2", "20.0", "30.0", "25.0%"]


def test_made_up_prompts_share_documents_but_not_within_a_prompt():
    prompts = bench.made_up(6, 3, 10)
    chunks = [[segment["text"] for segment in each if segment["type"] == "chunk"] for each in prompts]
    assert all(len(set(each)) == 3 for each in chunks) and len(set(sum(chunks, []))) <= 12
    assert prompts == bench.made_up(6, 3, 10)
