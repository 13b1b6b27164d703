"""docs/models.md lists the tests of each architecture, and no others; and all flags with which chunks are refused."""

import argparse
import inspect
import re
from pathlib import Path

import pytest
from sglang.srt.server_args import ServerArgs

from oracle.models import MODELS
from oracle.models.hybrids import HYBRIDS
from oracle.quantised import FORMATS, WITH_EXPERTS
from oracle.vision import VISION_MODELS
from sglang_lazy.core.supported import TESTED
from sglang_lazy.port.model import compat, recurrent

COMB = "CombLlamaForConditionalGeneration"
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
ROWS = {
    architecture: [cell.strip() for cell in cells.split("|")[1:-1]]
    for architecture, cells in re.findall(r"^\| `(\w+)` \|[^|]*(\|.*\|)$", PAGE, re.MULTILINE)
}


def architecture_of(name):
    if name in VISION_MODELS:
        return VISION_MODELS[name].config.replace("Config", "ForConditionalGeneration")
    spec = (MODELS | HYBRIDS)[name]
    kind = "ForConditionalGeneration" if "vision_config" in spec.settings else "ForCausalLM"
    return spec.architecture or spec.config_class.replace("TextConfig", "Config").replace("Config", kind)


OWN = {COMB, *map(architecture_of, HYBRIDS)} & TESTED
"""Those that have tests of their own."""


def test_each_architecture_has_a_row():
    assert set(ROWS) == TESTED


def test_oracle_column():
    expected = dict.fromkeys(TESTED, "")
    for name, spec in MODELS.items():
        if spec.needs is None and expected[architecture_of(name)] != "all":
            expected[architecture_of(name)] = "all" if spec.core else "once"
    expected |= {architecture_of(name): "images" for name in VISION_MODELS} | dict.fromkeys(OWN, "own")
    assert {architecture: cells[0] for architecture, cells in ROWS.items()} == expected


def test_gpu_column():
    source = (ROOT / "test" / "e2e" / "test_gpu.py").read_text(encoding="utf-8")
    lists = [re.search(rf"{name}\s*=\s*\[(.*?)\]", source, re.DOTALL)[1] for name in ("params", "OTHERS")]
    served = re.findall(r'"([^"]+)"', "".join(lists))
    source = (ROOT / "test" / "e2e" / "test_gpu_hybrids.py").read_text(encoding="utf-8")
    wider = re.findall(
        r'^    "([^"]+)":', re.search(r"^WIDER = \{.*?^\}", source, re.DOTALL | re.MULTILINE)[0], re.MULTILINE
    )
    served += [*filter(HYBRIDS.__contains__, wider), *re.findall(r'"([^"]+ on two GPUs)"', source)]
    on_several = {architecture_of(one.split()[0]) for one in served if "GPUs" in one}
    assert {architecture for architecture, cells in ROWS.items() if cells[1] and architecture != COMB} == {
        architecture_of(one.split()[0]) for one in served
    }
    assert {architecture for architecture, cells in ROWS.items() if cells[4]} == on_several | {COMB}


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in WITH_EXPERTS])
def test_formats_are_listed(name):
    table = re.search(r"^\| format \|.*?\n\n", PAGE, re.MULTILINE | re.DOTALL)[0]
    method, _, kind = name.partition(" ")
    assert method in table and kind.removesuffix("tensor") in table


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_formats_of_experts_are_listed(name):
    assert f"`{name}`" in PAGE


def test_every_refused_flag_is_listed():
    """All that the checks read of flags and the environment is on the page, as a user spells it."""
    source = "".join(
        map(inspect.getsource, (compat.unfit_flags, compat._unfit_tiers, compat.unfit_together, recurrent.unfit_states))
    )
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    options = {action.dest: action.option_strings for action in parser._actions}
    listed = set(re.findall(r"--[a-z0-9-]+|SGLANG_\w+", PAGE.partition("## Not supported")[2]))
    flags = set(re.findall(r"\bflags\.(\w+)", source))
    assert len(flags) > 30
    assert [flag for flag in sorted(flags) if not listed.intersection(options[flag])] == []
    assert set(re.findall(r"\benvs\.(\w+)", source)) <= listed
