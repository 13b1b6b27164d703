"""fp8 caches in `torch` and `triton`, against the formula on the dequantised values; `cuda` has tests of its own."""

import dataclasses

import pytest
import torch
from cases import CASES, INTERPRETED_IN_FP16, all_dtypes, skip_unless_supported
from ragged import Shape, check, quantise, random_batch, run

from sgl_kernel_lazy import get_implementation

all_fp8 = pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])
both_ops = pytest.mark.parametrize("op", ["decode", "extend"])


@pytest.mark.parametrize("name", ["torch", "triton"])
@all_fp8
@all_dtypes
@both_ops
@pytest.mark.parametrize("case", INTERPRETED_IN_FP16)
def test_fp8_caches(name, fp8, dtype, op, case):
    skip_unless_supported(name, dtype, case)
    seed, shape, layout = CASES[case]
    batch = random_batch(seed, dataclasses.replace(shape, dtype=dtype), layout)
    quantised = quantise(batch, fp8, k_scale=2.0, v_scale=0.5)
    if name == "triton" and dtype == torch.float32:
        with pytest.raises(ValueError, match="k_cache: expected dtype torch.float32, got torch.float8"):
            run(op, get_implementation(name), batch, **quantised)
    else:
        check(op, get_implementation(name), batch, **quantised)


@both_ops
def test_scales_need_an_fp8_cache(op):
    with pytest.raises(ValueError, match="v_scale: expected 1 for caches that are not fp8, got 0.5"):
        run(op, get_implementation("torch"), random_batch(0, Shape()), v_scale=0.5)


@both_ops
def test_keys_and_values_share_a_dtype(op):
    batch = random_batch(0, Shape())
    quantised = quantise(batch, torch.float8_e4m3fn)
    quantised["v_cache"] = quantised["v_cache"].to(torch.float8_e5m2)
    with pytest.raises(ValueError, match="v_cache: expected dtype torch.float8_e4m3fn, got torch.float8_e5m2"):
        run(op, get_implementation("torch"), batch, **quantised)
