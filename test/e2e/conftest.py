"""Real servers and engines on small random models."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    """Tests that share servers go to one worker: those of a file, or of a folder here."""
    for item in items:
        if item.path.is_relative_to(HERE) and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(item.path.relative_to(HERE).parts[0]))
