"""An fp8 KV cache on a CPU, against an oracle that rounds keys and values as the cache does."""

import contextlib

import pytest
import torch
from test_oracle_matrix import hits

from fakes import speculation_on_cpu, streams
from oracle.block_mask import Oracle, RoundingOracle
from oracle.models.drafts import build_draft
from oracle.scenarios import Dice
from oracle.segments import chunk, text, token_ids
from sglang_lazy.testing import CPU_OPTIONS
from support.engine import EngineProcess

pytestmark = pytest.mark.slow

SERVER = dict(CPU_OPTIONS, max_total_tokens=4096, log_level="error")
NUM_TOKENS = 6
# Of a log-probability. If fp32 values differ in their last bits, they may be rounded to different fp8 neighbours.
TOLERANCE = 2e-2


class Served:
    """An engine with a cache of this dtype, and what its answers are compared with."""

    def __init__(self, model, dtype, **options):
        self.engine = EngineProcess(model_path=model, kv_cache_dtype=dtype, **{**SERVER, **options})
        rounded = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}[dtype]
        self.rounding, self.exact = RoundingOracle(model, rounded), Oracle(model)

    def answer(self, *prompts):
        """Serve one prompt after the other. Answers match the oracle that rounds keys and values, not the exact one."""
        params = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
        outputs, errors, differences = [], [], []
        for prompt in prompts:
            segments = [segment.to_request() for segment in prompt]
            output = self.engine.generate(segments=segments, sampling_params=params, return_logprob=True)
            tokens = output["output_ids"]
            reported = torch.tensor([entry[0] for entry in output["meta_info"]["output_token_logprobs"]])
            chosen = (torch.arange(NUM_TOKENS), torch.tensor(tokens))
            rounded = self.rounding.logprobs(prompt, tokens[:-1])[chosen]
            errors.append((reported - rounded).abs().max().item())
            differences.append((self.exact.logprobs(prompt, tokens[:-1])[chosen] - rounded).abs().max().item())
            outputs.append(output)
        assert max(errors) <= TOLERANCE < min(differences), (errors, differences)
        return outputs


@pytest.fixture(scope="module", params=["fp8_e4m3", "fp8_e5m2", "fp8_e4m3 with drafts"])
def served(request, tiny_model, model_dir, with_plugin):
    dtype, _, drafts = request.param.partition(" ")
    drafting = {
        **speculation_on_cpu.OPTIONS,
        "speculative_algorithm": "STANDALONE",
        "speculative_draft_model_path": build_draft("STANDALONE", tiny_model, model_dir),
    }
    with with_plugin(speculation_on_cpu.load) if drafts else contextlib.nullcontext():
        served = Served(tiny_model, dtype, **(drafting if drafts else {}))
    yield served
    served.engine.shutdown()


def test_chunks_in_an_fp8_cache(served):
    """Cold, reordered, warm and plain."""
    dice = Dice(3)
    a, b, question = chunk(dice.ids(60)), chunk(dice.ids(45)), text(dice.ids(9))
    prompts = [
        [text(dice.ids(5)), a, text(dice.ids(2)), b, question],
        [b, text(dice.ids(1)), a, a, question],
        [a, b],
        [text(dice.ids(80))],
    ]
    *_, output = served.answer(*prompts, prompts[0])
    assert output["meta_info"]["cached_tokens"] == len(token_ids(prompts[0])) - 1


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8_chunks_from_the_host(dtype, tiny_model, with_plugin):
    """The device evicts the chunks, then a prompt has them in another order. Transfers are late, as in
    test_tiers_oracle.py."""
    with with_plugin(streams.load):
        tiers = {"enable_hierarchical_cache": True, "hicache_ratio": 4.0}
        served = Served(tiny_model, dtype, max_total_tokens=256, **tiers)
    try:
        dice = Dice(3)
        a, b, question = chunk(dice.ids(60)), chunk(dice.ids(45)), text(dice.ids(9))
        *_, output = served.answer(
            [text(dice.ids(5)), a, text(dice.ids(2)), b, question],
            [text(dice.ids(240))],
            [b, text(dice.ids(1)), a, question],
        )
        assert hits(output) == [True, True]
        assert output["meta_info"]["cached_tokens_details"]["host"] == len(a.ids) + len(b.ids)
    finally:
        served.engine.shutdown()
