"""For all tests: kernels run natively on a GPU and under Triton's interpreter without one; models are tiny."""

import gc
import itertools
import os
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from sglang_lazy.testing import processes
from support import forks, plugins

# Triton reads this when a kernel is defined, so it must be set before the first import of one.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Tensors are tiny, here and in the servers that inherit this, so threads would only slow things down.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)
processes.starter = forks.start
# Processes find this checkout's policies as an installed plugin, whichever checkout the environment has them from.
_plugin = tempfile.TemporaryDirectory()
plugins.describe("sglang_lazy_policies:load", Path(_plugin.name))
sys.path.insert(0, _plugin.name)
_path = [_plugin.name, str(Path(__file__).parent / "sglang-lazy-policies"), os.environ.get("PYTHONPATH")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, _path))
# Imports make a million objects, which stay: visiting them again and again would take a quarter of the time.
gc.disable()


@pytest.hookimpl(trylast=True)  # groups are marked before
def pytest_collection_modifyitems(items):
    """Spread modules without servers evenly among the groups with servers, which often wait and leave cores idle."""
    groups: dict[bool, dict[object, list]] = {False: {}, True: {}}
    for item in items:
        group = item.get_closest_marker("xdist_group")
        groups[group is not None].setdefault(group.args[0] if group else item.path, []).append(item)
    placed = [(place / len(some), tests) for some in groups.values() for place, tests in enumerate(some.values())]
    items[:] = itertools.chain.from_iterable(tests for _, tests in sorted(placed, key=lambda each: each[0]))


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory) -> Path:
    """The folder of tiny models, which all tests share; it outlives the run if LAZY_MODEL_CACHE names it."""
    return Path(os.environ.get("LAZY_MODEL_CACHE") or tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def tiny_model(model_dir) -> str:
    """Path of a random-weight Llama whose tokenizer adds BOS."""
    from oracle.models.build import build

    return build("llama", model_dir)
