"""The distribution of policies: an ordinary plugin, which uses what any other may."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import sglang_lazy_policies
from sglang_lazy import policies
from sglang_lazy.policies import POLICIES, get_policy, register
from sglang_lazy.policies.block import Block

FOLDER = Path(sglang_lazy_policies.__file__).parent
PUBLIC = ("sglang_lazy.core.", "sglang_lazy.policies")


def test_its_entry_point_registers_what_is_told_to_be_in_it():
    project = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text())["project"]
    (entry,) = project["entry-points"]["sglang.srt.plugins"].values()
    assert entry == "sglang_lazy_policies:load"
    sglang_lazy_policies.load()
    sglang_lazy_policies.load()
    named = {name for name, policy in POLICIES.items() if policy.__module__.startswith("sglang_lazy_policies.")}
    assert named == set(policies.PACKAGED)


def test_a_name_is_taken_once():
    class Other(Block):
        name = "block"

    assert register(POLICIES["block"]) is POLICIES["block"]
    with pytest.raises(ValueError, match="'block' is registered already"):
        register(Other)


def test_it_imports_only_the_contract_of_policies():
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in getattr(node, "names", ())] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert not [
                name for name in names if name.startswith("sglang") and not name.startswith((*PUBLIC, FOLDER.name))
            ]


@pytest.mark.parametrize("link", ["copy", "base+blend:ratio=0.4", "kvlink:tokens=3"])
def test_without_it_its_policies_are_refused_by_the_packages_name(link, monkeypatch):
    for name in policies.PACKAGED:
        monkeypatch.delitem(POLICIES, name, raising=False)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: [])
    policies._parse.cache_clear()  # of the links that were parsed before
    with pytest.raises(ValueError, match="needs the package sglang-lazy-policies"):
        get_policy(link)


def test_a_client_finds_it_without_loading_plugins():
    program = "from sglang_lazy.policies import get_policy; print(get_policy('kvlink:tokens=3'))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "kvlink:tokens=3\n"
