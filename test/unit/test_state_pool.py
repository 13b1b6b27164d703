"""The pool of states of recurrent layers: shapes, sizes, and who has which slot."""

import pytest
import torch

from sglang_lazy.recurrent.pool import StateLayout, StateMemory, StatePool, usual_share

CONVS = StateLayout(3, ((6, 2),), torch.bfloat16)
NUMBERS = StateLayout(2, ((6, 3),), torch.float32, ssm=(4, 8, 16), transition="number")
MATRICES = StateLayout(2, ((6, 3), (5, 3)), torch.bfloat16, ssm=(4, 8, 16), transition="matrix")


def tensors(pool: StatePool) -> list[torch.Tensor]:
    return [*pool.conv, *(x for x in (pool.h, pool.p) if x is not None)]


@pytest.mark.parametrize("layout", [CONVS, NUMBERS, MATRICES])
def test_a_slot_is_as_large_as_its_parts(layout):
    pool = StatePool(layout, 5, "cpu")
    assert layout.slot_bytes * 6 == sum(x.numel() * x.element_size() for x in tensors(pool))


def test_shapes():
    convs, numbers, matrices = (StatePool(layout, 5, "cpu") for layout in (CONVS, NUMBERS, MATRICES))
    assert [x.shape for x in tensors(convs)] == [(3, 6, 6, 2)]
    assert [x.shape for x in tensors(numbers)] == [(2, 6, 6, 3), (2, 6, 4, 8, 16), (2, 6, 4)]
    assert [x.shape for x in tensors(matrices)] == [(2, 6, 6, 3), (2, 6, 5, 3), (2, 6, 4, 8, 16), (2, 6, 4, 16, 16)]
    assert (convs.h, convs.p, convs.wide, numbers.wide) == (None,) * 4


def test_a_matrix_and_its_state_are_one_wider_state():
    pool = StatePool(MATRICES, 5, "cpu")
    pool.wide[:] = torch.randn_like(pool.wide)
    assert torch.equal(pool.h, pool.wide[..., :8, :])
    assert torch.equal(pool.p, pool.wide[..., 8:, :])


def test_each_slot_is_handed_out_once_and_slot_0_never():
    pool = StatePool(CONVS, 5, "cpu")
    slots = pool.alloc(3) + pool.alloc(2)
    assert sorted(slots) == [1, 2, 3, 4, 5]
    assert pool.alloc(1) is None
    assert pool.alloc(0) == []
    pool.free(slots[1:3])
    assert pool.available_size() == 2
    assert sorted(pool.alloc(2)) == sorted(slots[1:3])


def test_a_slot_is_freed_once():
    pool = StatePool(CONVS, 5, "cpu")
    [slot] = pool.alloc(1)
    pool.free([slot])
    for unused in (slot, 0, 6):
        with pytest.raises(KeyError):
            pool.free([unused])
    pool.alloc(2)
    pool.clear()
    assert pool.available_size() == 5


def test_a_layout_has_a_state_and_its_transition_or_neither():
    with pytest.raises(ValueError, match="both"):
        StateLayout(1, ((6, 2),), torch.float32, ssm=(4, 8, 16))


def test_kv_and_states_last_equally_long():
    """For chunks of 2,048 tokens, if states are neither small nor large beside KV; else they get a tenth, or half."""
    token_bytes = MATRICES.slot_bytes // 1000
    share = usual_share(MATRICES, token_bytes)
    num_states = StateMemory.within(share * 1e9, MATRICES).num_states
    assert 0.1 < share < 0.5 and num_states == pytest.approx((1 - share) * 1e9 / (2048 * token_bytes), rel=1e-3)
    assert usual_share(MATRICES, MATRICES.slot_bytes) == 0.1
    assert usual_share(MATRICES, MATRICES.slot_bytes // 5000) == 0.5
