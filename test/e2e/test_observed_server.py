"""A server's metrics, as docs/metrics.md describes them and with known numbers, and its events."""

import itertools
import json
import re
import threading
from array import array
from functools import partial
from pathlib import Path

import msgspec
import pytest
import requests
import yaml
import zmq
from http_prompts import RAILWAY, RIVER, ids
from prometheus_client.parser import text_string_to_metric_families
from sglang.srt.disaggregation.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from fakes import eager_metrics
from sglang_lazy.scheduler import warnings
from sglang_lazy.testing import device_flags, running_server
from sglang_lazy.testing.server import free_ports, wait_for

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).parents[2] / "docs/metrics.md").read_text(encoding="utf-8")
DASHBOARD = Path(__file__).parents[2] / "examples/monitoring/sglang-lazy-dashboard.json"
OURS = "sglang_lazy:"
OWN_LABELS = {"reason", "mode", "chunks", "cache_source"}
A, B, LONG = ids("chunk", *range(10, 110)), ids("chunk", *range(200, 250)), ids("chunk", *range(3, 503))
QUESTION = ids("text", 7, 8, 9)


class Server:
    """kv_events: where it publishes events.  log: the file of its output."""

    def __init__(self, url, kv_events, log):
        self.url, self.kv_events, self.log = url, kv_events, log

    def ask(self, *segments, status=200, num_tokens=4, **body):
        params = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
        body = {"segments": segments, "sampling_params": params, **body}
        answer = requests.post(f"{self.url}/generate", json=body, timeout=60)
        assert answer.status_code == status, answer.text
        return answer.json().get("meta_info")

    def flush(self):
        assert requests.post(f"{self.url}/flush_cache?timeout=30", timeout=60).ok

    def families(self):
        requests.get(f"{self.url}/server_info", timeout=60)  # an idle scheduler looks up from its sleep, and publishes
        text = requests.get(f"{self.url}/metrics", timeout=60).text
        return {family.name: family for family in text_string_to_metric_families(text)}

    def numbers(self, kind):
        """Values of counters and gauges, and counts of histograms, by the name after the colon and the labels."""
        numbers = {}
        for family in self.families().values():
            if family.type == kind and (family.name.startswith(OURS) or "cached_tokens" in family.name):
                for sample in family.samples:
                    own = [value for name, value in sorted(sample.labels.items()) if name in OWN_LABELS]
                    numbers[" ".join([sample.name.partition(":")[2], *own])] = sample.value
        return {name: number for name, number in numbers.items() if not name.endswith(("_bucket", "_sum"))}

    def counted(self):
        """Everything that only grows, except decode steps: how many are launched in vain depends on when a result
        arrives."""
        numbers = {**self.numbers("counter"), **self.numbers("histogram")}
        return {name: number for name, number in numbers.items() if "decode" not in name}

    def grows(self, before, expected):
        """Once published, the numbers have grown since `before` by exactly this much."""

        def growth():
            now = self.counted()
            return {name: now[name] - before.get(name, 0) for name in now if now[name] != before.get(name, 0)}

        wait_for(lambda: growth() == expected)
        assert growth() == expected

    def has_grown(self, before, name):
        return self.counted()[name] > before[name]

    def has(self, **gauges):
        """Once published, these gauges have these values, all at one time."""
        values = {}

        def as_expected():
            values.update((name, number) for name, number in self.numbers("gauge").items() if name in gauges)
            return values == gauges

        assert wait_for(as_expected), values


@pytest.fixture(scope="module")
def running(tiny_model, tmp_path_factory, with_plugin):
    log = tmp_path_factory.mktemp("metrics") / "server.log"
    (port,) = free_ports(1)
    flags = ["--model-path", tiny_model, "--max-total-tokens", "1000", *device_flags(), "--enable-metrics"]
    flags += ["--kv-events-config", json.dumps({"publisher": "zmq", "endpoint": f"tcp://*:{port}"})]
    flags += ["--lazy-chunk-separator", "##", "--lazy-chunk-roles", "tool"]  # of text; others here send tokens
    with with_plugin(eager_metrics.load), running_server([*flags, "--decode-log-interval", "1"], log) as url:
        yield Server(url, f"tcp://127.0.0.1:{port}", log)


@pytest.fixture
def server(running):
    """The same, with an empty cache and all numbers published."""
    running.flush()
    running.ask(ids("chunk", *range(37)), QUESTION)
    running.has(resident_chunk_tokens=37)  # a number that no other test reaches
    running.flush()
    running.has(resident_chunk_tokens=0)
    return running


def test_the_page_names_all_metrics_and_their_labels(server):
    server.ask(A, QUESTION)
    documented = {}
    for heading in ("Counters", "Histograms", "Gauges"):
        for line in re.search(rf"^## {heading}$(.*?)^## ", PAGE, re.M | re.S)[1].splitlines():
            cells = line.strip("|").split("|")
            for name in re.findall(r"`(sglang_lazy:\w+)`", cells[0]):
                labels = set(re.findall(r"`(\w+)`", cells[1])) if heading == "Counters" else set()
                documented[name.removesuffix("_total")] = (heading[:-1].lower(), labels)
    assert documented.pop(f"{OURS}state_bytes") == ("gauge", set()), "this model has no recurrent layers"
    usual = {"model_name", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank", "le"}
    families = {name: family for name, family in server.families().items() if name.startswith(OURS)}
    assert documented == {
        name: (family.type, {label for sample in family.samples for label in sample.labels} - usual)
        for name, family in families.items()
    }
    reasons = {sample.labels["reason"] for sample in families[f"{OURS}refused"].samples}
    assert reasons == set(re.findall(r"^\| `(\w+)` \|", PAGE, re.M)) - {"reason"}


def test_the_dashboard_asks_for_what_there_is(server):
    """The metrics, label values and labels in its queries exist."""
    server.ask(A, QUESTION)
    server.ask(A, QUESTION)
    assert wait_for(lambda: "cached_tokens_total chunk" in server.counted())
    samples = {}
    for family in server.families().values():
        for sample in family.samples:
            for label, value in [*sample.labels.items(), ("__name__", sample.name)]:
                samples.setdefault(sample.name, {}).setdefault(label, set()).add(value)
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    (variable,) = [one for one in dashboard["templating"]["list"] if one["type"] == "query"]
    metric, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"]).groups()
    assert label in samples[metric] and variable["name"] == label
    targets = [target for panel in dashboard["panels"] for target in panel.get("targets", [])]
    asked = set()
    for target in targets:
        metrics = re.findall(r"(sglang\w*:\w+)\{(.*?)\}", target["expr"])
        assert metrics and len(metrics) == target["expr"].count(":"), target["expr"]
        for name, selector in metrics:
            assert 'model_name=~"$model_name"' in selector
            for label, value in re.findall(r'(\w+)="(.*?)"', selector):
                assert value in samples[name][label], (name, label, value)
        grouped = [by.split(", ") for by in re.findall(r"sum by \((.*?)\)", target["expr"])]
        names = {name for name, _ in metrics}
        shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert shown <= set().union(*grouped) and all(
            set(by) <= samples[name].keys() for by in grouped for name in names
        )
        asked |= names
    ours = {name.removesuffix("_bucket") for name in samples if name.startswith(OURS)}
    unseen = {re.sub("_(count|sum)$", "", name) for name in ours} - {
        re.sub("_(bucket|count)$", "", name) for name in asked
    }
    assert not unseen, "every metric of the server must be shown"


def test_prometheus_sees_the_dashboards_names(server):
    """Whether or not the client library replaces colons with underscores."""
    config = yaml.safe_load((DASHBOARD.parent / "prometheus.yaml").read_text(encoding="utf-8"))
    (job,) = config["scrape_configs"]
    names = {sample.name for family in server.families().values() for sample in family.samples if ":" in sample.name}
    for name in names:
        for given in (name, name.replace(":", "_")):
            for rule in job["metric_relabel_configs"]:
                assert (rule["source_labels"], rule["target_label"]) == (["__name__"], "__name__")
                if match := re.fullmatch(rule["regex"], given):
                    given = match.expand(rule["replacement"].replace("$", "\\"))
            assert given == name


def test_reuse(server):
    before = server.counted()
    for prompt in ([A, B, QUESTION], [B, QUESTION, A, QUESTION]):
        server.ask(*prompt)
    expected = {"chunk_references_total": 4, "chunk_hits_total": 2, "reused_chunk_tokens_total": 150}
    expected |= {"filled_tokens_total": 150, "fill_seconds_count": 1, "chunk_wait_seconds_count": 1}
    server.grows(before, {**expected, "batches_total true prefill": 2, "cached_tokens_total chunk": 150})
    server.has(resident_chunks=2, resident_chunk_tokens=150, evictable_chunks=2, evictable_chunk_tokens=150)


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
def test_flags_of_the_server_make_chunks_of_plain_text(server, path):
    """Of what stands between separators, and of tools' messages; a request may ask for none."""
    tool = {"role": "tool", "tool_call_id": "1", "content": RAILWAY}
    user = {"role": "user", "content": f"Read: ##{RIVER}## Who?"}
    body = {"model": "any", "messages": [tool, user], "max_tokens": 1}
    if path == "/generate":
        body = {"text": user["content"], "sampling_params": {"max_new_tokens": 1}}
    none = {"chunk_separator": ""} if path == "/generate" else {"chunk_separator": "", "chunk_roles": []}
    for options, num_chunks in (({}, 1 if path == "/generate" else 2), (none, 0)):
        name, before = "chunk_references_total", server.counted()
        prefills = f"batches_total {str(num_chunks > 0).lower()} prefill"
        assert requests.post(server.url + path, json={**body, **options}, timeout=60).status_code == 200
        assert wait_for(partial(server.has_grown, before, prefills))
        assert server.counted()[name] - before[name] == num_chunks


def test_a_plain_prompt_counts_as_a_batch_without_chunks(server):
    plain, linked = "batches_total false decode", "batches_total true decode"
    decodes, before = server.numbers("counter"), server.counted()
    server.ask(QUESTION, A, QUESTION, link="full")
    server.grows(before, {"batches_total false prefill": 1})
    assert wait_for(lambda: server.numbers("counter")[plain] >= decodes[plain] + 3)
    assert server.numbers("counter")[linked] == decodes[linked]


def test_the_sources_of_cached_tokens_add_up(server):
    """Leading text, chunks and text after them are all cached."""
    prompt = [ids("text", *range(300, 320)), A, QUESTION, B, QUESTION]
    before = server.counted()
    metas = [server.ask(*prompt), server.ask(*prompt), server.ask(*prompt[:2], QUESTION)]
    assert [meta["cached_tokens_details"]["chunk"] for meta in metas] == [0, 150, 100]

    def by_source():
        now = server.counted()
        return {name: now[name] - before.get(name, 0) for name in now if name.startswith("cached_tokens_total ")}

    cached = sum(meta["cached_tokens"] for meta in metas)
    assert wait_for(lambda: sum(by_source().values()) == cached), (by_source(), cached)
    assert by_source() == {"cached_tokens_total chunk": 250, "cached_tokens_total device": cached - 250}
    assert cached >= 250 + 40


def test_evictions(server):
    before = server.counted()
    for first in range(100, 112):
        server.ask(ids("chunk", first, *range(10, 109)), QUESTION)
    listed = requests.get(f"{server.url}/chunks?limit=1000", timeout=60).json()
    tokens = sum(chunk["tokens"] for chunk in listed["chunks"])
    gone = 12 - listed["total"]
    assert 3 <= gone < 12
    expected = {"chunk_references_total": 12, "filled_tokens_total": 1200, "batches_total true prefill": 12}
    expected |= {"fill_seconds_count": 12, "chunk_wait_seconds_count": 12, "hits_per_chunk_count": gone}
    expected |= {"evicted_chunks_total": gone, "evicted_chunk_tokens_total": 1200 - tokens}
    server.grows(before, expected)
    server.has(resident_chunks=12 - gone, resident_chunk_tokens=tokens)


def test_pins_and_refusals(server):
    """A quarter of the pool may be pinned."""
    ids_of = [server.ask(chunk, QUESTION)["chunks"][0]["id"] for chunk in (A, B, LONG)]
    server.has(resident_chunks=3, pinned_chunks=0)
    before = server.counted()
    for name, status in zip(ids_of, (200, 200, 409), strict=True):
        assert requests.patch(f"{server.url}/chunks/{name}", json={"pin": True}, timeout=60).status_code == status
    server.has(pinned_chunks=2, pinned_chunk_tokens=150, evictable_chunks=1, locked_chunks=0)
    server.ask(LONG, QUESTION, link="copy", status=400)  # a copy needs twice as many slots
    refused = {"refused_total pin_budget": 1, "refused_total pool": 1}
    server.grows(before, {**refused, "batches_total false prefill": 1})  # SGLang answers a refusal in a batch


def test_chunks_in_use_are_locked(server):
    seen = threading.Event()

    def use():
        while not seen.is_set():
            server.ask(A, B, QUESTION, num_tokens=400)

    user = threading.Thread(target=use)
    user.start()
    try:
        server.has(locked_chunks=2, locked_chunk_tokens=150, evictable_chunks=0)
    finally:
        seen.set()
        user.join()
    server.has(locked_chunks=0, locked_chunk_tokens=0, evictable_chunks=2)


class Subscriber:
    """Receives KV events, as a router would."""

    def __init__(self, endpoint):
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.connect(endpoint)
        self.socket.subscribe("")
        self.decode = msgspec.msgpack.Decoder(KVEventBatch).decode

    def until(self, condition):
        """All events up to the one that fulfils `condition`."""
        events = []
        while not any(map(condition, events)):
            assert self.socket.poll(10_000), events[-3:]
            events += self.decode(self.socket.recv_multipart()[2]).events
        return events


@pytest.fixture
def subscriber(server):
    subscriber = Subscriber(server.kv_events)
    # Messages published before it is connected are lost.
    assert wait_for(lambda: server.flush() or subscriber.socket.poll(300))
    server.ask(ids("chunk", 37), QUESTION)
    subscriber.until(lambda event: isinstance(event, BlockStored) and event.token_ids == [37])
    server.flush()
    subscriber.until(lambda event: isinstance(event, AllBlocksCleared))
    yield subscriber
    subscriber.socket.close()


def one_by_one(events):
    """The same events, with one block in each that stores some."""
    for event in events:
        if not isinstance(event, BlockStored):
            yield event
            continue
        before = [event.parent_block_hash, *event.block_hashes]
        for parent, block, token in zip(before, event.block_hashes, event.token_ids, strict=False):
            yield msgspec.structs.replace(event, parent_block_hash=parent, block_hashes=[block], token_ids=[token])


def stock_events(*prompts):
    """The events of SGLang's own tree when these are computed in turn."""
    tree = RadixCache.create_simulated(enable_kv_cache_events=True)
    tree.take_events()
    for tokens in prompts:
        tree.insert(InsertParams(key=RadixKey(array("q", tokens))))
    return [*one_by_one(tree.take_events())]


def test_events_of_chunks(server, subscriber):
    """They are those of plain prompts with the same tokens; text after chunks, a tenant's chunks and chunks after a
    preamble have none."""
    lead, chunk = list(range(300, 303)), A["input_ids"]
    server.ask(ids("text", *lead), A, QUESTION)
    server.ask(B, QUESTION, cache_salt="tenant")
    server.ask(ids("text", *lead), B, QUESTION, link="base:preamble=lead")
    server.ask(ids("text", *chunk, 5, 6), num_tokens=1)
    server.flush()
    events = [*one_by_one(subscriber.until(lambda event: isinstance(event, AllBlocksCleared)))]
    first, then = stock_events(chunk), stock_events(chunk, [*chunk, 5, 6])
    answer = [event for event in events[:-1] if event.parent_block_hash == then[-1].block_hashes[0]]
    assert [event for event in events[:-1] if event not in then + answer] == stock_events(lead)
    assert [event for event in events if event in then] == then
    assert then[:100] == first and len(then) == 102


def test_events_of_chunks_that_leave(server, subscriber):
    """Because they are evicted or deleted."""
    stored = stock_events(A["input_ids"]) + stock_events(B["input_ids"])
    removed = [[event.block_hashes[0] for event in events] for events in (stored[:100], stored[100:])]
    ids_of = [chunk["id"] for chunk in server.ask(A, B, QUESTION)["chunks"]]
    assert requests.delete(f"{server.url}/chunks/{ids_of[1]}", timeout=60).ok
    server.ask(LONG, QUESTION)
    server.ask(ids("chunk", *LONG["input_ids"][50:]), QUESTION)
    events = [*one_by_one(subscriber.until(lambda event: event == BlockRemoved(removed[0], "GPU")))]
    assert events[:150] == stored
    assert [event for event in events[150:] if isinstance(event, BlockRemoved)] == [
        BlockRemoved(hashes, "GPU") for hashes in removed[::-1]
    ]
    assert len([event for event in events if isinstance(event, BlockStored)]) == 150 + 500 + 450


# Warnings stand last: each comes once in ten minutes. That of pins: test/unit/test_warnings.py


def warns(server, message):
    return wait_for(lambda: re.search(f"sglang-lazy: {message}", server.log.read_text()) is not None)


def test_a_warning_of_a_word_that_changes_in_a_template(server):
    def chunk(number):
        return ids("chunk", *range(10, 10 + warnings.MIN_LEN), 100 + number)

    for first in range(0, 2 * warnings.MANY_ALIKE, 8):
        server.ask(*map(chunk, range(first, first + 8)), QUESTION)
    assert warns(server, f"{warnings.MANY_ALIKE} chunks share their first ")


def test_a_warning_of_chunks_that_nobody_repeats(server):
    numbers = itertools.product(range(10, 60), repeat=3)
    for _ in range(2 * warnings.WINDOW // 250):
        server.ask(*(ids("chunk", *tokens) for tokens in itertools.islice(numbers, 250)), QUESTION)
    assert warns(server, r"\d+ chunks were computed while prompts found \d cached")
