"""The examples import what there is. Tests of the surfaces run what they show."""

import importlib
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_an_example_can_be_imported(name, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    importlib.import_module(name)
