"""Real servers and engines on small random models."""

import os
from pathlib import Path

import pytest
import torch

# Servers inherit this: on a small machine, more threads than cores slow tiny models down.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    """Tests that share servers go to one worker: those of a file, or of a folder here."""
    for item in items:
        if item.path.is_relative_to(HERE) and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(item.path.relative_to(HERE).parts[0]))


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory) -> Path:
    """Where tiny models are built, once for all tests; kept between runs if LAZY_MODEL_CACHE names a folder."""
    return Path(os.environ.get("LAZY_MODEL_CACHE") or tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def tiny_model(model_dir) -> str:
    """Path of a random-weight Llama."""
    from oracle.models import build

    return build("llama", model_dir)
