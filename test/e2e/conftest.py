"""Real servers and engines on small random models."""

import os
from pathlib import Path

import pytest
import torch

# Servers inherit this: on a small machine, more threads than cores slow tiny models down.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory) -> Path:
    """Where tiny models are built, once for all tests; kept between runs if LAZY_MODEL_CACHE names a folder."""
    return Path(os.environ.get("LAZY_MODEL_CACHE") or tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def tiny_model(model_dir) -> str:
    """Path of a random-weight Llama."""
    from oracle.models import build

    return build("llama", model_dir)
