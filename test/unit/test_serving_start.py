"""Before SGLang starts: backends chosen for a CPU, and what is refused before a model is loaded."""

import logging
import os
import re
import sys
import types
from array import array
from dataclasses import fields
from types import SimpleNamespace

import pytest
from sglang.srt.managers.multi_tokenizer_mixin import MultiTokenizerRouter
from sglang.srt.server_args import ServerArgs

from sglang_lazy import launch_server, policies
from sglang_lazy.core.config import LazyConfig, pop_keywords
from sglang_lazy.core.policy import ServerTraits
from sglang_lazy.core.supported import Unfit
from sglang_lazy.entrypoints.engine import Engine
from sglang_lazy.entrypoints.runtime import Runtime
from sglang_lazy.port import flag_checks, plugin
from sglang_lazy.port.cpu import backends_for_cpu, bounded_pool, replace_triton
from sglang_lazy.port.facts import flags_of
from sglang_lazy.port.serving import frontend, selftest
from sglang_lazy.scheduler.preambles import check_default_preamble

UNSET = {"attention_backend": None, "sampling_backend": None, "grammar_backend": None}
CHOSEN = {"attention_backend": "torch_native", "sampling_backend": "pytorch", "grammar_backend": "llguidance"}
NO_LORA = {"enable_lora": None, "lora_paths": None, "lora_backend": "csgmv"}


@pytest.mark.parametrize(
    "given, settings, named",
    [
        ({"device": "cpu"}, CHOSEN, ["--attention-backend", "--sampling-backend", "--grammar-backend"]),
        ({"device": "cpu", "grammar_backend": "outlines"}, {**CHOSEN, "grammar_backend": "outlines"},
         ["--attention-backend", "--sampling-backend"]),
        ({"device": "cpu", **CHOSEN}, CHOSEN, []),
        ({"device": "cuda"}, UNSET, []),
        ({"device": None}, UNSET, []),
    ],
)  # fmt: skip
def test_unset_backends_are_chosen_for_a_cpu(given, settings, named, caplog):
    args = SimpleNamespace(**{**UNSET, **NO_LORA, **given})
    with caplog.at_level(logging.INFO):
        vars(args).update(backends_for_cpu(args))
        assert backends_for_cpu(args) == {}
    assert {name: getattr(args, name) for name in UNSET} == settings
    assert len(caplog.records) == bool(named)
    assert [word for word in caplog.text.split() if word.startswith("--")] == named


@pytest.mark.parametrize("given", [{"enable_lora": True}, {"lora_paths": ["a=path"]}])
def test_lora_backend_on_a_cpu(given, caplog):
    caplog.set_level("WARNING", "sglang_lazy")  # engines may have raised it
    for backend, chosen in (("csgmv", "torch_native"), ("triton", "triton")):
        args = SimpleNamespace(device="cpu", **{**CHOSEN, **NO_LORA, **given, "lora_backend": backend})
        assert backends_for_cpu(args).get("lora_backend", backend) == chosen
    assert "--lora-backend torch_native" in caplog.text


@pytest.mark.parametrize(
    "device, backend, fallback, left",
    [
        ("cpu", "triton", False, "torch_native"),
        ("cpu", "triton", True, "triton"),
        ("cpu", "intel_amx", False, "intel_amx"),
        ("cuda", "triton", False, "triton"),
    ],
)
def test_triton_is_replaced_on_a_cpu(monkeypatch, caplog, device, backend, fallback, left):
    caplog.set_level("WARNING", "sglang_lazy")
    monkeypatch.setattr(LazyConfig, "current", lambda: LazyConfig(fallback=fallback))
    args = ServerArgs(model_path="dummy", device=device, attention_backend=backend)
    resolved = []
    replace_triton(args, lambda args: resolved.append(flags_of(args).attention_backend))
    assert resolved == [left]
    assert ("triton is replaced by torch_native" in caplog.text) == (left != backend)


@pytest.mark.parametrize(
    "device, given, profiled, size",
    [
        ("cpu", {}, 14, 5),  # of 20 GiB
        ("cpu", {}, 3, 3),  # after the weights, there is no quarter left
        ("cpu", {"max_total_tokens": 100}, 14, 14),
        ("cpu", {"mem_fraction_static": 0.9}, 14, 14),
        ("cuda", {}, 14, 14),
    ],
)
def test_the_pool_on_a_cpu_is_a_quarter_of_free_memory(caplog, device, given, profiled, size):
    """A user who sizes the pool is obeyed: flags that SGLang resolves leave what was given as it was."""
    caplog.set_level("WARNING", "sglang_lazy")
    args = ServerArgs(model_path="dummy", device=device, **given)
    configurator = SimpleNamespace(device=device, server_args=args)
    assert bounded_pool(lambda *_: profiled << 30, configurator, 20.0) == size << 30
    assert ("the KV pool is 5.0 GiB, 25% of" in caplog.text) == (size != profiled)


def test_what_the_plugin_adds_to_the_flags():
    """Whoever makes the flags, and whatever is given; they are resolved once."""
    plugin.install()
    for given, warmups, cache in (
        ({}, "sglang_lazy", "lazy"),
        ({"warmups": "a", "radix_cache_backend": "b"}, "a,sglang_lazy", "b"),
    ):
        args = ServerArgs(model_path="dummy", device="cpu", **given)
        for _ in range(2):
            args.resolve_once()
            flags = flags_of(args)
            assert (flags.warmups, flags.radix_cache_backend, flags.sampling_backend) == (warmups, cache, "pytorch")


def test_all_reasons_are_reported_together(monkeypatch):
    monkeypatch.setattr(flag_checks, "unfit_flags", lambda args: ["a flag"])
    monkeypatch.setattr(flag_checks, "unfit_states", lambda args, config: [])
    monkeypatch.setattr(flag_checks, "unfit_draft", lambda args, config: [])
    monkeypatch.setattr(flag_checks, "unfit_together", lambda args, config: [])
    monkeypatch.setattr(flag_checks, "model_config_of", lambda args: None)
    monkeypatch.setattr(flag_checks, "unfit_config", lambda config, untested: ["a model"])
    monkeypatch.setattr(flag_checks, "known_traits", lambda config: ServerTraits(recurrent=True))
    args = SimpleNamespace(
        device="cpu",
        grammar_backend="llguidance",
        radix_cache_backend="lazy",
        resolve_once=lambda: None,
        check_server_args=lambda: None,
        speculative_algorithm=None,
        hicache_storage_backend=None,
    )
    with pytest.raises(Unfit, match="a flag\n.*a model\n.*--lazy-kernels cuda: the kernels need a Hopper GPU"):
        flag_checks.check_start(LazyConfig(kernels="cuda"), args)
    with pytest.raises(Unfit, match="a model\n.*--lazy-default-link query:ratio=0.1: .* has recurrent layers"):
        flag_checks.check_start(LazyConfig(default_link="query:ratio=0.1"), args)
    flag_checks.check_start(LazyConfig(kernels="cuda", fallback=True), args)
    monkeypatch.setattr(flag_checks, "unfit_flags", lambda args: [])
    with pytest.raises(Unfit, match="a model"):
        flag_checks.check_start(LazyConfig(), args)
    monkeypatch.setattr(flag_checks, "unfit_config", lambda config, untested: [])
    flag_checks.check_start(LazyConfig(), args)
    args.radix_cache_backend = None  # as they are if the plugin was not active when they were resolved
    with pytest.raises(ValueError, match="before sglang-lazy was active"):
        flag_checks.check_start(LazyConfig(fallback=True), args)


@pytest.fixture
def no_start(monkeypatch):
    """A model that no machine's kernels fit, stopped where it would be loaded."""
    args = SimpleNamespace(
        device="cpu",
        grammar_backend="llguidance",
        enable_metrics=False,
        radix_cache_backend="lazy",
        tokenizer_worker_num=1,
        skip_tokenizer_init=False,
        model_path="m",
        resolve_once=lambda: None,
        check_server_args=lambda: None,
        speculative_algorithm=None,
        hicache_storage_backend=None,
    )
    monkeypatch.setattr(flag_checks, "model_config_of", lambda args: SimpleNamespace(vocab_size=400))
    monkeypatch.setattr(selftest, "of_engine", lambda engine: None)
    monkeypatch.setattr(plugin, "activate", lambda config: None)
    monkeypatch.setattr("sglang.srt.plugins.load_plugins", lambda: None)
    monkeypatch.setattr("sglang_lazy.entrypoints.engine.load_plugins", lambda: None)
    monkeypatch.setattr("sglang.srt.server_args.prepare_server_args", lambda argv: args)
    monkeypatch.setattr(flag_checks, "unfit_flags", lambda args: [])
    monkeypatch.setattr(flag_checks, "unfit_states", lambda args, config: [])
    monkeypatch.setattr(flag_checks, "unfit_draft", lambda args, config: [])
    monkeypatch.setattr(flag_checks, "unfit_together", lambda args, config: [])
    monkeypatch.setattr(flag_checks, "unfit_config", lambda config, untested: [])
    monkeypatch.setattr(flag_checks, "known_traits", lambda config: ServerTraits())
    return args


def test_an_engine_and_a_server_are_refused_early(no_start):
    with pytest.raises(Unfit, match="--lazy-kernels cuda"):
        Engine(server_args=no_start, lazy_kernels="cuda")
    with pytest.raises(SystemExit, match="error: sglang-lazy cannot reuse chunks here:\n.*--lazy-kernels cuda"):
        launch_server.main(["--model-path", "m", "--lazy-kernels", "cuda"])
    no_start.tokenizer_worker_num = 2
    with pytest.raises(ValueError, match="tokenizer_worker_num must be 1"):
        Engine(server_args=no_start)
    with pytest.raises(ValueError, match="a Runtime has one tokenizer worker"):
        Runtime(model_path="m", tokenizer_worker_num=2)


TRAINED = '{"kvlink": {"link": [1, 2]}, "packet": {"before": [400]}}'


@pytest.mark.parametrize("fallback", [[], ["--lazy-fallback"]])
@pytest.mark.parametrize(
    "link, tokens, settings, reason",
    [
        ("packet", None, {}, "this model was not trained for it"),
        ("base+kvlink:tokens=2", None, {}, "this model was not trained for it"),
        ("packet", '{"kvlink": {"link": [1]}}', {}, "this model was not trained for it"),
        ("packet", TRAINED, {}, "before must be a list of token ids below 400"),
        ("packet", "{", {}, "lazy_tokens.json of the model"),
        ("kvlink", '{"kvlink": {"link": [1, 2]}}', {}, None),
        ("base", None, {"lazy_preamble": ""}, "it computes chunks after --lazy-preamble, which is empty"),
        ("base+query", None, {"skip_tokenizer_init": True}, "without a tokenizer"),
        ("base:preamble=lead", None, {"lazy_preamble": "", "skip_tokenizer_init": True}, None),
        ("query", None, {"lazy_preamble": "", "skip_tokenizer_init": True}, None),
    ],
)
def test_a_default_policy_that_could_serve_no_prompt(
    no_start, tmp_path, monkeypatch, link, tokens, settings, reason, fallback
):
    """The server does not start, with or without the fallback, which is for models and flags without chunk reuse."""
    no_start.model_path = str(tmp_path)
    no_start.skip_tokenizer_init = settings.get("skip_tokenizer_init", False)
    if tokens:
        (tmp_path / "lazy_tokens.json").write_text(tokens)
    preamble = {name: value for name, value in settings.items() if name == "lazy_preamble"}
    started = []
    monkeypatch.setattr("sglang.srt.entrypoints.engine.Engine.__init__", lambda *_args, **_kwargs: started.append(1))
    monkeypatch.setattr("sglang.launch_server.run_server", lambda args: started.append(2))
    monkeypatch.setattr("sglang.srt.utils.kill_process_tree", lambda *_args, **_kwargs: None)
    monkeypatch.setattr("sglang_lazy.entrypoints.runtime.load_plugins", lambda: None)
    monkeypatch.setattr("sglang_lazy.entrypoints.runtime.ServerArgs", lambda *_args, **_kwargs: no_start)
    monkeypatch.setattr(
        "sglang.lang.backend.runtime_endpoint.Runtime.__init__", lambda *_args, **_kwargs: started.append(3)
    )
    monkeypatch.setattr("sglang.lang.backend.runtime_endpoint.Runtime.__del__", lambda _self: None)
    flags = ["--lazy-default-link", link, *fallback, *(["--lazy-preamble", ""] if preamble else [])]
    keywords = {"lazy_default_link": link, "lazy_fallback": bool(fallback), **preamble}
    starts = (
        lambda: Engine(server_args=no_start, **keywords),
        lambda: launch_server.main(["--model-path", "m", *flags]),
        lambda: Runtime(model_path="m", **keywords),
    )
    for start_it in starts:
        if reason is None:
            start_it()
        else:
            with pytest.raises((ValueError, SystemExit), match=rf"--lazy-default-link {re.escape(link)}: .*{reason}"):
                start_it()
    assert started == ([1, 2, 3] if reason is None else [])


def test_a_preamble_that_leaves_no_room_for_chunks():
    for length in (0, 8, 9):
        with pytest.raises(ValueError, match=f"--lazy-default-link base.*: --lazy-preamble has {length} tokens"):
            check_default_preamble("base+epic", array("q", range(length)), context_len=8)
        check_default_preamble("epic", array("q", range(length)), context_len=8)
    check_default_preamble("base", array("q", range(7)), context_len=8)


@pytest.mark.parametrize("fallback", [[], ["--lazy-fallback"]])
def test_a_grammar_backend_that_ends_servers_on_cpus_is_refused(no_start, fallback):
    no_start.grammar_backend = "xgrammar"
    with pytest.raises(ValueError, match="--grammar-backend xgrammar .*llguidance"):
        Engine(server_args=no_start, lazy_fallback=bool(fallback))
    with pytest.raises(SystemExit, match="error: --grammar-backend xgrammar .*llguidance"):
        launch_server.main(["--model-path", "m", *fallback])


def test_workers_without_our_hooks_are_refused(monkeypatch):
    """Their parent was started by another command, so they would import that command and not ours."""
    router = MultiTokenizerRouter.__new__(MultiTokenizerRouter)
    for main in (types.ModuleType("__main__"), sys):
        monkeypatch.setitem(sys.modules, "__main__", main)
        with pytest.raises(RuntimeError, match="python -m sglang_lazy.launch_server"):
            frontend.share(router)
    assert frontend._ADDRESS not in os.environ


# The configuration


def test_keywords():
    kwargs = {"model_path": "m", "lazy_max_chunks": 3, "lazy_default_link": "copy"}
    assert pop_keywords(kwargs) == LazyConfig(max_chunks=3, default_link="copy") and kwargs == {"model_path": "m"}
    with pytest.raises(TypeError, match="unexpected keyword 'lazy_link', expected one of lazy_default_link"):
        pop_keywords({"lazy_link": "copy"})


BAD = [
    *({"kernels": value} for value in ("flashinfer", None)),
    *({"max_chunks": value} for value in (0, -1, 10**9, 8.0, "8", True)),
    *({name: value} for name in ("max_pinned", "shadow_rate") for value in (2, -0.1, float("nan"), "0.5", True)),
    *({"chunk_pool": value} for value in (0, 1, 1.0, float("inf"))),
    *({"state_share": value} for value in (-0.1, 1, 1.0, float("inf"))),
    *({name: value} for name in ("preamble", "chunk_separator", "chunk_roles") for value in (None, 3, "\udc80")),
    *({"fallback": value} for value in (1, "yes")),
]


@pytest.mark.parametrize("bad", BAD)
def test_bad_values(bad):
    (name,) = bad
    with pytest.raises(ValueError, match=f"{name} must be"):
        LazyConfig(**bad)
    with pytest.raises(ValueError, match=f"^lazy_{name} must be"):
        pop_keywords({f"lazy_{name}": bad[name]})


def test_an_unknown_policy_is_refused(no_start):
    for make in (Engine, Runtime):
        with pytest.raises(ValueError, match="link must be one of 'block', 'full', 'epic'.* got 'half'"):
            make(model_path="m", lazy_default_link="half")
        with pytest.raises(ValueError, match="ratio must be above 0"):
            make(model_path="m", lazy_default_link="query:ratio=0")


BAD_FLAGS = [
    (["--lazy-kernels", "flashinfer"], "argument --lazy-kernels: invalid choice: 'flashinfer'"),
    (["--lazy-max-chunks", "0"], "argument --lazy-max-chunks: must be at least 1 and at most 65536, got 0"),
    (["--lazy-max-chunks=many"], "argument --lazy-max-chunks: must be of type int, got 'many'"),
    (["--lazy-max-chunks"], "argument --lazy-max-chunks: expected one argument"),
    (["--lazy-max-pinned", "1.5"], "argument --lazy-max-pinned: must be between 0 and 1, got 1.5"),
    (["--lazy-host-share", "0"], "argument --lazy-host-share: must be above 0 and at most 1, got 0.0"),
    (["--lazy-storage-writers", "0"], "argument --lazy-storage-writers: must be at least 1 and at most 64, got 0"),
    (["--lazy-chunk-pool", "1"], "argument --lazy-chunk-pool: must be above 0 and below 1, got 1.0"),
    (["--lazy-state-share", "1"], "argument --lazy-state-share: must be at least 0 and below 1, got 1.0"),
    (["--lazy-shadow-rate", "nan"], "argument --lazy-shadow-rate: must be between 0 and 1, got nan"),
    (["--lazy-shadow-min-agreement", "2"], "argument --lazy-shadow-min-agreement: must be between 0 and 1, got 2.0"),
    (["--lazy-shadow-min-agreement", "0.5"], "--lazy-shadow-min-agreement watches what shadow mode compares"),
    (["--lazy-chunk-separator", "\udcff"], "argument --lazy-chunk-separator: must be text in UTF-8"),
    (["--lazy-chunk-roles", "\udcff"], "argument --lazy-chunk-roles: must be text in UTF-8"),
    (["--lazy-keys", "\udcff"], "argument --lazy-keys: must be text in UTF-8"),
    (["--lazy-preamble", "\udcff"], "argument --lazy-preamble: must be text in UTF-8"),
    (["--lazy-default-link", "half"], "--lazy-default-link: link must be one of 'block'"),
    (["--lazy-default-link", "epic:tokens=0"], "--lazy-default-link: link 'epic:tokens=0': tokens must be at least 1"),
    (["--lazy-fallback=yes"], "argument --lazy-fallback: ignored explicit argument 'yes'"),
    (["--lazy-max-chunk", "3"], "unknown flag --lazy-max-chunk: did you mean --lazy-max-chunks?"),
    (["--lazy-speed=3"], "unknown flag --lazy-speed=3"),
]


@pytest.mark.parametrize("argv, reason", BAD_FLAGS)
def test_bad_flags_are_named_as_typed(no_start, capsys, argv, reason):
    with pytest.raises(SystemExit) as ended:
        launch_server.main(["--model-path", "m", *argv])
    assert ended.value.code == 2 and f"error: {reason}" in capsys.readouterr().err


def test_every_flag_has_a_bad_value_in_the_test_before():
    tried = {flag for argv, _ in BAD_FLAGS for flag in [argv[0].partition("=")[0]]}
    assert {f"--lazy-{field.name.replace('_', '-')}" for field in fields(LazyConfig)} - tried == {
        "--lazy-untested-model"
    }


def test_bad_flags_in_a_file(no_start, capsys, tmp_path):
    file = tmp_path / "flags.yaml"
    file.write_text("lazy-max-chunks: 0\n")
    with pytest.raises(SystemExit) as ended:
        launch_server.main(["--model-path", "m", "--config", str(file)])
    assert ended.value.code == 2 and "argument --lazy-max-chunks: must be at least 1" in capsys.readouterr().err
    file.write_text("lazy-shadow-rate: 0.5\n")
    argv = ["--lazy-shadow-min-agreement", "0.5", "--config", str(file)]
    assert launch_server.parse_args(argv)[0] == LazyConfig(shadow_rate=0.5, shadow_min_agreement=0.5)


def test_a_policy_that_a_plugin_may_add_is_looked_up_later(no_start, capsys, monkeypatch):
    monkeypatch.setattr(policies, "others_installed", lambda: True)
    assert launch_server.parse_args(["--lazy-default-link", "half"])[0].default_link == "half"
    with pytest.raises(SystemExit) as ended:
        launch_server.main(["--model-path", "m", "--lazy-default-link", "half"])
    assert ended.value.code == 2 and "--lazy-default-link: link must be one of" in capsys.readouterr().err


def test_our_own_plugin_is_no_other(monkeypatch):
    assert not policies.others_installed(), "here are only ours and those that SGLang requires"
    entries = [SimpleNamespace(module="sglang_lazy.port.plugin")]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: entries)
    assert not policies.others_installed()
    entries.append(SimpleNamespace(module="policies_of_mine"))
    assert policies.others_installed()


def test_flags():
    config, rest = launch_server.parse_args(
        ["--lazy-kernels", "triton", "--tp", "2", "--lazy-default-link", "copy", "--lazy-fallback"]
    )
    assert config == LazyConfig(kernels="triton", default_link="copy", fallback=True) and rest == ["--tp", "2"]


def test_the_configuration_reaches_other_processes(monkeypatch):
    monkeypatch.delenv("SGLANG_LAZY", raising=False)
    assert LazyConfig.from_env() is None
    config = LazyConfig(kernels="torch", shadow_rate=0.5)
    monkeypatch.setenv("SGLANG_LAZY", "")
    config.to_env()
    assert LazyConfig.from_env() == config
