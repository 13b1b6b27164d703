"""Real servers and engines on small random models."""

import contextlib
import gc
import os
import shutil
from pathlib import Path

import pytest
import torch

from sglang_lazy.testing import log_tail
from support import plugins

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks, also if the command line names this folder
def pytest_collection_modifyitems(items):
    """Tests that share servers go to one worker: those of a file, or of a folder.

    So do those of the group "waiting", which wait much of the time or need much free memory: the other worker keeps the
    cores busy meanwhile.
    """
    for item in items:
        if item.path.is_relative_to(HERE) and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(item.path.relative_to(HERE).parts[0]))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """A failing test shows the last lines of its servers' logs, since their folder is deleted with the run."""
    report = yield
    if report.failed and "tmp_path" in item.funcargs:
        for log in sorted(item.funcargs["tmp_path"].glob("*.log")):
            report.sections.append((f"end of {log.name}", log_tail(log)))
    return report


@pytest.fixture(scope="session")
def with_plugin(tmp_path_factory):
    """`with with_plugin(function)`: processes started within find the function as an installed plugin."""

    @contextlib.contextmanager
    def with_plugin(load):
        folder = tmp_path_factory.mktemp("plugin")
        plugins.describe(f"{load.__module__}:{load.__name__}", folder)
        path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("PYTHONPATH", path)
            environment.syspath_prepend(folder)  # spawned processes inherit sys.path
            yield

    return with_plugin


@pytest.fixture(scope="session")
def stock_path(tmp_path_factory) -> str:
    """A folder for PYTHONPATH of servers without the plugin: off CUDA, stock SGLang imports a vLLM kernel that it never
    calls."""
    package = tmp_path_factory.mktemp("stand-in") / "vllm"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "_custom_ops.py").write_text("rotary_embedding = None\n")
    return str(package.parent)


@pytest.fixture
def freed_gpu():
    """Frees the GPU for the next engine after the test: hooks and their models form reference cycles."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")  # not for the session: while Playwright runs, asyncio.run fails in its thread
def browser():
    """A headless Chromium: the one that LAZY_BROWSER names, as in CI, or an installed one."""
    from playwright.sync_api import expect, sync_playwright

    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    path = os.environ.get("LAZY_BROWSER") or next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("there is no Chromium: `.ci/browser` installs Debian's, LAZY_BROWSER names another")
    with sync_playwright() as playwright:
        expect.set_options(timeout=30_000)  # for busy machines; the page polls once a second
        browser = playwright.chromium.launch(executable_path=path)
        yield browser
        browser.close()
