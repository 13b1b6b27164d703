"""Speculation over chunks on a GPU: chains of drafts are verified in CUDA graphs, among SGLang's own kernels."""

import dataclasses
import gc
from functools import partial

import pytest
import torch
from rounding import Errors
from test_gpu import ENGINE, options_of, wide

from oracle.block_mask import Oracle
from oracle.models import MODELS
from oracle.models.build import build_model
from oracle.models.drafts import build_draft
from oracle.policies import PolicyOracle, epic
from oracle.scenarios import Dice
from oracle.segments import chunk, text, token_ids

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="the CUDA path needs a GPU"),
    pytest.mark.usefixtures("freed_gpu"),
]

NUM_TOKENS = 24


def chain(steps: int) -> dict:
    return {
        "speculative_num_steps": steps,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": steps + 1,
    }


WAYS = {
    "STANDALONE fa3": {"attention_backend": "fa3", "chunked_prefill_size": 1024, **chain(3)},
    "STANDALONE triton": {"attention_backend": "triton", "lazy_kernels": "triton", **chain(3)},
    "STANDALONE flashinfer": {"attention_backend": "flashinfer", **chain(7)},
    "STANDALONE synchronous": {"attention_backend": "fa3", "disable_overlap_schedule": True, **chain(1)},
    "STANDALONE eager": {"attention_backend": "fa3", "disable_cuda_graph": True, **chain(3)},
    "EAGLE triton": {"attention_backend": "triton", **chain(3)},
    "EAGLE3 fa3": {"attention_backend": "fa3", **chain(3)},
    # Windows, in a pool of their own, and sinks, of which the draft has none
    "EAGLE3 gpt-oss": {**options_of("gpt-oss", attention_backend="fa3", chunked_prefill_size=1024), **chain(3)},
    # Windows, in a pool of their own; the draft reads the model's KV
    "FROZEN_KV_MTP gemma4": options_of("gemma4", **chain(3)),
    "FROZEN_KV_MTP gemma4 eager": options_of("gemma4", disable_cuda_graph=True, **chain(3)),
}


def model(name: str, model_dir) -> str:
    """A model whose heads have the size that CUDA kernels take: gpt-oss, Gemma 4, or else a Llama."""
    if name == "gpt-oss":  # with all experts for each token: else rounding flips choices, see `Errors.check_greedy`
        return wide(name, model_dir, num_experts_per_tok=4)
    if name == "gemma4":
        return wide(name, model_dir)
    spec = MODELS["llama"]
    settings = {**spec.settings, "head_dim": 128, "hidden_size": 512, "intermediate_size": 1024}
    return build_model(dataclasses.replace(spec, name="llama-of-128", settings=settings), model_dir)


@pytest.fixture(scope="module", params=WAYS)
def served(request, model_dir):
    """An engine that drafts, the model's path, and the algorithm."""
    from sglang_lazy import Engine

    algorithm, name, *_ = [*request.param.split(), ""]
    path = model(name, model_dir)
    engine = Engine(
        model_path=path,
        speculative_algorithm=algorithm,
        speculative_draft_model_path=build_draft(algorithm, path, model_dir),
        **{**ENGINE, "max_total_tokens": 20000, **WAYS[request.param]},
    )
    try:
        yield engine, path, algorithm
    finally:
        engine.shutdown()
        gc.collect()


def test_chains_over_chunks(served):
    """Linked, plain and mixed batches in turn, cold and warm, so graphs for both replay one after another. The error
    against fp32 is at most twice that of plain PyTorch in bf16; every token is the best, but for rounding."""
    engine, path, algorithm = served
    oracle, in_bf16 = Oracle(path, device="cuda"), Oracle(path, torch.bfloat16, "cuda")
    dice = Dice("drafts on a GPU")
    a, b, c, d = (chunk(dice.ids(length)) for length in (300, 200, 7, 400))
    question = text(dice.ids(9))
    linked = [
        [text(dice.ids(5)), a, text(dice.ids(1)), b, text(dice.ids(2)), c, question],
        [c, text(dice.ids(1)), b, a, question],
        [text(dice.ids(5)), d],
        [a, b, c, a, question],
    ]
    plain = [[text(dice.ids(80))], [text(dice.ids(300))], [text(dice.ids(33))]]
    mixed = [linked[0], plain[0], linked[2], plain[1], linked[3]]
    params = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    errors, runs = Errors(), set()
    for prompts in ([linked[0]], plain[:1], linked, plain, [linked[1]], mixed, plain[1:2], linked[2:3], mixed):
        segments = [[segment.to_request() for segment in prompt] for prompt in prompts]
        outputs = engine.generate(segments=segments, sampling_params=params, return_logprob=True)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert len(output["output_ids"]) == NUM_TOKENS
            full = partial(oracle.logprobs, [text(token_ids(prompt))]) if prompt in linked else None
            errors.add(output, partial(oracle.logprobs, prompt), partial(in_bf16.logprobs, prompt), full)
            counts = output["meta_info"]["spec_correct_drafts_histogram"]
            runs |= {length for length, count in enumerate(counts) if count}
    errors.check()
    errors.check_greedy()
    if algorithm == "STANDALONE":
        assert {0, len(counts) - 1} <= runs, runs
    flushed = engine.tokenizer_manager.flush_cache(timeout_s=30)  # an idle server checks its accounting
    assert engine.loop.run_until_complete(flushed).success


def test_policies_and_second_turns(served):
    """Recomputed tokens, an answer's own text, and a prompt that continues it."""
    engine, path, _ = served
    oracle, in_bf16 = (PolicyOracle(path, dtype, "cuda") for dtype in (torch.float32, torch.bfloat16))
    dice, errors = Dice("policies and drafts on a GPU"), Errors()
    prompt = [text(dice.ids(5)), chunk(dice.ids(300)), chunk(dice.ids(200)), text(dice.ids(9))]
    params = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    for _turn in range(3):
        given = [segment.to_request() for segment in prompt]
        output = engine.generate(segments=given, link="epic:tokens=16", sampling_params=params, return_logprob=True)
        kept = epic(prompt, 16)
        errors.add(
            output,
            lambda tokens, prompt=prompt, kept=kept: oracle.logprobs(prompt, tokens, kept, ()),
            lambda tokens, prompt=prompt, kept=kept: in_bf16.logprobs(prompt, tokens, kept, ()),
        )
        prompt = [*prompt, text(output["output_ids"]), text(dice.ids(6))]
    assert output["meta_info"]["cached_tokens"] > 500
    errors.check()
