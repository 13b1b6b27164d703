"""Server start: which kernels it uses, and what happens where chunk reuse does not fit."""

import dataclasses
import json
import logging
import sys
import types
from types import SimpleNamespace

import msgspec
import pytest
import torch
import transformers
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_lazy.attention import kernels
from sglang_lazy.attention.table import table_of
from sglang_lazy.core.config import ENV_VAR, LazyConfig
from sglang_lazy.core.model import AttentionLayer
from sglang_lazy.core.supported import Unfit
from sglang_lazy.port import hooks, plugin
from sglang_lazy.port.model import model_runner

TESTED = ["LlamaForCausalLM"]
WITHOUT = "something is not as expected"


@pytest.fixture
def fits(monkeypatch):
    """A runner that everything fits, except for what a test changes."""
    monkeypatch.setattr(model_runner, "unfit_flags", lambda _args: [])
    monkeypatch.setattr(model_runner, "unfit_model", lambda _runner, untested: [])
    monkeypatch.setattr(model_runner, "describe_layers", lambda *_: {})
    monkeypatch.setattr(model_runner, "check_layers", lambda _model, layers, *_: layers)
    pool = SimpleNamespace(req_to_token=[None] * 3)
    return SimpleNamespace(
        req_to_token_pool=pool,
        token_to_kv_pool=None,
        server_args=SimpleNamespace(enable_mixed_chunk=False, speculative_algorithm=None),
        spec_algorithm=SpeculativeAlgorithm.NONE,
        is_draft_worker=False,
        model=torch.nn.Module(),
        model_config=SimpleNamespace(
            context_len=8,
            hidden_size=8,
            num_hidden_layers=2,
            hf_config=transformers.PretrainedConfig(architectures=TESTED),
            linear_attn_registry_result=None,
        ),
        device="cpu",
        dtype=None,
        kv_cache_dtype=None,
    )


class Stock:
    """SGLang's own attention."""

    def __str__(self):
        return "stock"

    def forward_extend(self, q, k, v, layer, forward_batch):
        """Does not accept sinks."""


def start(runner, monkeypatch, **config):
    """The backend that a runner gets when the stock one is "stock"."""
    monkeypatch.setenv(ENV_VAR, json.dumps(config))
    monkeypatch.setattr(model_runner, "with_link_path", lambda backend, *_: f"linked {backend}")
    return model_runner.wrap_backend(lambda _runner: Stock())(runner)


def test_a_model_that_fits_gets_the_link_path(fits, monkeypatch):
    assert start(fits, monkeypatch) == "linked stock"
    assert table_of(fits.req_to_token_pool).max_segments == LazyConfig.max_chunks


def test_a_model_that_drafts_keeps_sglangs_own_attention(fits, monkeypatch):
    fits.is_draft_worker = True
    assert str(start(fits, monkeypatch)) == "stock" and table_of(fits.req_to_token_pool) is None


def test_an_untested_model_is_served_with_a_warning(fits, monkeypatch, caplog):
    with caplog.at_level(logging.WARNING):
        start(fits, monkeypatch)
        assert not caplog.text
        fits.model_config.hf_config.architectures = ["NewForCausalLM"]
        del fits.req_to_token_pool.segment_table
        start(fits, monkeypatch, untested_model=True)
    assert "NewForCausalLM passed the start-up check, but no test" in caplog.text


def fail(*_):
    raise ValueError(WITHOUT)


@pytest.mark.parametrize("probe", ["describe_layers", "check_layers"])
def test_a_probe_that_fails(fits, monkeypatch, caplog, probe):
    """With the fallback, the server runs without chunk reuse and logs why; otherwise it does not start."""
    monkeypatch.setattr(model_runner, probe, fail)
    with pytest.raises(Unfit, match=WITHOUT):
        start(fits, monkeypatch)
    with caplog.at_level(logging.WARNING):
        assert str(start(fits, monkeypatch, fallback=True)) == "stock"
    assert table_of(fits.req_to_token_pool) is None
    assert WITHOUT in caplog.text


@pytest.mark.parametrize("default_link, refused", [("copy", True), ("block", False)])
def test_a_default_link_that_does_not_fit(fits, monkeypatch, default_link, refused):
    fits.kv_cache_dtype = "fp8"
    if refused:
        with pytest.raises(Unfit, match="--lazy-default-link copy: .*fp8"):
            start(fits, monkeypatch, default_link=default_link)
    else:
        assert start(fits, monkeypatch, default_link=default_link) == "linked stock"


def test_a_default_link_that_only_the_first_process_knows(fits, monkeypatch):
    """It was registered in a script, without an entry point."""
    with pytest.raises(ValueError, match="link 'mine:tokens=1': .*entry point in the group 'sglang.srt.plugins'"):
        start(fits, monkeypatch, default_link="mine:tokens=1")


class Hybrid(SimpleNamespace):
    """As SGLang's model configuration describes it."""

    def _derive_hybrid_model(self):
        self.is_hybrid_swa = not self.disable_hybrid_swa_memory


@pytest.mark.parametrize(
    "architectures, untested, tiers, whole, head_dim, hybrid",
    [
        (["GptOssForCausalLM"], False, False, [1], 64, True),
        (["GptOssForCausalLM"], False, True, [1], 64, False),
        (["GptOssForCausalLM"], False, False, [], 64, False),
        (["Llama4ForCausalLM"], False, True, [1], 64, True),
        (["Llama4ForCausalLM"], True, True, [1], 64, False),
        (["Gemma4ForCausalLM"], True, True, [1], 512, True),
    ],
)
def test_when_window_layers_have_their_own_pool(monkeypatch, architectures, untested, tiers, whole, head_dim, hybrid):
    """SGLang keeps its two pools for models served without chunk reuse and for models with two head shapes."""
    monkeypatch.setenv(ENV_VAR, json.dumps({"untested_model": untested}))
    config = Hybrid(
        hf_config=SimpleNamespace(architectures=architectures),
        disable_hybrid_swa_memory=False,
        full_attention_layer_ids=whole,
        head_dim=head_dim,
        swa_head_dim=64,
        get_num_kv_heads=lambda _: 2,
        get_swa_num_kv_heads=lambda _: 2,
    )
    config._derive_hybrid_model()
    model_runner.keep_all_tokens(config, SimpleNamespace(enable_hierarchical_cache=tiers))
    assert config.is_hybrid_swa is hybrid


@pytest.mark.parametrize("sinks", [False, True])
def test_sinks_without_support_in_the_stock_backend(fits, monkeypatch, sinks):
    """The link path then computes all rows of the model."""
    layer = AttentionLayer(1, 1, 32, SimpleNamespace(cos_sin_cache=torch.zeros(1, 32)), sinks=sinks)
    monkeypatch.setattr(model_runner, "describe_layers", lambda *_: {0: layer})
    fits.token_to_kv_pool = SimpleNamespace(get_kv_buffer=lambda layer_id: None)
    start(fits, monkeypatch)
    assert table_of(fits.req_to_token_pool).stock_attends is not sinks


def test_logit_caps_without_support_in_the_stock_backend():
    """PyTorch's own attention has no logit cap."""
    layers = {i: AttentionLayer(1, 1, 32, None, logit_cap=cap) for i, cap in enumerate([None, 30.0])}
    native = object.__new__(TorchNativeAttnBackend)
    assert model_runner.stock_attends(Stock(), layers, hybrid=True)
    assert not model_runner.stock_attends(native, layers, hybrid=False)
    assert model_runner.stock_attends(native, {0: layers[0]}, hybrid=False)
    assert not model_runner.stock_attends(native, {0: layers[0]}, hybrid=True), "it reads a single pool"


@pytest.fixture
def cuda_takes(monkeypatch):
    """cuda_takes(n): limit the CUDA kernels to n segments per row. Triton's take all but what it is told."""

    def limit(num_segments, not_triton=None):
        def unsupported(_device, kind, max_segments):
            assert (kind.windowed, kind.sinks, kind.capped) == (kind.head_dim == 64, False, False)
            if kind.head_dim > 256:
                return "heads of 64, 128 or 256"
            return f"at most {num_segments} segments a row" if max_segments > num_segments else None

        implementations = {
            "cuda": SimpleNamespace(name="cuda", unsupported=unsupported),
            "triton": SimpleNamespace(name="triton", unsupported=lambda *_, **__: not_triton),
        }
        monkeypatch.setattr(kernels, "get_implementation", implementations.__getitem__)
        return torch.device("cuda"), None, None

    return limit


def test_layers_that_cuda_cannot_serve(cuda_takes, caplog):
    """triton replaces them layer by layer, and the log says where and why; with cuda requested explicitly, the start is
    refused."""
    rope = SimpleNamespace(cos_sin_cache=torch.zeros(1, 64))
    layers = {i: AttentionLayer(4, 2, 64, rope, window=128) for i in range(2)}
    wide = layers | {i: AttentionLayer(4, 1, 512, rope) for i in (2, 5)}

    def chosen(layers, **config):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            chosen = kernels.choose_kernels(LazyConfig(**config), layers, *cuda_takes(512))
        assert {i: dataclasses.replace(layer, kernels=None) for i, layer in chosen.items()} == layers
        return [layer.kernels.name for layer in chosen.values()]

    for asked in ("auto", "cuda"):
        assert chosen(layers, kernels=asked, max_chunks=512) == ["cuda"] * 2
        assert not caplog.text
    assert chosen(layers, max_chunks=513) == ["triton"] * 2
    assert "triton kernels instead of the CUDA ones: at most 512 segments" in caplog.text
    assert chosen(wide) == ["cuda", "cuda", "triton", "triton"]
    assert "triton kernels instead of the CUDA ones in layers 2, 5: heads of" in caplog.text
    for asked, reason in ((layers, "at most 512 segments"), (wide, "heads of")):
        with pytest.raises(Unfit, match=f"--lazy-kernels cuda: {reason}"):
            chosen(asked, kernels="cuda", max_chunks=513)


def test_layers_that_no_kernels_can_serve(cuda_takes):
    """As with an e4m3 cache on an A100: the server refuses to start, or falls back, before Triton fails to compile."""
    rope = SimpleNamespace(cos_sin_cache=torch.zeros(1, 64))
    layers = {i: AttentionLayer(4, 2, 64, rope, window=128) for i in range(2)}
    kinds = cuda_takes(512, not_triton="no fp8 here")
    assert len(kernels.choose_kernels(LazyConfig(max_chunks=512), layers, *kinds)) == 2
    with pytest.raises(Unfit) as caught:
        kernels.choose_kernels(LazyConfig(max_chunks=513), layers, *kinds)
    assert caught.value.reasons == ["neither CUDA nor Triton kernels support this model: no fp8 here"]


class Target:
    """A stand-in for an SGLang class that gets hooks."""

    @classmethod
    def hooked(cls):
        return "stock"

    @staticmethod
    def lost():
        return "stock"


HOOKED, LOST = (f"{__name__}.Target.{name}" for name in ("hooked", "lost"))


def around(original, *args):
    return f"{original(*args)}, hooked"


def test_a_hook_that_is_not_in_place_is_named(monkeypatch):
    """One hook was never applied, another has been replaced since."""
    declared = [hooks.Hook(target, around, "AROUND", "feature", "a test") for target in (HOOKED, LOST)]
    assert hooks.missing(declared) == [HOOKED, LOST]
    hooks.apply(declared[:1])
    assert Target.hooked() == "stock, hooked"
    assert hooks.missing(declared) == [LOST]
    monkeypatch.setattr(plugin, "_hooks", tuple(declared))
    with pytest.raises(RuntimeError, match="Target.lost"):
        plugin.verify()
    monkeypatch.setattr(Target, "hooked", lambda: "replaced")
    assert hooks.missing(declared) == [HOOKED, LOST]


@pytest.fixture
def nothing_hooked(monkeypatch):
    monkeypatch.setattr(hooks, "_applied", {})
    monkeypatch.setattr(hooks, "_ran", set())


def nothing(*_args):
    pass


def test_a_second_hook_on_a_target_is_not_taken_for_the_first(nothing_hooked):
    """SGLang does not apply it, and logs nothing."""

    class Twice:
        def method(self):
            pass

    globals()["Twice"] = Twice
    target = f"{__name__}.Twice.method"
    first, second = (hooks.Hook(target, one, "AROUND", "feature", "a test") for one in (around, nothing))
    hooks.apply([first])
    hooks.apply([first, second])
    assert hooks.missing([first]) == [] and hooks.missing([second]) == [second.target]


def test_a_lost_repair_is_no_reason_not_to_start(nothing_hooked, caplog):
    """SGLang has repaired itself, or has got another fault: the server starts, with a warning."""
    lost = hooks.Hook(f"{__name__}.Target.gone", around, "AROUND", "repair", "clients are answered", "SGLang answers")
    hooks.apply([lost])
    assert hooks.missing([lost]) == []
    (warning,) = [record.getMessage() for record in caplog.records if "gone" in record.getMessage()]
    assert "clients are answered" in warning


def test_without_the_target_of_another_hook_nothing_starts(nothing_hooked):
    for lost in (
        hooks.Hook(f"{__name__}.Target.gone", around, "AROUND", "feature", "clients are answered"),
        hooks.Hook("sglang.srt.gone.Gone.method", around, "AROUND", "required", "clients are answered"),
    ):
        with pytest.raises(RuntimeError, match=f"{lost.target}.*clients are answered"):
            hooks.apply([lost])


class Flags(msgspec.Struct):
    """As SGLang's `ServerArgs`: msgspec looks `__post_init__` up once, when it makes the class."""

    given: int = 0

    def __post_init__(self):
        self.given += 1

    def resolve(self):
        self.given += 1


def test_a_hook_that_never_runs_is_named(nothing_hooked):
    """It is in place, and nobody calls it."""
    dead, alive = (
        hooks.Hook(f"{__name__}.Flags.{name}", nothing, "BEFORE", "required", "a test", process="tokenizer")
        for name in ("__post_init__", "resolve")
    )
    elsewhere = hooks.Hook(LOST, around, "AROUND", "required", "a test", process="scheduler")
    hooks.apply([dead, alive, elsewhere])
    assert hooks.missing([dead, alive, elsewhere]) == []
    Flags().resolve()
    assert hooks.unused("tokenizer") == [dead.target]
    assert hooks.unused("scheduler", "tokenizer") == [dead.target, elsewhere.target]


def test_every_hook_says_what_it_is_for():
    plugin.install()
    for hook in plugin._hooks:
        assert hook.why, hook.target
        assert bool(hook.until) == (hook.role == "repair"), hook.target
        assert (hook.process is not None) == (hook.role == "required"), hook.target
    assert {hook.process for hook in plugin._hooks} == {None, "http", "tokenizer", "scheduler"}


def test_no_module_keeps_a_function_that_is_hooked():
    """Whoever imported one by name has the hooked one, too."""
    plugin.install()
    originals = set()
    for hook in plugin._hooks:
        function = hooks.resolve(hook.target)
        while (function := getattr(function, "__wrapped__", None)) is not None:
            originals.add(id(function))
    assert len(originals) > 60
    modules = [module for module in list(sys.modules.values()) if isinstance(module, types.ModuleType)]
    assert not [(m.__name__, name) for m in modules for name, value in [*vars(m).items()] if id(value) in originals]
