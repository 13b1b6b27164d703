"""The command `sglang-lazy`: what it becomes, and what its doctor says of machines, flags and models."""

import importlib
import importlib.util
import json
import sys
import tempfile

import pytest

from sglang_lazy import __main__ as command
from support.forks import start


@pytest.mark.parametrize("name", command.COMMANDS)
def test_a_command_becomes_its_module(monkeypatch, name):
    became = []
    monkeypatch.setattr(command.os, "execv", lambda path, argv: became.append((path, argv)))
    command.main([name, "--flag", "value"])
    ((path, argv),) = became
    assert path == argv[0] == sys.executable and argv[1] == "-m" and argv[3:] == ["--flag", "value"]
    assert importlib.util.find_spec(argv[2]) is not None


@pytest.mark.parametrize("argv, status", [([], 2), (["srve"], 2), (["--help"], None)])
def test_what_is_no_command_lists_the_commands(capsys, argv, status):
    try:
        command.main(argv)
    except SystemExit as ended:
        assert ended.code == status
    else:
        assert status is None
    shown = capsys.readouterr()
    assert all(name in shown.out + shown.err for name in command.COMMANDS)
    assert ("there is no command 'srve'" in shown.err) == (argv == ["srve"])


@pytest.mark.parametrize("name", command.COMMANDS)
def test_help_fits_on_one_screen(monkeypatch, capsys, name):
    """Of 40 lines and 100 columns, whatever the terminal's."""
    spec = importlib.util.find_spec(f"sglang_lazy.{command.COMMANDS[name][0]}")
    module = importlib.import_module(f"{spec.name}.__main__" if spec.submodule_search_locations else spec.name)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    shown = capsys.readouterr().out
    assert ended.value.code == 0 and shown.startswith(f"usage: python -m {spec.name} ")
    lines = shown.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 100, shown


def doctor(*argv):
    """Run it. Returns its exit status and what it says."""
    with tempfile.TemporaryFile("w+") as said:
        process = start("sglang_lazy.doctor", argv, environment={}, source=None, output=said)
        status = process.wait()
        said.seek(0)
        return status, said.read()


@pytest.fixture(scope="module")
def without_weights(tiny_model, tmp_path_factory):
    """`without_weights(**changes)`: a folder with the tiny model's configuration, changed, and nothing to load."""

    def folder(**changes):
        made = tmp_path_factory.mktemp("model")
        with open(f"{tiny_model}/config.json") as file:
            (made / "config.json").write_text(json.dumps({**json.load(file), **changes}))
        return str(made)

    return folder


def test_a_model_is_judged_without_its_weights(without_weights):
    status, said = doctor("--device", "cpu", "--model-path", without_weights())
    assert status == 0 and "\nfit: " in said, said


COMB = {
    "architectures": ["CombLlamaForConditionalGeneration"],
    "model_type": "combllama",
    "cross_attention_layers": [0],
}
STORAGE = [
    *("--enable-hierarchical-cache", "--hicache-storage-backend", "file"),
    "--hicache-storage-backend-extra-config",
]
DRAFTING = ["--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"]
"""With these drafts are a chain, as linked rows want it."""


@pytest.mark.parametrize(
    "changes, flags, reason",
    [
        ({"architectures": ["XverseForCausalLM"]}, [], "architecture XverseForCausalLM"),
        ({}, ["--page-size", "16"], "page size 16"),
        ({}, ["--lazy-default-link", "kvlink"], "this model was not trained for it"),
        ({}, ["--lazy-shadow-rate", "0.1"], "add --enable-metrics"),
        ({}, ["--enable-mis"], "Multi-item scoring requires flashinfer"),  # SGLang asserts it
        ({}, ["--speculative-algorithm", "EAGLE3", *DRAFTING], "SGLang has its kernels for GPUs alone"),
        ({}, ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "8"], "kernels for GPUs alone"),
        (COMB, ["--enable-torch-compile"], "without the cross layers before them"),
        ({}, [*STORAGE, '{"prefetch_timeout_max": "5 s"}'], "prefetch_timeout_max must be a number, got '5 s'"),
        ({}, ["--enable-lora"], "you need to specify both --max-lora-rank and --lora-target-modules"),
        ({}, ["--retraction-policy", "priority"], "requires --enable-priority-scheduling"),
    ],
)
def test_what_a_server_would_refuse_is_named(without_weights, changes, flags, reason):
    status, said = doctor("--device", "cpu", "--model-path", without_weights(**changes), *flags)
    assert status == 1 and "\nrefused: " in said and reason in said.partition("\nrefused: ")[2], said
    assert "Traceback" not in said and "UserWarning" not in said, said


@pytest.mark.parametrize("has_model", [True, False], ids=["with a model", "without"])
def test_a_flag_of_sglangs_that_is_wrong_takes_a_line(without_weights, has_model):
    model = ["--model-path", without_weights()] if has_model else []
    status, said = doctor("--device", "cpu", *model, "--tp-sizzle", "2")
    assert status == 2 and "sglang_lazy.doctor: error: unrecognized arguments: --tp-sizzle 2\n" in said, said
    assert "--help-all" in said and "--schedule-policy" not in said


def test_without_a_model_the_doctor_judges_the_machine():
    status, said = doctor("--device", "cpu", "--page-size", "16")
    assert status == 0 and "No model was named" in said and "refused" not in said, said


def test_a_flag_that_is_wrong_ends_the_doctor():
    status, said = doctor("--lazy-max-chunks", "0")
    assert status == 2 and "--lazy-max-chunks: must be at least 1" in said, said
