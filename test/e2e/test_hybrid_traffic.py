"""Random traffic on models with recurrent layers, in pools of few states: drafts, host tier, storage, retraction and
preemption at once, and clients that leave at any time. Every answer is the oracle's, and nothing is held afterwards."""

import contextlib
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
import torch

from fakes import few_states, hybrids_on_cpu, leftovers, remembered_drafts, speculation_on_cpu, streams
from oracle.hybrids import HybridOracle
from oracle.models.build import build_model
from oracle.models.drafts import build_draft
from oracle.models.hybrids import HYBRIDS
from oracle.scenarios import Dice
from oracle.segments import Segment, text, token_ids
from sglang_lazy.testing import CPU_OPTIONS, running_server
from sglang_lazy.testing.server import wait_for

pytestmark = [
    pytest.mark.slow,  # starts servers
    pytest.mark.nightly,  # what is at once here, others test one by one
    pytest.mark.skipif(torch.cuda.is_available(), reason="replaces kernels that a GPU has"),
]

TOLERANCE = 2e-4  # of a log-probability, after up to 40 tokens
PATIENCE = 120  # seconds
OPTIONS = {
    **CPU_OPTIONS,
    "chunked_prefill_size": 64,
    "context_length": 1024,
    "disable_cuda_graph": True,
    "mamba_track_interval": 64,
    "max_running_requests": 4,
    "max_total_tokens": 700,
    "enable_priority_scheduling": True,
    "priority_scheduling_preemption_threshold": 3,
    "skip_server_warmup": True,
}
TIERS = {"enable_hierarchical_cache": True, "hicache_ratio": 2.0, "hicache_storage_backend": "file"}
DRAFTS = {"speculative_algorithm": "NEXTN", **speculation_on_cpu.OPTIONS}
MIXED = {"enable_mixed_chunk": True}
WAYS = {
    "qwen3.5": (8, MIXED),
    "qwen3.5 with drafts": (8, {**DRAFTS, **TIERS}),
    "qwen3.5 with drafts, in turn": (2, {**DRAFTS, **TIERS, **hybrids_on_cpu.WITHOUT_OVERLAP}),
    "qwen3.5 with one state": (1, TIERS),
    "lfm2": (3, TIERS),
    "falcon-h1": (3, {**TIERS, **MIXED}),
}
"""How many states there are, and options of servers, by model and name."""


class Traffic:
    """Clients of a server.  seed: of what they ask."""

    def __init__(self, url: str, oracle: HybridOracle, min_chunk: int, num_states: int, seed: int):
        self.url, self.oracle, self.min_chunk, self.num_states = url, oracle, min_chunk, num_states
        self.rng, dice = random.Random(seed), Dice(seed)
        self.documents = [dice.chunk(length) for length in (1, 2, 3, 7, 20, 40, 63, 64, 65, 90, 130)]
        self.documents.append(Segment("chunk", self.documents[-2].ids[:45]))  # begins another
        self.texts = [dice.text(length) for length in (1, 3, 6, 20, 70)]
        self.turns: list[list[Segment]] = []

    def draw(self) -> tuple[list[Segment], dict]:
        """A prompt, and the fields of a request for it."""
        rng = self.rng
        prompt = [rng.choice(self.texts)] if rng.random() < 0.6 else []
        if self.turns and rng.random() < 0.3:
            prompt = [*rng.choice(self.turns[-20:])]
        for _ in range(rng.choice([0, 1, 1, 2, 3, 5])):
            prompt += [rng.choice(self.documents), *([rng.choice(self.texts)] if rng.random() < 0.35 else [])]
        if not prompt or rng.random() < 0.85:
            prompt.append(Dice(rng.random()).text(rng.choice([1, 9, 40])))
        params = {"temperature": 0, "max_new_tokens": rng.choice([0, 1, 2, 9, 40]), "n": rng.choice([1, 1, 2])}
        params |= {"ignore_eos": True} if rng.random() < 0.5 else {"stop_token_ids": rng.sample(range(10, 500), 40)}
        fields = {"priority": rng.choice([0, 0, 9]), "cache_salt": rng.choice(["a", "b"])}
        return prompt, {"sampling_params": params, "link": rng.choice(["block", "block", "full"]), **fields}

    def ask(self, prompt: list[Segment], fields: dict, patience: float) -> list[dict]:
        """What the server answers; nothing if the client leaves before, or it has too many chunks for the states."""
        body = {"segments": [segment.to_request() for segment in prompt], "return_logprob": True, **fields}
        try:
            answer = requests.post(f"{self.url}/generate", json=body, timeout=patience)
        except requests.exceptions.ReadTimeout:
            assert patience < PATIENCE, f"no answer to {body}"
            return []
        if answer.status_code == 400:
            assert "--lazy-state-share" in answer.text or "KV pool" in answer.text, answer.text
            return []
        assert answer.ok, answer.text
        outputs = answer.json() if isinstance(answer.json(), list) else [answer.json()]
        assert len(outputs) == fields["sampling_params"]["n"]
        if len(token_ids(prompt)) < 300 and outputs[0]["output_ids"]:
            self.turns.append([*prompt, text(outputs[0]["output_ids"])])
        return outputs

    def check(self, prompt: list[Segment], fields: dict, output: dict) -> None:
        tokens, params = output["output_ids"], fields["sampling_params"]
        stops = params.get("stop_token_ids", ())
        assert not any(token in stops for token in tokens[:-1])
        if "ignore_eos" in params and len(token_ids(prompt)) < 500:  # others may be cut off
            assert len(tokens) == params["max_new_tokens"]
        last = len(prompt) - 1
        as_text = [fields["link"] == "full" or len(s.ids) < self.min_chunk or i == last for i, s in enumerate(prompt)]
        computed = [text(s.ids) if is_text else s for s, is_text in zip(prompt, as_text, strict=True)]
        if not tokens:
            return
        expected = self.oracle.logprobs(computed, tokens)[len(token_ids(prompt)) - 1 : -1]
        chosen = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        reported = torch.tensor([entry[0] for entry in output["meta_info"]["output_token_logprobs"]])
        assert (chosen - reported).abs().max() <= TOLERANCE and (expected.amax(-1) - chosen).max() <= TOLERANCE

    def held(self) -> dict[str, int]:
        state = requests.get(f"{self.url}/server_info", timeout=PATIENCE).json()["internal_states"][0][leftovers.NAME]
        return {name: count for name, count in state.items() if count and name not in (leftovers.PASSES, "launched")}


@pytest.fixture(scope="module", params=WAYS)
def traffic(request, model_dir, with_plugin, tmp_path_factory):
    name, folder = request.param.partition(" ")[0], tmp_path_factory.mktemp("traffic")
    num_states, options = WAYS[request.param]
    path = build_model(HYBRIDS[name], model_dir)
    drafts = "speculative_algorithm" in options
    flags = ["--model-path", build_draft("NEXTN", path, model_dir) if drafts else path]
    for option, value in {**OPTIONS, **options}.items():
        flags += [f"--{option.replace('_', '-')}", *([] if value is True else [str(value)])]
    variables = {
        **hybrids_on_cpu.ENVIRONMENT,
        few_states.VARIABLE: str(num_states),
        "SGLANG_TEST_RETRACT": "1",
        "SGLANG_TEST_RETRACT_INTERVAL": "7",
        "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(folder / "stored"),
    }
    plugins = [hybrids_on_cpu, few_states, leftovers, *([remembered_drafts] if drafts else [])]
    plugins += [streams] if "enable_hierarchical_cache" in options else []
    with contextlib.ExitStack() as stack:
        for plugin in plugins:
            stack.enter_context(with_plugin(plugin.load))
        url = stack.enter_context(running_server(flags, folder / "server.log", environment=variables))
        yield Traffic(url, HybridOracle(path), 2 if name == "lfm2" else 3, num_states, seed=0)


@pytest.mark.parametrize("number", range(2))
def test_every_answer_is_right_and_nothing_is_held(traffic, number):
    """The second time over what storage has kept of the first."""
    asked = [(*traffic.draw(), traffic.rng.choice([0.05, 0.3, *[PATIENCE] * 4])) for _ in range(50)]
    with ThreadPoolExecutor(6) as clients:
        answers = [clients.submit(traffic.ask, *each) for each in asked]
    outputs = [
        (prompt, fields, output)
        for (prompt, fields, _), answer in zip(asked, answers, strict=True)
        for output in answer.result()
    ]
    for output in outputs:
        traffic.check(*output)
    hits = [entry["hit"] for *_, output in outputs for entry in output["meta_info"].get("chunks", ())]
    assert len(outputs) > 10 and not all(hits)
    assert any(hits) or traffic.num_states < 3  # where clients displace one another's chunks, and it is luck
    time.sleep(0.5)  # for what clients who have left sent last
    assert wait_for(lambda: not traffic.held(), PATIENCE), traffic.held()
    assert requests.post(f"{traffic.url}/flush_cache?timeout=30", timeout=PATIENCE).ok
    assert not traffic.held()
