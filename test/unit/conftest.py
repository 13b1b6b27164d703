"""Unit tests of what stands between SGLang's classes."""

import pytest

from fakes.context import published
from fakes.server import new_frontend


@pytest.fixture
def sglang_context():
    """SGLang's global configuration, with its default flags."""
    with published():
        yield


@pytest.fixture
def http_process(monkeypatch):
    """The state of this process, as if it were an HTTP server's."""
    from sglang_lazy.port.serving import frontend  # imports SGLang's HTTP server

    made = new_frontend()
    monkeypatch.setattr(frontend, "current", lambda: made)
    return made
