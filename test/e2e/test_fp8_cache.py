"""An fp8 KV cache on a CPU, against an oracle that rounds keys and values as the cache does."""

import pytest
import torch

from oracle.block_mask import Oracle, RoundingOracle
from oracle.scenarios import Dice
from oracle.segments import chunk, text, token_ids
from sglang_lazy.testing import CPU_OPTIONS, EngineProcess

pytestmark = pytest.mark.slow

SERVER = dict(CPU_OPTIONS, max_total_tokens=4096, log_level="error")
NUM_TOKENS = 6
# Of a log-probability. If fp32 values differ in their last bits, they may be rounded to different fp8 neighbours.
TOLERANCE = 2e-2


@pytest.fixture(scope="module", params=["fp8_e4m3", "fp8_e5m2"])
def served(request, tiny_model):
    """An engine, and the dtype of its cache."""
    engine = EngineProcess(model_path=tiny_model, kv_cache_dtype=request.param, **SERVER)
    try:
        yield engine, {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}[request.param]
    finally:
        engine.shutdown()


def test_chunks_in_an_fp8_cache(served, tiny_model):
    """Cold, reordered, warm and plain: answers match the oracle with rounded keys and values, not the exact one."""
    engine, dtype = served
    rounding, exact = RoundingOracle(tiny_model, dtype), Oracle(tiny_model)
    dice = Dice(3)
    a, b, question = chunk(dice.ids(60)), chunk(dice.ids(45)), text(dice.ids(9))
    prompts = [
        [text(dice.ids(5)), a, text(dice.ids(2)), b, question],
        [b, text(dice.ids(1)), a, a, question],
        [a, b],
        [text(dice.ids(80))],
    ]
    params = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    errors, differences = [], []
    for prompt in (*prompts, prompts[0]):
        output = engine.generate(segments=[s.to_request() for s in prompt], sampling_params=params, return_logprob=True)
        tokens = output["output_ids"]
        reported = torch.tensor([entry[0] for entry in output["meta_info"]["output_token_logprobs"]])
        chosen = (torch.arange(NUM_TOKENS), torch.tensor(tokens))
        rounded = rounding.logprobs(prompt, tokens[:-1])[chosen]
        errors.append((reported - rounded).abs().max().item())
        differences.append((exact.logprobs(prompt, tokens[:-1])[chosen] - rounded).abs().max().item())
    assert output["meta_info"]["cached_tokens"] == len(token_ids(prompts[0])) - 1
    assert max(errors) <= TOLERANCE < min(differences), (errors, differences)
