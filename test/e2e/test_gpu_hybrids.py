"""Models with recurrent layers on a GPU: their chunks among SGLang's own kernels, against the oracle."""

import dataclasses
import functools
import gc
import itertools
from collections.abc import Iterable

import pytest
import torch
from rounding import Errors
from test_gpu import ADAPTERS, ENGINE, WAYS
from test_hybrid_adapters import MODULES

from fakes import noted_graphs
from oracle.adapters import merged, random_adapter, split
from oracle.hybrids import HybridOracle
from oracle.models.build import build_model
from oracle.models.hybrids import HYBRIDS
from oracle.scenarios import Dice
from oracle.segments import Segment, chunk, text, token_ids

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="the CUDA path needs a GPU"),
    pytest.mark.usefixtures("freed_gpu"),
]

NUM_TOKENS = 12
NEMOTRON = HYBRIDS["nemotron-h"]
LAYERS = {"layers_block_type": ["mamba", "attention", "moe", "mamba", "moe"]}
ROUTED = {"n_routed_experts": 4, "moe_intermediate_size": 128, "moe_shared_expert_intermediate_size": 128}
KIMI = HYBRIDS["kimi-linear"]
MODELS = HYBRIDS | {
    "kimi-linear": dataclasses.replace(
        KIMI,
        served={
            **KIMI.served,
            "linear_attn_config": {**KIMI.served["linear_attn_config"], "head_dim": 128},
            "dtype": "bfloat16",  # SGLang makes two of its projections in this, whatever --dtype says
        },
    ),
    # With experts, for which SGLang has no code on a CPU
    "nemotron-3": dataclasses.replace(
        NEMOTRON, settings={**NEMOTRON.settings, **LAYERS, **ROUTED}, served={**NEMOTRON.served, **LAYERS}
    ),
}
DELTA = {"head_dim": 128, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
EXPERTS = {"hidden_size": 256, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
# Heads and experts of the sizes that CUDA kernels take.
WIDER = {
    "kimi-linear": {
        "hidden_size": 256,
        "moe_intermediate_size": 128,
        "linear_head_dim": 128,
        # Those of released models
        **{"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    },
    "lfm2": {"hidden_size": 512},
    "qwen3.5": DELTA,
    "qwen3.5-moe": {**DELTA, **EXPERTS},
    "qwen3.5-vl": DELTA,
    "qwen3.5-vl-moe": {**DELTA, **EXPERTS},
    "nemotron-h": {"head_dim": 128},
    "nemotron-3": {"hidden_size": 256, "head_dim": 128},
    "granite4": {"hidden_size": 512, "mamba_d_head": 64},
    "falcon-h1": {"head_dim": 128},
}
POOL = 4096
OPTIONS = {
    **ENGINE,
    "attention_backend": "fa3",
    "cuda_graph_max_bs_decode": 8,
    "cuda_graph_bs_prefill": [16, 256, 1024],
    "max_total_tokens": POOL,
    "max_running_requests": 16,
    "disable_flashinfer_autotune": True,  # a minute, for shapes that only these models have
    # Else states take most of the GPU, though these tests need few.
    "max_mamba_cache_size": 96,
    "lazy_state_share": 0.02,
}
HOST_RATIO = 2
TIERS = {
    "enable_hierarchical_cache": True,
    "hicache_ratio": float(HOST_RATIO),
    "lazy_host_share": 1.0,
    "hicache_storage_backend": "file",
    "hicache_storage_prefetch_policy": "wait_complete",
}
TWO_GPUS = {**TIERS, **WAYS["on two GPUs"]}
SERVED = {name: TIERS for name in WIDER if not name.startswith("qwen3.5-vl")} | {
    "qwen3.5 synchronous": {"disable_overlap_schedule": True},
    # With batches that end within a fill, and within its chunks.
    "qwen3.5 in parts": {"chunked_prefill_size": 512},
    "qwen3.5 beside SGLang's host tier": {**TIERS, "hicache_ratio": 8.0, "lazy_host_share": 0.25},
    "qwen3.5 on two GPUs": TWO_GPUS,
    "qwen3.5-moe on two GPUs": TWO_GPUS,
    "nemotron-h on two GPUs": TWO_GPUS,
    "granite4 on two GPUs": TWO_GPUS,
    "falcon-h1 on two GPUs": TWO_GPUS,
    "lfm2 on two GPUs": TWO_GPUS,
}
"""How models are served."""
IN_GRAPHS = {"qwen3.5", "qwen3.5-moe"}
"""Models whose recurrent layers SGLang's prefill graphs leave out. Falcon-H1's are in them; Granite 4 and LFM2 have no
such graphs, and Nemotron-H has them on some GPUs."""


def wide(name: str, model_dir) -> str:
    """Path of a model with wider heads."""
    spec = MODELS[name]
    inner = spec.settings.get("text_config")
    wider = WIDER[name] if inner is None else {"text_config": {**inner, **WIDER[name]}}
    return build_model(dataclasses.replace(spec, name=f"{name}-wide", settings={**spec.settings, **wider}), model_dir)


class Known:
    """A model's log-probabilities, in fp32 and in bf16."""

    def __init__(self, path: str):
        self.exact, self.rough = (
            self._remembering(HybridOracle(path, dtype, "cuda")) for dtype in (torch.float32, torch.bfloat16)
        )

    @staticmethod
    def _remembering(oracle: HybridOracle):
        @functools.cache
        def logprobs(prompt: tuple[Segment, ...], tokens: tuple[int, ...]) -> torch.Tensor:
            return oracle.logprobs([*prompt], tokens)[len(token_ids(prompt)) - 1 :].cpu()

        return logprobs

    def add(self, errors: Errors, prompt: list[Segment], output: dict) -> None:
        """Add an answer to `errors`."""

        def of(logprobs):
            return lambda tokens: logprobs(tuple(prompt), tuple(tokens))

        errors.add(output, of(self.exact), of(self.rough))


class Served:
    """A model, served by the engine in bf16.

    name: of the model.  options: of the engine, beside those of all.
    """

    def __init__(self, name: str, path: str, **options):
        from sglang_lazy import Engine

        self.name, self.known, self.numbers = name, Known(path), itertools.count()
        self.has_tiers = "enable_hierarchical_cache" in options
        self.engine = Engine(model_path=path, **{**OPTIONS, **MODELS[name].cpu_options, **options})

    def ask(self, *prompts: list[Segment], **fields) -> list[dict]:
        """Serve the prompts as one batch.  fields: others of the requests."""
        return self.engine.generate(
            segments=[[segment.to_request() for segment in prompt] for prompt in prompts],
            sampling_params={"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True},
            return_logprob=True,
            **fields,
        )

    def check(self, prompts: Iterable[list[Segment]], outputs: Iterable[dict]) -> None:
        """The error of answers against fp32 is at most twice that of plain PyTorch in bf16, whose recurrence goes token
        by token."""
        errors = Errors()
        for prompt, output in zip(prompts, outputs, strict=True):
            self.known.add(errors, prompt, output)
        errors.check()

    def displace(self, num_tokens: int) -> None:
        """Have at least so many tokens of other chunks computed."""
        dice = Dice(f"others {next(self.numbers)}")
        self.ask(*([dice.chunk(650), dice.chunk(650), dice.text(9)] for _ in range(-(-num_tokens // 1300))))

    def flush(self) -> None:
        """Wait for the last batch to end, check accounts and empty the caches; storage keeps what it has."""
        flushed = self.engine.tokenizer_manager.flush_cache(timeout_s=30)
        assert self.engine.loop.run_until_complete(flushed).success

    def forget(self) -> None:
        """The same, and empty storage."""
        self.flush()
        self.clear_storage()

    def clear_storage(self) -> None:
        if self.has_tiers:
            cleared = self.engine.tokenizer_manager.clear_hicache_storage()
            assert self.engine.loop.run_until_complete(cleared).success

    def shutdown(self) -> None:
        self.engine.shutdown()
        gc.collect()


def hits(output: dict) -> list[bool]:
    return [entry["hit"] for entry in output["meta_info"].get("chunks", [])]


def num_cached(output: dict, where: str) -> int:
    """How many tokens of a prompt came from the host, or from storage."""
    return output["meta_info"]["cached_tokens_details"][where]


@pytest.fixture(scope="module", params=SERVED)
def served(request, model_dir, with_plugin, tmp_path_factory):
    """A served model, and the file of `noted_graphs`."""
    name, options = request.param.partition(" ")[0], SERVED[request.param]
    if torch.cuda.device_count() < options.get("tp_size", 1):
        pytest.skip("tensor parallelism needs as many GPUs")
    folder = tmp_path_factory.mktemp("served")
    notes = folder / "notes"
    notes.touch()
    with pytest.MonkeyPatch.context() as environment, with_plugin(noted_graphs.load):
        environment.setenv(noted_graphs.PATH_VARIABLE, str(notes))
        environment.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(folder))
        served = Served(name, wide(name, model_dir), **options)
    try:
        yield served, notes
    finally:
        served.shutdown()


def test_recurrent_chunks_on_cuda(served):
    """Cold, warm and reordered, with text between and a chunk twice, alone and in batches."""
    served, notes = served
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
    alone = [output for prompt in prompts for output in served.ask(prompt)]
    # Padded to graphs of 16 and 256 tokens: the text of the third prompt, questions, the last prompt's chunk.
    in_graphs = {*map(int, notes.read_text().split())}
    if not served.name.startswith("nemotron"):
        assert in_graphs >= {13, 9, 150} if served.name in IN_GRAPHS else not in_graphs
    warm = served.ask(*prompts)
    assert all(hit for output in warm for hit in hits(output))
    served.forget()
    cold = served.ask(*prompts)
    assert cold[0]["meta_info"]["cached_tokens"] == 0
    served.check(prompts * 3, alone + warm + cold)


def test_second_turns_on_cuda(served):
    """After an answer, also with more chunks, only what is new is computed; and all of it once the caches are empty."""
    served, _ = served
    dice = Dice("second turns on a GPU")
    a, b, c = dice.chunks(3, 100, 200)
    talks = [[dice.text(9), a, dice.text(5), b, dice.text(12)], [b, a, dice.text(70)]]
    prompts, outputs = [*talks], served.ask(*talks)
    for new in ([dice.text(3)], [dice.text(4), c, dice.text(2)]):
        known = [len(token_ids(talk)) + NUM_TOKENS - 1 for talk in talks]
        talks = [[*talk, text(out["output_ids"]), *new] for talk, out in zip(talks, outputs[-2:], strict=True)]
        prompts, outputs = [*prompts, *talks], outputs + served.ask(*talks)
        assert all(out["meta_info"]["cached_tokens"] >= n for out, n in zip(outputs[-2:], known, strict=True))
    served.forget()
    prompts, outputs = [*prompts, *talks], outputs + served.ask(*talks)
    assert not any(hit for output in outputs[-2:] for hit in hits(output))
    served.check(prompts, outputs)


def test_evicted_chunks_on_cuda(served):
    """Chunks that others have pushed out of the GPU come back from the host if there is one, in another order; pushed
    out of both, they are computed again."""
    served, _ = served
    served.forget()
    dice = Dice("evicted on a GPU")
    a, b = dice.chunks(2, 100, 200)
    start, between, question = dice.text(9), dice.text(5), dice.text(12)
    prompts = [[start, a, between, b, question], [start, b, between, a, question], [b, start, a, question]]
    (first,) = served.ask(prompts[0])
    served.displace(POOL)
    (second,) = served.ask(prompts[1])
    assert hits(first) == [False] * 2 and hits(second) == [served.has_tiers] * 2
    if served.has_tiers:
        assert num_cached(second, "host") == len(a.ids) + len(b.ids)
    served.displace(POOL * (1 + HOST_RATIO) if served.has_tiers else POOL)
    served.clear_storage()
    (third,) = served.ask(prompts[2])
    assert hits(third) == [False] * 2
    served.check(prompts, [first, second, third])


def test_stored_chunks_on_cuda(served):
    """After a flush, which empties the GPU and the host, chunks and their states come from storage."""
    served, _ = served
    if not served.has_tiers:
        pytest.skip("this server has no storage")
    served.forget()
    dice = Dice("stored on a GPU")
    a, b, c = dice.chunks(3, 100, 200)
    start, between, question = dice.text(9), dice.text(5), dice.text(12)
    prompts = [[start, a, between, b, c, question], [c, b, between, start, a, question], [start, b, a, question]]
    (first,) = served.ask(prompts[0])
    outputs = [first]
    for prompt in prompts[1:]:
        served.flush()
        (output,) = served.ask(prompt)
        assert all(hits(output))
        assert num_cached(output, "storage") == sum(len(each.ids) for each in prompt if each.kind == "chunk")
        outputs.append(output)
    served.check(prompts, outputs)


@pytest.mark.parametrize("name", ["qwen3.5-vl", "qwen3.5-vl-moe", "nemotron-h", "granite4", "falcon-h1", "lfm2"])
def test_adapters_of_hybrids_on_cuda(name, model_dir, tmp_path):
    """The same prompts under a model and two adapters at once: cold, warm, in another order, and second turns."""
    path, adapted, parts = wide(name, model_dir), MODULES[name], {}
    modules = adapted
    if "in_proj_qkvz" in adapted:
        inner = HYBRIDS[name].settings["text_config"] | DELTA
        keys, values = (inner[f"linear_num_{of}_heads"] * inner[f"linear_{of}_head_dim"] for of in ("key", "value"))
        parts = {"in_proj_qkv": {"in_proj_q": keys, "in_proj_k": keys, "in_proj_v": values}}
        modules = (*adapted, "in_proj_qkv", "in_proj_z")
    folders, models = [], {None: path}
    for adapter, seed, rank in ADAPTERS:
        made = random_adapter(path, tmp_path / f"{adapter}-made", seed, rank, modules)
        folders.append(f"{adapter}={split(made, tmp_path / adapter, parts, adapted)}")
        models[adapter] = str(merged(path, made, tmp_path / f"{adapter}-merged"))
    served = Served(name, path, lora_paths=folders, max_loras_per_batch=len(models))
    dice = Dice("adapters of hybrids on a GPU")
    one, two = dice.chunks(2, 100, 200)
    start, between, question = dice.text(9), dice.text(5), dice.text(12)
    cold, reordered, names = [start, one, between, two, question], [two, start, one, question], [*models]
    asked, answers = [], []
    try:
        for prompt, hit in ((cold, False), (cold, True), (reordered, True)):
            outputs = served.ask(*[prompt] * len(names), lora_path=names)
            assert [hits(output) for output in outputs] == [[hit] * 2] * len(names)
            asked, answers = asked + [prompt] * len(names), answers + outputs
        turns = [[*reordered, text(output["output_ids"]), dice.text(4)] for output in outputs]
        outputs = served.ask(*turns, lora_path=names)
        known = len(token_ids(reordered)) + NUM_TOKENS - 1
        assert all(output["meta_info"]["cached_tokens"] >= known for output in outputs)
    finally:
        served.shutdown()
    errors = Errors()
    for number, adapter in enumerate(names):
        known = served.known if adapter is None else Known(models[adapter])
        for prompt, output in list(zip(asked + turns, answers + outputs, strict=True))[number :: len(names)]:
            known.add(errors, prompt, output)
    errors.check()
