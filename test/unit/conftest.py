"""Unit tests of what stands between SGLang's classes."""

import pytest

from fakes.context import published


@pytest.fixture
def sglang_context():
    """SGLang's global configuration, with its default flags."""
    with published():
        yield
