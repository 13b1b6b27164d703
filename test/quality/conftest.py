"""A tiny model for tests that need one."""

import os

import pytest
import torch

# Servers inherit this: on a small machine, more threads than cores slow tiny models down.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> str:
    """Path of a random-weight Llama with a BOS; kept between runs if LAZY_MODEL_CACHE names a folder."""
    from oracle.models import build

    return build("llama", os.environ.get("LAZY_MODEL_CACHE") or tmp_path_factory.mktemp("models"))
