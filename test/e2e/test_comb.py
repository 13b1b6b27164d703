"""A Comb model, whose chunks pass through an encoder, against a plain PyTorch model; the checkpoint has public
naming."""

import contextlib
import gc

import pytest
import requests
import torch
from safetensors.torch import load_file, save_file
from served import TWO_RANKS

from fakes import streams
from oracle.adapters import merged, random_adapter
from oracle.comb import CombOracle, build
from oracle.scenarios import SCENARIOS, Dice, build_scenario, resolve
from sglang_lazy.testing import device_flags, running_server
from sglang_lazy.testing.server import wait_for

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4  # of a log-probability
NUM_TOKENS = 4
CHUNK_POOL = 0.15  # share of 2,400 KV tokens of 5 + 3 layers: 600 tokens of chunks in 3 layers, 2,040 of text in 5


class Served:
    """has_tiers: whether chunks that leave the device go to the host, and to storage."""

    def __init__(self, path, url, has_tiers=False):
        self.oracle, self.url, self.has_tiers = CombOracle(path), url, has_tiers

    def call(self, method, route, status=200, **body):
        response = requests.request(method, f"{self.url}{route}", json=body or None, timeout=100)
        assert response.status_code == status, response.text
        return response

    def ask(self, prompt, link="block", status=200, **body):
        params = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
        segments = [segment.to_request() for segment in prompt]
        body = {"segments": segments, "link": link, "sampling_params": params, "return_logprob": True, **body}
        return self.call("POST", "/generate", status, **body).json()

    def answer(self, *prompts, links=None, adapters=None):
        """Serve the prompts, several as one batch, and compare each answer with the oracle of the model or of its
        adapter."""
        links = links or ["block"] * len(prompts)
        params = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
        segments = [[segment.to_request() for segment in prompt] for prompt in prompts]
        body = {"segments": segments, "link": links, "sampling_params": params, "return_logprob": True}
        outputs = self.call("POST", "/generate", **body, **({"lora_path": [*adapters]} if adapters else {})).json()
        oracles = adapters.values() if adapters else [self.oracle] * len(prompts)
        for prompt, link, oracle, output in zip(prompts, links, oracles, outputs, strict=True):
            tokens = output["output_ids"]
            expected = oracle.logprobs(prompt, tokens[:-1], beside=link == "block")
            chosen = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            assert (chosen - torch.tensor(logprobs(output))).abs().max() <= TOLERANCE
            assert (expected.amax(-1) - chosen).max() <= TOLERANCE
            assert output["meta_info"]["prompt_tokens"] == sum(len(segment.ids) for segment in prompt)
        return outputs

    def flush(self):
        self.call("POST", "/flush_cache?timeout=30")

    def play(self, names):
        """Run the scenarios side by side; returns for every chunk whether an earlier step had it, and whether it was a
        hit."""
        scenarios = [build_scenario(name) for name in names]
        prompts, answers, brought, pairs = [[] for _ in names], [[] for _ in names], set(), []
        for step in range(max(map(len, scenarios))):
            playing = [index for index, steps in enumerate(scenarios) if step < len(steps)]
            for index in playing:
                prompts[index].append(resolve(scenarios[index][step], prompts[index], answers[index]))
            wave = [prompts[index][step] for index in playing]
            for index, output in zip(playing, self.answer(*wave), strict=True):
                answers[index].append(output["output_ids"])
                chunks = [segment.ids for segment in prompts[index][step] if segment.kind == "chunk"]
                pairs += [(ids in brought, hit) for ids, hit in zip(chunks, hits(output), strict=True)]
            brought |= {segment.ids for prompt in wave for segment in prompt if segment.kind == "chunk"}
        return pairs


def logprobs(output):
    return [entry[0] for entry in output["meta_info"]["output_token_logprobs"]]


def hits(output):
    return [entry["hit"] for entry in output["meta_info"].get("chunks", [])]


def storage_hits(output):
    return output["meta_info"]["cached_tokens_details"].get("storage", 0)


MIXED = ["--enable-mixed-chunk", "--disable-overlap-schedule", "--schedule-policy", "lpm"]
TIERS = ["--enable-hierarchical-cache", "--hicache-ratio", "8", "--hicache-storage-backend", "file"]
WAYS = {"as usual": [], "mixed": MIXED, "tiers": TIERS, "two ranks": [*TIERS, "--tp-size", "2"]}


@contextlib.contextmanager
def started(path, log, way="as usual", more=()):
    flags = ["--model-path", str(path), "--max-total-tokens", "2400", "--lazy-chunk-pool", str(CHUNK_POOL)]
    flags += ["--chunked-prefill-size", "96", "--enable-metrics", *device_flags(), *WAYS[way], *more]
    variables = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(path.parent / "storage")}
    if "--tp-size" in flags:
        if 0 < torch.cuda.device_count() < 2:  # without GPUs, ranks run on CPUs
            pytest.skip("tensor parallelism needs as many GPUs")
        variables |= TWO_RANKS
    with running_server(flags, log, environment=variables) as url:
        yield Served(path, url, "--enable-hierarchical-cache" in flags)


@pytest.fixture(scope="module", params=[pytest.param("as usual", marks=pytest.mark.nightly), "mixed", "two ranks"])
def served(request, tmp_path_factory, with_plugin):
    """Servers one by one. On two ranks, which have tiers, transfers are as late as a GPU allows, and KV in transfer is
    NaN. In the mixed configuration, only the encoder has windows."""
    way, folder = request.param, tmp_path_factory.mktemp("comb")
    path = build(folder / "model", causal=way == "mixed")
    late = with_plugin(streams.load) if way == "two ranks" else contextlib.nullcontext()
    with late, started(path, folder / "server.log", way) as served:
        yield served
    gc.collect()


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenarios(served, name):
    """Cold, warm, shuffled, second turns: a chunk seen before is a hit."""
    served.flush()
    pairs = served.play([name])
    assert all(hit == brought for brought, hit in pairs)


def test_eviction_within_batches(served):
    """All scenarios side by side, with plain requests, in a pool that holds a fraction of their chunks."""
    asked_again = [hit for brought, hit in served.play(list(SCENARIOS)) if brought]
    assert asked_again.count(True) > 5 and (asked_again.count(False) > 5) == (not served.has_tiers)


def test_the_order_of_chunks_changes_nothing(served):
    """The answer stays bitwise equal, and the text after them stays cached."""
    served.flush()
    dice = Dice("orders")
    head, docs, question = dice.text(9), dice.chunks(5, 10, 40), dice.text(8)
    served.answer([head, *docs, question])
    orders = [[*dice.shuffled(docs)] for _ in range(3)]
    warm = [served.ask(prompt) for prompt in ([head, *order, question] for order in orders)]
    warm.append(served.ask([*docs[:2], head, *docs[2:], question]))
    for output in warm:
        assert all(hits(output)) and output["output_ids"] == warm[0]["output_ids"]
        assert logprobs(output) == logprobs(warm[0])
        details = output["meta_info"]["cached_tokens_details"]
        assert output["meta_info"]["cached_tokens"] - details["chunk"] == 9 + 8 - 1
    (other,) = served.answer([head, *docs, docs[0], question])  # another multiset of chunks
    assert other["meta_info"]["cached_tokens"] == other["meta_info"]["cached_tokens_details"]["chunk"]


def test_batches_of_chunks_text_and_full(served):
    dice = Dice("mixed")
    docs = dice.chunks(4, 8, 20)
    prompts = [[dice.text(5), *dice.shuffled(docs), dice.text(4)] for _ in range(8)]
    prompts += [[dice.text(30)], [dice.text(3)], [docs[0]], [docs[1], docs[0]]]
    links = ["block", "full"] * 6
    for _ in range(2):
        served.answer(*prompts, links=links)


@pytest.mark.parametrize("link", ["epic:tokens=2", "query:ratio=0.2", "blend", "static", "copy", "base", "base+epic"])
def test_policies_that_make_no_sense_are_refused(served, link):
    dice = Dice("refused")
    error = served.ask([dice.chunk(9), dice.text(4)], link=link, status=400)
    assert "this model reads whole chunks through an encoder" in str(error)


def test_logprobs_of_the_prompt(served):
    """Given for text after the last chunk, at positions in the whole prompt; not for chunks."""
    dice = Dice("logprobs")
    prompt = [dice.text(4), dice.chunk(12), dice.text(7)]
    start = 4 + 12 + 2
    output = served.ask(prompt, logprob_start_len=start)
    reported = [entry[0] for entry in output["meta_info"]["input_token_logprobs"]][1:]
    text = prompt[2].ids
    expected = served.oracle.logprobs([*prompt[:2], prompt[2]._replace(ids=text[:3])], list(text[3:]))
    chosen = expected[:-1].gather(1, torch.tensor(text[3:])[:, None])[:, 0]
    assert (chosen - torch.tensor(reported)).abs().max() <= TOLERANCE
    assert "prompt logprobs" in str(served.ask(prompt, logprob_start_len=8, status=400))


def test_too_many_tokens_for_the_chunk_pool(served):
    dice = Dice("too long")
    error = served.ask([*dice.chunks(2, 400, 401), dice.text(3)], status=400)
    assert "do not fit into their pool of 600 tokens" in str(error)


def test_aborted_requests_leave_nothing_behind(served):
    """Aborted cold, waiting and running; afterwards a request can have the whole pool."""
    dice = Dice("aborts")
    for seconds in (0.001, 0.01, 0.03, 0.1, 0.3):
        body = {"segments": [s.to_request() for s in [*dice.chunks(3, 60, 100), dice.text(5)]]}
        body["sampling_params"] = {"max_new_tokens": 400, "ignore_eos": True}
        with pytest.raises(requests.Timeout):
            requests.post(f"{served.url}/generate", json=body, timeout=seconds)
    served.answer([*dice.chunks(2, 290, 300), dice.text(3)])
    served.answer([*dice.chunks(2, 290, 300), dice.text(3)])


def test_chunks_by_name_chats_and_metrics(served):
    served.flush()
    (registered,) = served.call("POST", "/chunks", chunks=["A town by the sea."], wait=True, pin=True).json()[
        "affected"
    ]
    parts = [{"type": "chunk", "text": "A town by the sea."}, {"type": "text", "text": "Where?"}]
    chat = {"model": "x", "messages": [{"role": "user", "content": parts}], "max_tokens": 4, "temperature": 0}
    answer = served.call("POST", "/v1/chat/completions", **chat).json()
    assert answer["choices"][0]["message"]["content"]
    (listed,) = served.call("GET", "/chunks").json()["chunks"]
    assert (listed["id"], listed["state"], listed["pinned"], listed["preamble"]) == (
        registered,
        "resident",
        True,
        False,
    )
    assert listed["hits"] == 1

    def resident():
        lines = requests.get(f"{served.url}/metrics", timeout=60).text.splitlines()
        return any(line.startswith("sglang_lazy:resident_chunks") and line.endswith(" 1.0") for line in lines)

    assert wait_for(resident)
    served.call("DELETE", f"/chunks/{registered}")
    assert served.call("GET", "/chunks").json()["chunks"] == []


def test_chunks_from_the_host_and_from_storage(tmp_path, with_plugin):
    """One server has a prompt's chunks on the host; then another server finds them in storage, unless its encoder
    differs."""
    dice = Dice("tiers")
    docs = dice.chunks(4, 60, 90)
    prompt, size = [dice.text(4), *docs, dice.text(6)], sum(len(doc.ids) for doc in docs)
    path = build(tmp_path / "model")
    with with_plugin(streams.load), started(path, tmp_path / "first.log", "tiers") as served:
        served.answer(prompt)
        served.answer([*dice.chunks(2, 290, 300), dice.text(3)])  # fills the device
        (output,) = served.answer([dice.text(5), *docs[::-1], dice.text(7)])
        details = output["meta_info"]["cached_tokens_details"]
        assert (details["host"], details["chunk"], details["device"]) == (size, size, 0)
        (state,) = served.call("GET", "/server_info").json()["internal_states"]
        assert wait_for(lambda: len(list((tmp_path / "storage").glob("*.bin"))) == 6)
        assert state["lazy_storage"]["unstored"] == 0 and state["lazy_host"]["backup_tokens"] > size
    with started(path, tmp_path / "second.log", "tiers") as served:
        (output,) = served.answer(prompt)
        assert all(hits(output)) and storage_hits(output) == size
    weights = load_file(path / "model.safetensors")
    name = "chunk_model.layers.0.mlp.up_proj.weight"
    save_file({**weights, name: weights[name] * 1.01}, path / "model.safetensors")
    with started(path, tmp_path / "third.log", "tiers") as served:
        (output,) = served.answer(prompt)
        assert not any(hits(output)) and storage_hits(output) == 0


def test_adapters_change_the_decoder_alone(tmp_path):
    """In one batch with the plain model, cold and warm, over the same chunks; an adapter for the encoder is refused."""
    path = build(tmp_path / "model")
    adapter = random_adapter(path, tmp_path / "a", seed=1, prefix="language_model.model.layers.")
    adapters = {None: CombOracle(path), "a": CombOracle(merged(path, adapter, tmp_path / "merged"))}
    dice = Dice("adapters")
    prompt = [dice.text(5), *dice.chunks(3, 10, 30), dice.text(6)]
    with started(path, tmp_path / "server.log", more=["--lora-paths", f"a={adapter}"]) as served:
        for warm in (False, True):
            plain, changed = served.answer(prompt, prompt, adapters=adapters)
            assert [*hits(plain), *hits(changed)] == [warm] * 6 and plain["output_ids"] != changed["output_ids"]
        listed = served.call("GET", "/chunks").json()["chunks"]
        assert [(chunk["lora_path"], chunk["hits"]) for chunk in listed] == [(None, 2)] * 3
        body = {"chunks": [prompt[1].to_request()], "lora_path": "a", "wait": True, "pin": True}
        (registered,) = served.call("POST", "/chunks", **body).json()["affected"]
        (pinned,) = [chunk for chunk in served.call("GET", "/chunks").json()["chunks"] if chunk["pinned"]]
        assert (pinned["id"], pinned["hits"]) == (registered, 3) and registered in [chunk["id"] for chunk in listed]
        foreign = random_adapter(path, tmp_path / "b", seed=2, prefix="chunk_model.layers.")
        body = {"lora_name": "b", "lora_path": str(foreign)}
        assert "may change only its decoder" in served.call("POST", "/load_lora_adapter", 400, **body).text
        served.answer(prompt)
