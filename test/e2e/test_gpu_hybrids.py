"""Models with recurrent layers on a GPU: their chunks among SGLang's own kernels, against the oracle."""

import dataclasses
import gc
from functools import partial

import pytest
import torch
from rounding import Errors
from test_gpu import ENGINE

from fakes import noted_graphs
from oracle.hybrids import HybridOracle
from oracle.models.build import build_model
from oracle.models.hybrids import HYBRIDS
from oracle.scenarios import Dice
from oracle.segments import chunk, text, token_ids

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="the CUDA path needs a GPU"),
    pytest.mark.usefixtures("freed_gpu"),
]

NUM_TOKENS = 12
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
# Heads of the sizes that CUDA kernels take.
WIDER = {
    "lfm2": {"hidden_size": 256, **HEADS},
    "qwen3.5": {"head_dim": 128, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
    "granite4": {"hidden_size": 256, **HEADS, "mamba_n_heads": 8, "mamba_d_head": 64},
    "falcon-h1": {"head_dim": 128},
}
FA3 = {"attention_backend": "fa3"}
WAYS = {
    "lfm2": FA3,
    "qwen3.5": FA3,
    "granite4": FA3,
    "falcon-h1": FA3,
    "qwen3.5 synchronous": {**FA3, "disable_overlap_schedule": True},
    # With batches that end within a fill, and within its chunks.
    "qwen3.5 in parts": {**FA3, "chunked_prefill_size": 512},
}


IN_GRAPHS = "qwen3.5"
"""The model whose recurrent layers SGLang's prefill graphs leave out. Falcon-H1's are in them; the two others have no
such graphs."""


@pytest.fixture(scope="module", params=WAYS)
def served(request, model_dir, with_plugin, tmp_path_factory):
    """An engine in bf16, the oracle in fp32 and in bf16, the model's name, and the file of `noted_graphs`."""
    from sglang_lazy import Engine

    spec = HYBRIDS[name := request.param.partition(" ")[0]]
    settings = {**spec.settings, **WIDER[name]}
    path = build_model(dataclasses.replace(spec, name=f"{name}-wide", settings=settings), model_dir)
    options = {**ENGINE, **WAYS[request.param]}
    notes = tmp_path_factory.mktemp("graphs") / "notes"
    notes.touch()
    with pytest.MonkeyPatch.context() as environment, with_plugin(noted_graphs.load):
        environment.setenv(noted_graphs.PATH_VARIABLE, str(notes))
        engine = Engine(model_path=path, **options, max_total_tokens=20000, max_running_requests=16)
    try:
        yield engine, HybridOracle(path, device="cuda"), HybridOracle(path, torch.bfloat16, "cuda"), name, notes
    finally:
        engine.shutdown()
        gc.collect()


def test_recurrent_chunks_on_cuda(served):
    """Cold, warm and reordered, alone and in batches: the error against fp32 is at most twice that of plain PyTorch in
    bf16, whose recurrence goes token by token."""
    engine, oracle, in_bf16, name, notes = served
    dice = Dice("recurrent layers on a GPU")
    a, b, c, d = (chunk(dice.ids(length)) for length in (300, 200, 7, 150))
    question = text(dice.ids(9))
    prompts = [
        [text(dice.ids(5)), a, text(dice.ids(3)), b, text(dice.ids(2)), c, question],
        [text(dice.ids(80))],
        [c, text(dice.ids(4)), b, a, question],
        [a, b, c, a, question],
        [d, question],
    ]
    params = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    segments = [[segment.to_request() for segment in prompt] for prompt in prompts]
    generate = partial(engine.generate, sampling_params=params, return_logprob=True)
    alone = [generate(segments=each) for each in segments]
    # Padded to graphs of 16 and 256 tokens: the text of the third prompt, questions, the last prompt's chunk.
    in_graphs = {*map(int, notes.read_text().split())}
    assert in_graphs >= {13, 9, 150} if name == IN_GRAPHS else not in_graphs
    warm = generate(segments=segments)
    assert all(entry["hit"] for output in warm for entry in output["meta_info"].get("chunks", []))
    flushed = engine.tokenizer_manager.flush_cache(timeout_s=30)  # waits for the last batch to end, and checks accounts
    assert engine.loop.run_until_complete(flushed).success
    cold = generate(segments=segments)
    assert cold[0]["meta_info"]["cached_tokens"] == 0
    errors = Errors()
    for prompt, output in zip(prompts * 3, alone + warm + cold, strict=True):
        last = len(token_ids(prompt)) - 1

        def of(oracle, prompt=prompt, last=last):
            return lambda tokens: oracle.logprobs(prompt, tokens)[last:].cpu()

        errors.add(output, of(oracle), of(in_bf16))
    errors.check()
