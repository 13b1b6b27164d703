"""Models with quantised weights on a GPU, against an oracle with the dequantised weights, whose inputs are rounded as
the format's kernels round them."""

import gc
from functools import partial
from pathlib import Path

import pytest
import torch
from rounding import Errors
from test_gpu import ENGINE, NUM_TOKENS

from oracle.adapters import merged, random_adapter
from oracle.block_mask import Oracle, RoundingOracle
from oracle.models.build import build_model
from oracle.quantised import FORMATS, FP8, quantised, round_inputs
from oracle.scenarios import Dice
from oracle.segments import chunk, text, token_ids

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="SGLang's wheels quantise on GPUs only"),
    pytest.mark.usefixtures("freed_gpu"),
]

# By the beginning of a format's name
OPTIONS = {
    "fp8 block": {"fp8_gemm_runner_backend": "triton"},  # DeepGEMM compiles for minutes
    "bitsandbytes": {"quantization": "bitsandbytes", "load_format": "bitsandbytes"},
    # Kernels in Triton: those of Marlin for experts compile for more than ten minutes.
    "awq qwen3-moe": {"quantization": "moe_wna16"},
    "gptq qwen3-moe": {"quantization": "moe_wna16"},
}
KV_SCALES = 0.07, 0.03
LENGTHS = 300, 7, 180


@pytest.fixture
def serve(model_dir, tmp_path):
    """serve(format): start an engine on the model; returns it and the folder of dequantised weights."""
    from sglang_lazy import Engine

    engines = []

    def serve(name: str, kv_scales=None, **options):
        if name == "bitsandbytes":
            pytest.importorskip("bitsandbytes")
        stored, read = quantised(build_model(FORMATS[name].model, model_dir), name, tmp_path, kv_scales)
        of_format = next((some for prefix, some in OPTIONS.items() if name.startswith(prefix)), {})
        more = {"attention_backend": "triton", "max_total_tokens": 20000, **of_format, **options}
        engines.append(Engine(model_path=stored, **ENGINE, **more))
        return engines[0], read

    yield serve
    for engine in engines:
        engine.shutdown()
    gc.collect()


def check(engine, prompts, oracles, **arguments) -> None:
    """Cold, reordered and warm, in batches: the error against fp32 is at most twice that of plain PyTorch in bf16, and
    smaller than the distance from full attention.

    oracles: in fp32, and in bf16.
    """
    params = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    segments = [[segment.to_request() for segment in prompt] for prompt in prompts]
    errors = Errors()
    for hit in (False, True):
        outputs = engine.generate(segments=segments, sampling_params=params, return_logprob=True, **arguments)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert not hit or all(entry["hit"] for entry in output["meta_info"]["chunks"])
            full = partial(oracles[0].logprobs, [text(token_ids(prompt))])
            errors.add(output, *(partial(oracle.logprobs, prompt) for oracle in oracles), full)
    errors.check()


def prompts_of(name: str, *lengths: int) -> list:
    """lengths: of three chunks."""
    dice = Dice(name)
    a, b, c = (chunk(dice.ids(length)) for length in lengths)
    question = dice.text(9)
    return [[dice.text(5), a, dice.text(1), b, question], [c, dice.text(2), b, a, question], [b, c, question]]


def oracle(path: str, name: str, dtype: torch.dtype) -> Oracle:
    oracle = Oracle(path, dtype, "cuda")
    round_inputs(oracle.model, name)
    return oracle


@pytest.mark.parametrize("name", FORMATS)
def test_quantised_weights(serve, name):
    engine, read = serve(name)
    check(engine, prompts_of(name, *LENGTHS), [oracle(read, name, dtype) for dtype in (torch.float32, torch.bfloat16)])


def test_scales_of_a_checkpoint_for_an_fp8_cache(serve):
    name = "fp8 tensor"
    engine, read = serve(name, KV_SCALES, kv_cache_dtype="fp8_e4m3")
    oracles = [RoundingOracle(read, FP8, KV_SCALES, dtype, "cuda") for dtype in (torch.float32, torch.bfloat16)]
    for one in oracles:
        round_inputs(one.model, name)
    check(engine, prompts_of(name, *LENGTHS), oracles)


def test_adapters_on_quantised_weights(serve, model_dir, tmp_path):
    """Each adapter over its own chunks; its product is added to that of the dequantised weights."""
    name = "compressed int4"
    adapter = random_adapter(build_model(FORMATS[name].model, model_dir), tmp_path / "adapter", seed=1, rank=8)
    engine, read = serve(name, lora_paths=[f"a={adapter}"], max_loras_per_batch=2, lora_backend="triton")
    models = {None: read, "a": str(merged(read, adapter, Path(tmp_path) / "merged"))}
    for adapter_name, path in models.items():
        oracles = [oracle(path, name, dtype) for dtype in (torch.float32, torch.bfloat16)]
        check(engine, prompts_of(name, *LENGTHS), oracles, lora_path=[adapter_name] * 3)
