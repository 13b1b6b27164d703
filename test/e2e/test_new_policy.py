"""A policy that SGLang's processes find as a plugin, as if it were an installed distribution."""

import pytest
import torch

from fakes import every_second
from oracle.block_mask import Oracle, greedy
from oracle.segments import chunk, text
from sglang_lazy.testing import CPU_OPTIONS
from support.engine import EngineProcess


@pytest.fixture
def engine(tiny_model, with_plugin):
    with with_plugin(every_second.load):
        engine = EngineProcess(model_path=tiny_model, **CPU_OPTIONS, max_total_tokens=2048, log_level="error")
    yield engine
    engine.shutdown()


@pytest.mark.slow
def test_a_new_policy_is_one_class(engine, tiny_model):
    """Cold, warm and reordered, batched with other policies, its answers are the oracle's."""
    oracle = Oracle(tiny_model)
    generator = torch.Generator().manual_seed(5)
    documents = [tuple(torch.randint(5, 200, (n,), generator=generator).tolist()) for n in (7, 12, 5, 9)]
    question = text((11, 23, 42))
    for order in ((0, 1, 2, 3), (0, 1, 2, 3), (3, 1, 0, 2), (2, 3)):
        prompt = [text((7, 9)), *(chunk(documents[i]) for i in order), question]
        seen = [segment if segment.kind == "text" or i % 2 else text(segment.ids) for i, segment in enumerate(prompt)]
        outputs = engine.generate(
            segments=[[segment.to_request() for segment in prompt]] * 3,
            link=["every-second", "block", "every-second"],
            sampling_params={"temperature": 0, "max_new_tokens": 6, "ignore_eos": True},
        )
        for output, expected in zip(outputs, (seen, prompt, seen), strict=True):
            tokens = output["output_ids"]
            assert greedy(oracle.logprobs(expected, tokens[:-1])) == tokens
        # The first and third chunk are kept, so only they are reused.
        warm = order != (0, 1, 2, 3)
        reused = [entry["reused_tokens"] for entry in outputs[0]["meta_info"]["chunks"]]
        assert not any(reused[1::2]) and all(reused[::2]) == (warm or outputs[0]["meta_info"]["cached_tokens"] > 0)
