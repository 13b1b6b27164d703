"""One server for all tests of this folder, and the engine that some compare it with."""

import pytest

from fakes import no_gpu_to_wait_for
from sglang_lazy.testing import device_flags, device_options, running_server
from support.engine import EngineProcess


@pytest.fixture(scope="package")
def server_flags(tiny_model) -> list[str]:
    flags = [
        "--model-path",
        tiny_model,
        "--served-model-name",
        "default",
        "--max-total-tokens",
        "8000",
        "--chunked-prefill-size",
        "512",
        *device_flags(),
    ]
    flags += ["--enable-cache-report", "--enable-response-store", "--decode-log-interval", "1", "--random-seed", "1"]
    # The default on a CPU; a random model might write blanks for ever.
    flags += ["--grammar-backend", "llguidance", "--constrained-json-disable-any-whitespace"]
    return [*flags, "--sleep-on-idle"]  # leaves the cores of a small machine to other servers


@pytest.fixture(scope="package")
def server_log(tmp_path_factory):
    return tmp_path_factory.mktemp("server") / "server.log"


@pytest.fixture(scope="package")
def server(server_flags, server_log, with_plugin):
    """URL of a server with chunk reuse, started as users start it."""
    with with_plugin(no_gpu_to_wait_for.load), running_server(server_flags, server_log, as_command=True) as url:
        yield url


@pytest.fixture(scope="package")
def engine(tiny_model):
    """Its processes install the plugin themselves, as a user's do."""
    options = dict(model_path=tiny_model, max_total_tokens=8192, lazy_max_chunks=4, **device_options())
    engine = EngineProcess(installed=False, **options)
    yield engine
    engine.shutdown()
