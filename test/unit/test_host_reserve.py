"""What SGLang sets aside of the host's memory is explained where it is refused."""

from types import SimpleNamespace

import pytest
from sglang.srt.mem_cache.pool_host.base import HostKVCache

from sglang_lazy.port.cache.create import reserve_explained


def test_a_host_tier_without_room_says_what_is_set_aside_and_what_to_change():
    """SGLang's own refusal, of a pool that no machine has."""
    pool = SimpleNamespace(size=1 << 20, size_per_token=1 << 40, device_capacity_tokens=1, pool_label="KV")
    said = "Requesting .* leaves 10 GiB to other uses.*--lazy-host-share 1"
    with pytest.raises(ValueError, match=said), reserve_explained():
        HostKVCache._allocate_host_buffer(pool)


def test_other_errors_pass_as_they_are():
    error = ValueError("something else")
    with pytest.raises(ValueError) as raised, reserve_explained():
        raise error
    assert raised.value is error
