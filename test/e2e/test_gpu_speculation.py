"""Speculation over chunks on a GPU: chains of drafts are verified in CUDA graphs, among SGLang's own kernels."""

import contextlib
import dataclasses
import gc
from collections.abc import Callable
from functools import partial

import pytest
import torch
from rounding import Errors
from test_gpu import ENGINE, options_of, wide
from test_gpu import WAYS as GPU_WAYS
from test_gpu_hybrids import WIDER

from fakes import remembered_drafts
from oracle.block_mask import Oracle
from oracle.hybrids import HybridOracle
from oracle.models import MODELS
from oracle.models.build import build_model
from oracle.models.drafts import build_draft
from oracle.models.hybrids import HYBRIDS
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
    "STANDALONE on two GPUs": {"attention_backend": "fa3", **GPU_WAYS["on two GPUs"], **chain(3)},
    "EAGLE triton": {"attention_backend": "triton", **chain(3)},
    "EAGLE fa3": {"attention_backend": "fa3", **chain(7)},
    "EAGLE3 fa3": {"attention_backend": "fa3", **chain(3)},
    # Windows, in a pool of their own, and sinks, of which the draft has none
    "EAGLE3 gpt-oss": {**options_of("gpt-oss", attention_backend="fa3", chunked_prefill_size=1024), **chain(3)},
    # A layer of their own drafts; Qwen3.5's recurrent layers keep a state at each draft
    "NEXTN glm4-moe": {
        # One more expert than there are would be chosen, as the shared one counts where all are in one kernel
        **dict(attention_backend="fa3", chunked_prefill_size=1024, disable_shared_experts_fusion=True),
        **chain(3),
    },
    "NEXTN qwen3.5": {"attention_backend": "fa3", "max_running_requests": 16, "lazy_state_share": 0.02, **chain(3)},
    # Windows, in a pool of their own; the draft reads the model's KV
    "FROZEN_KV_MTP gemma4": options_of("gemma4", **chain(3)),
    "FROZEN_KV_MTP gemma4 eager": options_of("gemma4", disable_cuda_graph=True, **chain(3)),
}


def model(name: str, model_dir) -> str:
    """A model whose heads have the size that CUDA kernels take: one of that name, or else a Llama."""
    if name in ("gpt-oss", "glm4-moe"):  # all experts for each token: else rounding flips choices, see `check_greedy`
        return wide(name, model_dir, num_experts_per_tok=4)
    if name == "gemma4":
        return wide(name, model_dir)
    hybrid = name in HYBRIDS
    spec = HYBRIDS[name] if hybrid else MODELS["llama"]
    wider = WIDER[name] if hybrid else {"head_dim": 128, "hidden_size": 512, "intermediate_size": 1024}
    settings = {**spec.settings, **wider}
    return build_model(dataclasses.replace(spec, name=f"{spec.name}-of-128", settings=settings), model_dir)


def logprobs_of(path: str, name: str, dtype: torch.dtype) -> Callable:
    """What gives the log-probabilities of an answer, [1 + tokens, vocab_size], from the prompt and its tokens but the
    last, in plain PyTorch."""
    if name not in HYBRIDS:
        return Oracle(path, dtype, "cuda").logprobs
    oracle = HybridOracle(path, dtype, "cuda")

    def logprobs(prompt, tokens):
        computed = [*prompt[:-1], text(prompt[-1].ids)]  # a last chunk is text, since its state is not known
        return oracle.logprobs(computed, tokens)[len(token_ids(prompt)) - 1 :].cpu()

    return logprobs


@pytest.fixture(scope="module", params=WAYS)
def served(request, model_dir, with_plugin):
    """An engine that drafts, the model's path and name, and the algorithm. Heads with random weights are hardly ever
    right, so what they draft is replaced by what followed before."""
    from sglang_lazy import Engine

    algorithm, name, *_ = [*request.param.split(), ""]
    options = {**ENGINE, "max_total_tokens": 20000, **WAYS[request.param]}
    if torch.cuda.device_count() < options.get("tp_size", 1):
        pytest.skip("tensor parallelism needs as many GPUs")
    path = model(name, model_dir)
    draft = build_draft(algorithm, path, model_dir)
    own = {"model_path": draft} if algorithm == "NEXTN" else {"speculative_draft_model_path": draft}
    remembers = algorithm in ("EAGLE", "EAGLE3", "NEXTN")
    with with_plugin(remembered_drafts.load_on_gpu) if remembers else contextlib.nullcontext():
        engine = Engine(**{"model_path": path, **options, **own}, speculative_algorithm=algorithm)
    try:
        yield engine, path, name, algorithm
    finally:
        engine.shutdown()
        gc.collect()


def test_chains_over_chunks(served):
    """Linked, plain and mixed batches in turn, cold and warm, so graphs for both replay one after another. The error
    against fp32 is at most twice that of plain PyTorch in bf16; every token is the best, but for rounding."""
    engine, path, name, algorithm = served
    exact, rough = (logprobs_of(path, name, dtype) for dtype in (torch.float32, torch.bfloat16))
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
            full = partial(exact, [text(token_ids(prompt))]) if prompt in linked else None
            errors.add(output, partial(exact, prompt), partial(rough, prompt), full)
            counts = output["meta_info"]["spec_correct_drafts_histogram"]
            runs |= {length for length, count in enumerate(counts) if count}
    errors.check()
    errors.check_greedy()
    if algorithm != "FROZEN_KV_MTP":
        assert {0, len(counts) - 1} <= runs, runs
    flushed = engine.tokenizer_manager.flush_cache(timeout_s=30)  # an idle server checks its accounting
    assert engine.loop.run_until_complete(flushed).success


def test_policies_and_second_turns(served):
    """Recomputed tokens, where a model can be asked for some, an answer's own text, and a prompt that continues it."""
    engine, path, name, _ = served
    dtypes = (torch.float32, torch.bfloat16)
    if name in HYBRIDS:
        link, oracles = "block", [logprobs_of(path, name, dtype) for dtype in dtypes]
    else:
        link = "epic:tokens=16"
        oracles = [partial(recomputing, PolicyOracle(path, dtype, "cuda")) for dtype in dtypes]
    dice, errors = Dice("policies and drafts on a GPU"), Errors()
    prompt = [text(dice.ids(5)), chunk(dice.ids(300)), chunk(dice.ids(200)), text(dice.ids(9))]
    params = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    for _turn in range(3):
        given = [segment.to_request() for segment in prompt]
        output = engine.generate(segments=given, link=link, sampling_params=params, return_logprob=True)
        errors.add(output, *(partial(oracle, prompt) for oracle in oracles))
        prompt = [*prompt, text(output["output_ids"]), text(dice.ids(6))]
    # With overlap, nothing is known of recurrent layers where an answer ends, so its prompt's text is computed again.
    assert output["meta_info"]["cached_tokens"] >= (500 if name in HYBRIDS else 501)
    errors.check()


def recomputing(oracle: PolicyOracle, prompt, tokens):
    return oracle.logprobs(prompt, tokens, epic(prompt, 16), ())
