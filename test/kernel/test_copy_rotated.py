"""Copies of cached KV tokens with rotated keys, against the formula in float64."""

import pytest
import torch
from cases import DTYPES
from ragged import DEVICE, NAN

from sgl_kernel_lazy import get_implementation, rope_cos_sin
from sgl_kernel_lazy.caches import Caches

MAX_POSITION = 3000
# num_kv_heads, head_dim, rotary_dim, is_neox
HEADS = [(2, 64, 64, True), (1, 128, 128, False), (3, 80, 20, True), (2, 96, 48, False)]

all_names = pytest.mark.parametrize("name", ["torch", "triton"])


def formula(k, offsets, inv_freq, is_neox):
    """R(offset) k in float64, pair by pair."""
    angles = torch.outer(offsets.double(), inv_freq).unsqueeze(1)
    rotated, half = k.double().clone(), len(inv_freq)
    first = slice(0, half) if is_neox else slice(0, 2 * half, 2)
    second = slice(half, 2 * half) if is_neox else slice(1, 2 * half, 2)
    x, y = k.double()[..., first], k.double()[..., second]
    rotated[..., first] = x * angles.cos() - y * angles.sin()
    rotated[..., second] = x * angles.sin() + y * angles.cos()
    return rotated


def make_caches(num_layers, num_slots, num_heads, head_dim, dtype, gen):
    """Keys and values of each layer, in slots [num_slots]."""
    shape = (num_slots, num_heads, head_dim)
    return [[torch.randn(shape, generator=gen).to(dtype).to(DEVICE) for _ in range(num_layers)] for _ in "kv"]


def copy(name, caches, source, target, offsets, table, is_neox=True):
    """Run the op on these tensors."""
    k_caches, v_caches = caches
    caches = Caches(k_caches=k_caches, v_caches=v_caches, cos_sin_cache=table, is_neox=is_neox)
    get_implementation(name).copy_rotated(caches, source, target, offsets)


@all_names
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_copies_are_rotated(name, dtype, heads):
    """Copied keys are the formula's, rounded once; values are bitwise equal; all other slots are untouched."""
    num_heads, head_dim, rotary_dim, is_neox = heads
    gen = torch.Generator().manual_seed(head_dim)
    num_slots, n = 160, 37
    k_caches, v_caches = make_caches(3, num_slots, num_heads, head_dim, dtype, gen)
    slots = torch.randperm(num_slots, generator=gen).to(DEVICE)
    source, target = slots[:n], slots[n : 2 * n]
    source = torch.cat([source[:-3], source[:3]])  # a chunk used twice
    offsets = torch.randint(0, MAX_POSITION, (n,), generator=gen, dtype=torch.int32).to(DEVICE)
    offsets[0], offsets[1] = 0, MAX_POSITION - 1
    for cache in (*k_caches, *v_caches):
        cache[target] = NAN
    before = [[cache.clone() for cache in caches] for caches in (k_caches, v_caches)]
    inv_freq = 10000.0 ** -(torch.arange(0, rotary_dim, 2).double() / rotary_dim)
    table = rope_cos_sin(inv_freq, MAX_POSITION).to(DEVICE)

    copy(name, (k_caches, v_caches), source, target, offsets, table, is_neox)

    others = torch.ones(num_slots, dtype=torch.bool, device=DEVICE)
    others[target] = False
    # One rounding of the result, after float32 arithmetic with a float32 table.
    bound = torch.finfo(dtype).eps / 2 + 4 * torch.finfo(torch.float32).eps
    for layer in range(3):
        k, v = k_caches[layer], v_caches[layer]
        expected = formula(before[0][layer][source].cpu(), offsets.cpu(), inv_freq, is_neox).to(DEVICE)
        norms = expected.norm(dim=-1, keepdim=True)
        assert ((k[target].double() - expected).abs() <= bound * norms).all()
        assert torch.equal(k[target][..., rotary_dim:], before[0][layer][source][..., rotary_dim:])
        assert torch.equal(v[target], before[1][layer][source])
        assert torch.equal(k[others], before[0][layer][others])
        assert torch.equal(v[others], before[1][layer][others])


@all_names
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_a_copy_onto_itself_rotates_in_place(name, heads):
    num_heads, head_dim, rotary_dim, is_neox = heads
    gen = torch.Generator().manual_seed(head_dim)
    apart = make_caches(2, 80, num_heads, head_dim, torch.float32, gen)
    in_place = [[cache.clone() for cache in caches] for caches in apart]
    slots = torch.randperm(80, generator=gen).to(DEVICE)
    source, target, offsets = slots[:40], slots[40:], torch.arange(40, device=DEVICE)
    inv_freq = 10000.0 ** -(torch.arange(0, rotary_dim, 2).double() / rotary_dim)
    table = rope_cos_sin(inv_freq, MAX_POSITION).to(DEVICE)
    copy(name, apart, source, target, offsets, table, is_neox)
    copy(name, in_place, source, source, offsets, table, is_neox)
    for caches, expected in zip(in_place, apart, strict=True):
        for cache, other in zip(caches, expected, strict=True):
            assert torch.equal(cache[source], other[target])


@all_names
def test_nothing_to_copy(name):
    gen = torch.Generator().manual_seed(0)
    k_caches, v_caches = make_caches(1, 4, 1, 64, torch.float32, gen)
    before = k_caches[0].clone()
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    table = torch.ones(8, 64, device=DEVICE)
    copy(name, (k_caches, v_caches), none, none, none, table)
    assert torch.equal(k_caches[0], before)


MISTAKES = {
    "k_caches": lambda t: [],
    r"k_caches\[1\]": lambda t: [t[0], t[1][:-1]],
    r"v_caches\[1\]": lambda t: [t[0], t[1].transpose(0, 1).contiguous().transpose(0, 1)],
    "source": lambda t: t.float(),
    "target": lambda t: t[:-1],
    "offsets": lambda t: t.double(),
    "cos_sin_cache": lambda t: t[:, :-1],
}


@all_names
@pytest.mark.parametrize("argument", MISTAKES)
def test_errors_name_the_argument(name, argument):
    """A wrong argument is refused by name before any launch."""
    gen = torch.Generator().manual_seed(0)
    k_caches, v_caches = make_caches(2, 8, 2, 64, torch.float32, gen)
    slots = torch.arange(3, device=DEVICE)
    arguments = dict(
        k_caches=k_caches, v_caches=v_caches, source=slots, target=slots + 3, offsets=slots,
        table=torch.ones(8, 64, device=DEVICE),
    )  # fmt: skip
    field = argument.partition("\\")[0].replace("cos_sin_cache", "table")
    arguments[field] = MISTAKES[argument](arguments[field])
    with pytest.raises(ValueError, match=argument):
        copy(name, (arguments.pop("k_caches"), arguments.pop("v_caches")), **arguments)
