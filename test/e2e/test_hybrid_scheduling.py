"""Requests of models with recurrent layers that decode beside new tokens, are retracted, or give way to others."""

import concurrent.futures
import time

import pytest
import requests
import torch

from fakes import hybrids_on_cpu, leftovers, scheduling
from oracle.hybrids import HybridOracle
from oracle.models.build import build_model
from oracle.models.hybrids import HYBRIDS
from oracle.scenarios import Dice
from oracle.segments import token_ids
from sglang_lazy.testing import CPU_OPTIONS, running_server

pytestmark = [
    pytest.mark.slow,  # starts servers
    pytest.mark.skipif(torch.cuda.is_available(), reason="replaces kernels that a GPU has"),
]

NUM_TOKENS, TOLERANCE, PATIENCE = 24, 1e-4, 120
OPTIONS = {
    **CPU_OPTIONS,
    "enable_mixed_chunk": True,
    "chunked_prefill_size": 64,
    "enable_priority_scheduling": True,
    "priority_scheduling_preemption_threshold": 3,
    "max_running_requests": 3,
    "max_total_tokens": 1000,
    "context_length": 1024,
    "disable_cuda_graph": True,
    "skip_tokenizer_init": True,
    "skip_server_warmup": True,
}
OTHERS = ["qwen3.5 without overlap", "lfm2", "granite4"]


class Scheduled:
    """url: of the server.  seen: the file in which it records what it does.  oracle: of its model."""

    def __init__(self, url, seen, oracle):
        self.url, self.seen, self.oracle = url, seen, oracle

    def answer(self, prompt, **fields) -> list[int]:
        params = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
        body = {"segments": [segment.to_request() for segment in prompt], "sampling_params": params, **fields}
        answer = requests.post(f"{self.url}/generate", json=body, timeout=PATIENCE)
        assert answer.ok, answer.text
        return answer.json()["output_ids"]

    def check(self, prompt, tokens: list[int]) -> None:
        """Whether an answer is as likely as the oracle's."""
        assert len(tokens) == NUM_TOKENS
        expected = self.oracle.logprobs(prompt, tokens)[len(token_ids(prompt)) - 1 : -1]
        assert (expected.amax(-1) - expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]).max() <= TOLERANCE

    def held(self) -> dict[str, int]:
        return requests.get(f"{self.url}/server_info", timeout=PATIENCE).json()["internal_states"][0][leftovers.NAME]


@pytest.fixture(scope="module", params=["qwen3.5", *(pytest.param(way, marks=pytest.mark.nightly) for way in OTHERS)])
def served(request, model_dir, with_plugin, tmp_path_factory):
    """SGLang retracts requests in every third step of decoding, as it does when memory runs out."""
    name, _, overlap = request.param.partition(" ")
    path, folder = build_model(HYBRIDS[name], model_dir), tmp_path_factory.mktemp("scheduling")
    flags = ["--model-path", path]
    for option, value in {**OPTIONS, **(hybrids_on_cpu.WITHOUT_OVERLAP if overlap else {})}.items():
        flags += [f"--{option.replace('_', '-')}", *([] if value is True else [str(value)])]
    variables = {**hybrids_on_cpu.ENVIRONMENT, "SGLANG_TEST_RETRACT": "1", scheduling.FILE: str(folder / "seen")}
    with (
        with_plugin(hybrids_on_cpu.load),
        with_plugin(leftovers.load),
        with_plugin(scheduling.load),
        running_server(flags, folder / "server.log", environment=variables) as url,
    ):
        yield Scheduled(url, folder / "seen", HybridOracle(path))


def test_all_at_once(served):
    """Requests with chunks beside each other, more than can run, of which urgent ones come last."""
    dice = Dice("scheduling")
    docs = dice.chunks(4, 20, 70)
    prompts = [[dice.text(9), *dice.shuffled(docs)[:3], dice.text(5), docs[0], dice.text(12)] for _ in range(6)]
    prompts.append([dice.text(100)])
    urgent = [[*prompt[:-1], dice.text(7)] for prompt in prompts[:5]]  # more than can run
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = [pool.submit(served.answer, prompt, priority=0) for prompt in prompts]
        while served.held()["running"] < 2:
            time.sleep(0.01)
        answers += [pool.submit(served.answer, prompt, priority=9) for prompt in urgent]
    for prompt, answer in zip([*prompts, *urgent], answers, strict=True):
        served.check(prompt, answer.result())
    assert {*served.seen.read_text().split()} == {"mixed", "preempted", "retracted"}
    assert requests.post(f"{served.url}/flush_cache?timeout=30", timeout=PATIENCE).ok
    held = served.held()
    assert not any(count for name, count in held.items() if name not in (leftovers.PASSES, "launched")), held
