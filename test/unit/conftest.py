"""Unit tests of what stands between SGLang's classes."""

import pytest

from fakes.context import published
from fakes.streams import late_transfers


@pytest.fixture
def sglang_context():
    """SGLang's global configuration, with its default flags; transfers are as late as a GPU allows."""
    with published(), late_transfers():
        yield
