"""Answers over chunks from host memory against the oracle: the device never holds what the next prompt needs.

Transfers are as late as a GPU allows, and KV in transfer is NaN, on the device and on the host.
"""

import gc

import pytest
from test_oracle_matrix import Served, chunk_tokens_reused, hits

from fakes import streams
from oracle.scenarios import SCENARIOS, Dice

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("waiting")]
POOL = 1024
NAMES = list(SCENARIOS)


@pytest.fixture(scope="module", params=["llama", "gpt-oss"])
def served(request, model_dir, with_plugin):
    with with_plugin(streams.load):
        tiers = {"enable_hierarchical_cache": True, "hicache_ratio": 32.0}  # room for all that the device evicts
        served = Served(request.param, model_dir, max_total_tokens=POOL, **tiers)
    yield served
    served.engine.shutdown()
    gc.collect()


def displace(served, number):
    """Have the device evict everything. A single prompt of the pool's size would take four times the attention."""
    dice = Dice(f"push out {number}")
    served.answer(*([dice.text((POOL - 36) // 4)] for _ in range(4)))


def test_every_request_loads(served):
    """Each scenario twice: the second time all its chunks come from the host, those of later steps possibly too."""
    for name in NAMES:
        served.play([name])
    for number, name in enumerate(NAMES):
        displace(served, number)
        (prompt, output), *_ = (answer for wave in served.play([name]) for answer in wave)
        if any(segment.kind == "chunk" for segment in prompt):
            details = output["meta_info"]["cached_tokens_details"]
            assert all(hits(output)) and details["host"] >= chunk_tokens_reused(output) > 0
            assert details["device"] + details["host"] == output["meta_info"]["cached_tokens"]


def test_loads_within_batches(served):
    """All scenarios side by side, in turns that load what the previous turn displaced."""
    loaded = 0
    for _ in range(2):
        for names in (NAMES[::3], NAMES[1::3], NAMES[2::3]):
            for wave in served.play(names):
                loaded += sum((out["meta_info"].get("cached_tokens_details") or {}).get("host", 0) for _, out in wave)
    assert loaded > POOL


def test_flushing_empties_both_tiers(served):
    name = "retrieval"
    served.play([name])
    served.flush()
    (_, output), *_ = (answer for wave in served.play([name]) for answer in wave)
    assert output["meta_info"]["cached_tokens"] == 0
