"""A checkpoint of gpt-oss with MXFP4 experts on a CPU, in bf16, against an oracle with the dequantised weights."""

import pytest
import torch
from test_gpu_quantised import check, prompts_of

from fakes import mxfp4_on_cpu
from oracle.block_mask import Oracle
from oracle.models.build import build_model
from oracle.quantised import FORMATS, quantised
from sglang_lazy.testing import CPU_OPTIONS
from support.engine import EngineProcess

pytestmark = pytest.mark.slow


def test_mxfp4_experts(model_dir, tmp_path, with_plugin):
    name = "mxfp4 gpt-oss"
    model = FORMATS[name].model
    stored, read = quantised(build_model(model, model_dir), name, tmp_path)
    with with_plugin(mxfp4_on_cpu.load):
        engine = EngineProcess(
            model_path=stored,
            **{**CPU_OPTIONS, **model.cpu_options, "dtype": "bfloat16"},
            max_total_tokens=4096,
            log_level="error",
        )
    try:
        check(engine, prompts_of(name, 60, 7, 40), [Oracle(read, dtype) for dtype in (torch.float32, torch.bfloat16)])
    finally:
        engine.shutdown()
