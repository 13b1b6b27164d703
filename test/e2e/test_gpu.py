"""Tiny models on a GPU against the oracle: the link kernels among SGLang's kernels and CUDA graphs."""

import dataclasses
import gc
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from children import fail
from rounding import Errors

from fakes import kv_watch, whole_windows
from oracle.adapters import merged, random_adapter
from oracle.block_mask import Oracle, RoundingOracle
from oracle.comb import CombOracle
from oracle.comb import build as build_comb
from oracle.models import MODELS
from oracle.models.build import build_model
from oracle.policies import PolicyOracle, epic, keep_all_but, leading_text, without_best_of_each
from oracle.scenarios import Dice
from oracle.segments import chunk, text, token_ids
from oracle.vision import VISION_MODELS, build_vision_model
from sglang_lazy.core.config import PREAMBLE

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="the CUDA path needs a GPU"),
    pytest.mark.usefixtures("freed_gpu"),
]

NUM_TOKENS = 12
# On CUDA, Qwen3-MoE uses SGLang's fused rotate-and-store kernel, which does not support the small heads of CPU tests.
# At this width, attention is split in two from about 750 tokens per batch on, and batches of about 500 run eagerly.
WIDE = {"head_dim": 128, "hidden_size": 8192}
OWN_HEADS = {
    "gpt-oss": {"head_dim": 64},
    "mixtral": {"hidden_size": 512},  # four heads: SGLang derives head_dim from the width
    "gemma": {"head_dim": 256},
    "gemma4": {"head_dim": 256, "global_head_dim": 512},
}
TIERS = {"enable_hierarchical_cache": True, "hicache_ratio": 8.0, "max_total_tokens": 2800}
WAYS = {
    "": {},
    # With batches that end within a fill, and within its chunks.
    "fa3": {"attention_backend": "fa3", "chunked_prefill_size": 1024},
    "flashinfer": {"attention_backend": "flashinfer", "chunked_prefill_size": 1024},
    "triton": {"lazy_kernels": "triton"},
    "copies": {"lazy_default_link": "copy", "disable_hybrid_swa_memory": True},
    # Window layers have their own pool in all ways but the one above; here it is small.
    "windows": {"attention_backend": "fa3", "chunked_prefill_size": 1024, "swa_full_tokens_ratio": 0.15},
    "few": {"swa_full_tokens_ratio": 0.15},
    "fp8": {"kv_cache_dtype": "fp8_e4m3"},
    # The device holds little more than a prompt and its probe, so much of what prompts reuse is loaded from the host.
    "tiers": TIERS,
    "tiers fp8": {**TIERS, "kv_cache_dtype": "fp8_e4m3"},
    "tiers fa3": {**TIERS, "attention_backend": "fa3", "chunked_prefill_size": 1024},
    "tiers copies": {**TIERS, "max_total_tokens": 3300, "lazy_default_link": "copy"},
    # All-reduce uses NCCL: SGLang's other kernels depend on how the GPUs are linked, and are compiled at the start.
    "on two GPUs": {
        "tp_size": 2,
        "disable_custom_all_reduce": True,
        "enforce_disable_flashinfer_allreduce_fusion": True,
    },
}
OTHERS = [
    "arcee",
    "cohere",
    "cohere2 fa3",  # SGLang 0.5.23 prepares no windows for its class in Triton
    "ernie4.5",
    "gemma",
    "granite",
    "granite-moe",
    "internlm3",
    "mellum",
    "mistral",
    "mixtral",
    "olmo2",
    "olmoe",
    "phi2",
    "phi3",
    "qwen2",
    "qwen2-moe",
    "qwen3",
    "stablelm",
    "starcoder2",
]
"""Models that run in one way only."""

ADAPTERS = (("a", 1, 8), ("b", 2, 16))  # name, seed, rank
ENGINE = {
    "dtype": "bfloat16",
    # Far more than these pools need, so that engines can start side by side on one GPU.
    "mem_fraction_static": 0.6,
    "cuda_graph_max_bs_decode": 16,
    "cuda_graph_bs_prefill": [16, 64, 256, 1024, 4096],  # capturing all sizes takes longer than the tests
    "log_level": "error",
    "custom_sigquit_handler": fail,
}


def wide(name: str, model_dir, **others) -> str:
    """Path of a model with wider heads.  others: of its settings, if they are not in parts."""
    if name in VISION_MODELS:
        path = model_dir / f"{name}-wide"
        return str(path if path.exists() else build_vision_model(name, path, width=4))
    spec = MODELS[name]
    inner = spec.settings.get("text_config")
    sizes = spec.settings if inner is None else inner
    if name == "phi2":
        wider = {"hidden_size": 320, "intermediate_size": 1280}  # SGLang takes four times the width
    elif "head_dim" not in sizes:  # it follows from the width
        wider = {"hidden_size": sizes["num_attention_heads"] * 128}
    else:
        wider = {**WIDE, **OWN_HEADS.get(name.removesuffix("-moe"), {})}
    settings = {**spec.settings, **(wider if inner is None else {"text_config": {**inner, **wider}}), **others}
    path = build_model(dataclasses.replace(spec, name=f"{spec.name}-wide", settings=settings), model_dir)
    if name == "gpt-oss":  # SGLang uses the dtype of config.json, whatever --dtype says
        config = Path(path, "config.json")
        config.write_text(config.read_text().replace('"float32"', '"bfloat16"'))
    return path


def options_of(name: str, **of_way) -> dict:
    """The engine's options beside those of all."""
    options = {"attention_backend": "triton", "max_total_tokens": 20000, **of_way}
    if name in MODELS and "vision_config" in MODELS[name].settings:
        options["enable_multimodal"] = False  # the folder has no processor
    # SGLang 0.5.23 cannot capture the prefill of Gemma 4's layers that share KV.
    if name.startswith(("cohere", "phi2")) or name == "gemma4":
        options["cuda_graph_backend_prefill"] = "disabled"
    if name == "gpt-oss":  # what SGLang would choose, triton_kernels, asks for a Triton of its own
        options["moe_runner_backend"] = "triton"
    return options


@pytest.fixture(
    scope="module",
    params=[
        "llama",
        "qwen3-moe",
        "glm4",
        "glm4-moe",
        "minimax-m2",
        "qwen2.5-vl",
        "qwen3-vl",
        "llama fa3",
        "llama flashinfer",
        "llama triton",
        "llama copies",
        "gpt-oss fa3",
        "gpt-oss triton",
        "gpt-oss copies",
        "gpt-oss windows",
        "gemma2",
        "gemma2 fa3",
        "gemma2 triton",
        "gemma3 fa3",
        "gemma4",
        "gemma4 triton",
        "gemma4 few",
        "gemma4-moe",
        "llama fp8",
        "llama tiers",
        "llama tiers fp8",
        "llama tiers fa3",
        "llama tiers copies",
        "qwen3 on two GPUs",
        "qwen3-moe on two GPUs",
        "glm4-moe on two GPUs",
        "gpt-oss on two GPUs",
        *OTHERS,
    ],
)
def served(request, model_dir, with_plugin):
    """An engine in bf16, with the best link kernels for the GPU unless the way names others; the model's path; the
    cache's dtype; and whether there is a host tier.

    SGLang itself decodes prompts without chunks (with copies, all prompts), with its windows made whole."""
    from sglang_lazy import Engine

    name, _, way = request.param.partition(" ")
    options = options_of(name, **WAYS[way])
    if torch.cuda.device_count() < options.get("tp_size", 1):
        pytest.skip("tensor parallelism needs as many GPUs")
    path = wide(name, model_dir)
    with with_plugin(whole_windows.load):
        engine = Engine(model_path=path, **ENGINE, **options)
    try:
        yield engine, path, torch.float8_e4m3fn if "fp8" in way else torch.bfloat16, "tiers" in way
    finally:
        engine.shutdown()
        gc.collect()


def oracle_in_bf16(path: str, cache_dtype: torch.dtype) -> Oracle:
    """Plain PyTorch in bf16 under the same mask, over a cache of a given dtype."""
    if cache_dtype == torch.bfloat16:
        return Oracle(path, torch.bfloat16, "cuda")
    return RoundingOracle(path, cache_dtype, dtype=torch.bfloat16, device="cuda")


def test_chunks_on_cuda(served):
    """Cold, warm and reordered, alone and in batches: the error against fp32 is at most twice that of plain PyTorch in
    bf16 over a cache of the same dtype.

    The cold batch has fills, linked prompts, and between them one without chunks. One chunk shares a prefix with
    another, which is cached when the first is computed alone, and computed beside it in the cold batch.
    """
    engine, path, cache_dtype, has_tiers = served
    oracle, in_bf16 = Oracle(path, device="cuda"), oracle_in_bf16(path, cache_dtype)
    dice = Dice(5)
    a, b, c, d, e = (chunk(dice.ids(length)) for length in (700, 500, 7, 700, 400))
    like_a = chunk(a.ids[:600] + dice.ids(150))
    question = text(dice.ids(9))
    prompts = [
        [text(dice.ids(5)), a, text(dice.ids(1)), b, text(dice.ids(2)), c, question],
        [text(dice.ids(80))],
        [c, text(dice.ids(1)), b, a, question],
        [a, b, c, a, question],
        [text(dice.ids(5)), d],
        [e, like_a, question],
    ]
    params = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    others = [[chunk(dice.ids(1600)), question]] if has_tiers else []  # evicts most of it from the device
    one_by_one = [*prompts, *others, prompts[0]]
    alone = [
        engine.generate(segments=[s.to_request() for s in p], sampling_params=params, return_logprob=True)
        for p in one_by_one
    ]
    segments = [[segment.to_request() for segment in prompt] for prompt in prompts]
    warm = engine.generate(segments=segments, sampling_params=params, return_logprob=True)
    flushed = engine.tokenizer_manager.flush_cache(timeout_s=30)  # waits for the last batch to end
    assert engine.loop.run_until_complete(flushed).success
    cold = engine.generate(segments=segments, sampling_params=params, return_logprob=True)
    assert cold[0]["meta_info"]["cached_tokens"] == 0
    if has_tiers:
        loaded = [output["meta_info"]["cached_tokens_details"]["host"] for output in (alone[-1], *warm[2:])]
        assert any(loaded)
    else:
        assert alone[-1]["meta_info"]["cached_tokens"] == len(token_ids(prompts[0])) - 1
    errors = Errors()
    for prompt, output in zip([*one_by_one, *prompts, *prompts], alone + warm + cold, strict=True):
        full = partial(oracle.logprobs, [text(token_ids(prompt))])
        errors.add(output, partial(oracle.logprobs, prompt), partial(in_bf16.logprobs, prompt), full)
    errors.check()


KEPT = {
    "epic:tokens=16": lambda oracle, prompt, preamble: epic(prompt, 16),
    "query:ratio=0.15": lambda oracle, prompt, preamble: oracle.query(prompt, 0.15, oracle.last_third, preamble),
    "blend:ratio=0.15": lambda oracle, prompt, preamble: oracle.blend(prompt, 0.15, preamble),
    "static:ratio=0.15": lambda oracle, prompt, preamble: without_best_of_each(
        prompt, -oracle.key_sizes(prompt, preamble), 0.15
    ),
    "base": lambda oracle, prompt, preamble: keep_all_but(prompt, ()),
}


def test_policies_on_cuda(served):
    """Every policy, plain and after both preambles, cold and warm, in batches of all: the error against fp32 is at
    most twice that of plain PyTorch in bf16, which itself chooses what to recompute."""
    engine, path, cache_dtype, _ = served
    if cache_dtype != torch.bfloat16:
        pytest.skip("the oracle of policies does not round keys as a narrower cache does")
    dice = Dice(6)
    docs = dice.chunks(4, 100, 400)
    head, question = dice.text(20), dice.text(12)
    hidden = transformers.AutoTokenizer.from_pretrained(path).encode(PREAMBLE)
    preambles = {"": (), "base+": hidden, "base:preamble=lead+": leading_text([head, docs[0]])}
    links = [f"{base}{name}" for base in preambles for name in KEPT if name != "base"] + ["base"]
    architecture = transformers.AutoConfig.from_pretrained(path).architectures[0]
    if architecture.startswith(("GptOss", "Gemma4", "Mellum")):  # most ways give them two pools, which blend cannot use
        links = [link for link in links if "blend" not in link]
    prompts = [[head, *dice.shuffled(docs), question] for _ in links]
    params = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    segments = [[segment.to_request() for segment in prompt] for prompt in prompts]
    answers = [
        engine.generate(segments=segments, link=links, sampling_params=params, return_logprob=True) for _ in range(2)
    ]
    oracles = [PolicyOracle(path, dtype, "cuda") for dtype in (torch.float32, torch.bfloat16)]
    errors = Errors()
    for outputs in answers:
        for prompt, link, output in zip(prompts, links, outputs, strict=True):
            base, _, name = link.rpartition("+")
            preamble = hidden if link == "base" else preambles[base and f"{base}+"]
            errors.add(
                output,
                *(
                    partial(one.logprobs, prompt, kept=KEPT[name](one, prompt, preamble), preamble=preamble)
                    for one in oracles
                ),
            )
    errors.check()


@pytest.mark.parametrize("name", ["llama", "gpt-oss", "gemma4"])
def test_kv_stays_on_cuda(model_dir, with_plugin, name):
    """Requests that end one after another, so that graphs pad batches: no token's KV changes after it was computed."""
    from sglang_lazy import Engine

    with with_plugin(whole_windows.load), with_plugin(kv_watch.load):
        engine = Engine(model_path=wide(name, model_dir), **ENGINE, **options_of(name, **WAYS["few"]))
    dice = Dice(9)
    docs = dice.chunks(4, 100, 400)
    prompts = [[dice.text(20), *dice.shuffled(docs), dice.text(12)] for _ in range(9)]
    try:
        for _ in range(2):
            outputs = engine.generate(
                segments=[[segment.to_request() for segment in prompt] for prompt in prompts],
                sampling_params=[
                    {"temperature": 0, "max_new_tokens": 8 + 7 * i % 9, "ignore_eos": True} for i in range(len(prompts))
                ],
            )
            assert len(outputs) == len(prompts)
    finally:
        engine.shutdown()
        gc.collect()


@pytest.mark.parametrize("lora_backend", ["csgmv", "triton"])
def test_adapters_on_cuda(model_dir, tmp_path, lora_backend):
    """One document under the base model and two adapters at once, in prefill and decode graphs with adapters: each
    error against the merged model in fp32 is at most twice that of the merged model in bf16, over its own KV."""
    from sglang_lazy import Engine

    path = wide("llama", model_dir)
    adapters = {name: random_adapter(path, tmp_path / name, seed, rank) for name, seed, rank in ADAPTERS}
    engine = Engine(
        model_path=path, **ENGINE, attention_backend="triton", max_total_tokens=20000, lora_backend=lora_backend,
        lora_paths=[f"{name}={adapter}" for name, adapter in adapters.items()], max_loras_per_batch=3,
    )  # fmt: skip
    dice = Dice(7)
    docs = dice.chunks(3, 100, 700)
    head, question = dice.text(20), dice.text(12)
    names = (None, *adapters)
    cases = [(name, [head, *dice.shuffled(docs), question]) for name in names for _ in range(2)]
    params = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    segments = [[segment.to_request() for segment in prompt] for _, prompt in cases]
    try:
        answers = [
            engine.generate(
                segments=segments, lora_path=[name for name, _ in cases], sampling_params=params, return_logprob=True
            )
            for _ in range(2)
        ]
    finally:
        engine.shutdown()
        gc.collect()
    errors = Errors()
    for name in names:
        model = path if name is None else str(merged(path, adapters[name], tmp_path / f"merged-{name}"))
        oracles = [Oracle(model, dtype, "cuda") for dtype in (torch.float32, torch.bfloat16)]
        for i, (of, prompt) in enumerate(cases):
            if of != name:
                continue
            for outputs, hit in zip(answers, (False, True), strict=True):
                assert [entry["hit"] for entry in outputs[i]["meta_info"]["chunks"]] == [hit] * 3
                errors.add(outputs[i], *(partial(oracle.logprobs, prompt) for oracle in oracles))
    errors.check()


@pytest.mark.parametrize("way", ["", "fa3", "triton", "fp8", "tiers", "tiers fp8", "on two GPUs"])
def test_comb_on_cuda(tmp_path, way):
    """Chunks through an encoder, cold, warm and reordered, in batches with plain prompts, in decode graphs: the error
    against fp32 is at most twice that of plain PyTorch in bf16 over a cache of the same dtype. With tiers, chunks come
    from the host the second time."""
    from sglang_lazy import Engine

    if torch.cuda.device_count() < WAYS[way].get("tp_size", 1):
        pytest.skip("tensor parallelism needs as many GPUs")
    path = build_comb(tmp_path / "comb", head_dim=128)
    options = {"attention_backend": "triton", "max_total_tokens": 20000, **WAYS[way]}
    engine = Engine(model_path=str(path), **ENGINE, **options)
    dice = Dice(8)
    docs = [*dice.chunks(3, 100, 700), *dice.chunks(2, 1, 9)]
    head, question = dice.text(20), dice.text(12)
    prompts = [[head, *dice.shuffled(docs), question] for _ in range(4)]
    prompts += [[head, docs[0], question], [dice.text(60)], [docs[3]], [dice.text(700), docs[1], question]]
    params = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    segments = [[segment.to_request() for segment in prompt] for prompt in prompts]
    others = [[segment.to_request() for segment in [*dice.chunks(2, 600, 650), question]] for _ in range(2)]
    answers = []
    try:
        for _ in range(2):
            answers.append(engine.generate(segments=segments, sampling_params=params, return_logprob=True))
            if "tiers" in way:  # the device holds about 2,300 tokens of chunks
                engine.generate(segments=others, sampling_params=params)
    finally:
        engine.shutdown()
        gc.collect()
    infos = [output["meta_info"] for output in answers[1] if "chunks" in output["meta_info"]]
    assert all(entry["hit"] for info in infos for entry in info["chunks"])
    assert ("tiers" in way) == any(info["cached_tokens_details"]["host"] for info in infos)
    cache_dtype = torch.float8_e4m3fn if "fp8" in way else torch.bfloat16
    exact, rough = CombOracle(path, device="cuda"), CombOracle(path, torch.bfloat16, cache_dtype, "cuda")
    errors = Errors()
    for outputs in answers:
        for prompt, output in zip(prompts, outputs, strict=True):
            errors.add(output, partial(exact.logprobs, prompt), partial(rough.logprobs, prompt))
    errors.check()
