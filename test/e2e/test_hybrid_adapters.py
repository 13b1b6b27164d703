"""LoRA adapters of models with recurrent layers, on a CPU with PyTorch for their kernels, against the oracle: the model
with an adapter's weights merged into it."""

import functools
import itertools
from pathlib import Path

import pytest
import torch
from test_recurrent_chunks import TOLERANCE, Served, hits, serving

from fakes import hybrids_on_cpu, remembered_drafts, speculation_on_cpu
from oracle.adapters import merged, random_adapter, split
from oracle.hybrids import HybridOracle
from oracle.models.build import build_model
from oracle.models.drafts import build_draft
from oracle.models.hybrids import DELTA, HYBRIDS
from oracle.scenarios import Dice
from oracle.segments import text, token_ids

pytestmark = [
    pytest.mark.slow,  # starts servers
    pytest.mark.skipif(torch.cuda.is_available(), reason="replaces kernels that a GPU has"),
]

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
MODULES = {
    "qwen3.5-vl": (*ATTENTION, *MLP, "in_proj_qkvz", "out_proj"),
    "qwen3.5-vl-moe": (*ATTENTION, "in_proj_qkvz", "out_proj"),
    "lfm2": ATTENTION[:3],
    "lfm2-moe": ATTENTION[:3],
    "granite4": ATTENTION,
    "falcon-h1": (*ATTENTION, *MLP),
    "nemotron-h": (*ATTENTION, "out_proj"),
}
"""What SGLang can adapt in each model."""
KEYS = DELTA["linear_num_key_heads"] * DELTA["linear_key_head_dim"]
VALUES = DELTA["linear_num_value_heads"] * DELTA["linear_value_head_dim"]
PARTS = {"in_proj_qkv": {"in_proj_q": KEYS, "in_proj_k": KEYS, "in_proj_v": VALUES}}
"""What SGLang reads an adapter's factors of `in_proj_qkvz` as, beside `in_proj_z`; in transformers these are two."""
WAYS = {name: {} for name in MODULES} | {"qwen3.5-vl on two ranks": {"tp_size": 2}}
RANKS = {"a": 4, "b": 8}
"""Those of the adapters."""


class Adapted(Served):
    """adapters: the folder for adapters and the models with them."""

    def __init__(self, name: str, folder, adapters: Path, **options):
        self.oracles, paths = {}, {}
        model = build_model(HYBRIDS[name], folder)
        adapted = MODULES[name]
        modules = (*adapted, "in_proj_qkv", "in_proj_z") if "in_proj_qkvz" in adapted else adapted
        for adapter, rank in RANKS.items():
            made = random_adapter(model, adapters / f"{adapter} trained", rank, rank, modules)
            oracle = HybridOracle(str(merged(model, made, adapters / f"{adapter} merged")))
            self.oracles[adapter] = functools.partial(self._logprobs, oracle)
            paths[adapter] = str(split(made, adapters / adapter, PARTS, adapted))
        super().__init__(name, folder, lora_paths=paths, max_loras_per_batch=2, **options)
        self.oracles[None] = self.expected

    @staticmethod
    def _logprobs(oracle: HybridOracle, prompt: tuple, tokens: tuple, *more) -> torch.Tensor:
        return oracle.logprobs([*prompt], tokens, *more)

    def answer_under(self, adapters: list[str | None], prompts: list) -> list[dict]:
        """As `answer`, each prompt under an adapter, or none."""
        outputs = self.ask(*prompts, lora_path=adapters)
        for prompt, adapter, output in zip(prompts, adapters, outputs, strict=True):
            self.compare(prompt, output, self.oracles[adapter])
        return outputs


@pytest.fixture(
    scope="module",
    params=[way if way == "qwen3.5-vl" else pytest.param(way, marks=pytest.mark.nightly) for way in WAYS],
)
def served(request, model_dir, with_plugin, tmp_path_factory):
    name, options = request.param.partition(" ")[0], {"chunked_prefill_size": 64, **WAYS[request.param]}
    kind = functools.partial(Adapted, adapters=tmp_path_factory.mktemp("adapters"))
    with serving(name, model_dir, with_plugin, kind, **options) as served:
        yield served


def test_each_adapter_has_its_own_chunks_and_states(served):
    """The same prompts under the model and two adapters at once: cold, warm, in another order, and second turns."""
    dice = Dice("adapters")
    one, two = dice.chunks(2, 20, 60)
    start, between, question = dice.text(9), dice.text(5), dice.text(12)
    cold, reordered, names = [start, one, between, two, question], [two, start, one, question], [None, *RANKS]
    for prompt, hit in ((cold, False), (cold, True), (reordered, True)):
        outputs = served.answer_under(names, [prompt] * 3)
        assert [hits(output) for output in outputs] == [[hit] * 2] * 3
        first = sorted(output["meta_info"]["output_token_logprobs"][0][0] for output in outputs)
        assert min(b - a for a, b in itertools.pairwise(first)) > 2 * TOLERANCE, "adapters make other answers"
    turns = [[*reordered, text(output["output_ids"]), dice.text(4)] for output in outputs]
    for prompt, output in zip(turns, served.answer_under(names, turns), strict=True):
        assert output["meta_info"]["cached_tokens"] >= len(token_ids(prompt)) - len(prompt[-1].ids) - 1
    served.engine.flush_cache()  # an idle server checks its accounting, and a leaked slot or lock ends it


@pytest.mark.nightly
def test_an_adapter_without_a_place_ends_nothing(model_dir, with_plugin, tmp_path):
    """SGLang takes an adapter of Nemotron-H's MLP, and the first request under it would end the scheduler."""
    name, modules, dice = "nemotron-h", [*ATTENTION, *MLP[1:]], Dice("refused")
    made = random_adapter(build_model(HYBRIDS[name], model_dir), tmp_path / "made", 1, 4, modules)
    options = {"enable_lora": True, "max_lora_rank": 4, "lora_target_modules": modules, "max_loras_per_batch": 2}
    with serving(name, model_dir, with_plugin, **options) as served:
        loaded = served.engine.call("load_lora_adapter", "made", str(made))
        assert not loaded.success and "mixer.up_proj" in loaded.error_message
        served.answer([dice.text(9), dice.chunk(40), dice.text(12)])


@pytest.mark.nightly
def test_adapters_with_drafts(model_dir, with_plugin, tmp_path):
    """Which a layer of the model makes without an adapter."""
    dice, name, names = Dice("drafts"), "qwen3.5-vl", [None, *RANKS]
    options = {
        "model_path": build_draft("NEXTN", build_model(HYBRIDS[name], model_dir), model_dir),
        "speculative_algorithm": "NEXTN",
        **hybrids_on_cpu.WITHOUT_OVERLAP,
        **speculation_on_cpu.OPTIONS,
    }
    kind = functools.partial(Adapted, adapters=tmp_path)
    prompt = [dice.text(9), dice.chunk(40), dice.text(5), dice.chunk(30), dice.text(12)]
    with (
        with_plugin(remembered_drafts.load),
        serving(name, model_dir, with_plugin, kind, **options) as served,
    ):
        served.num_tokens = 12
        for hit in (False, True, True):
            outputs = served.answer_under(names, [prompt] * 3)
            assert [hits(output) for output in outputs] == [[hit] * 2] * 3
        assert any(sum(output["meta_info"]["spec_correct_drafts_histogram"][1:]) for output in outputs)
        served.engine.flush_cache()
