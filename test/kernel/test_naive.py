"""The oracle itself, against ordinary attention over keys rotated to their absolute positions."""

import random

import pytest
import torch
from ragged import Shape, lse_error, naive, random_batch, relative_error

from sgl_kernel_lazy.rope import rope_cos_sin, rotate_queries

EXACT = 1e-5  # the table is float32: its rounding error of 6e-8 in cos and sin carries over to the scores


def rotate(x, positions, shape):
    """R(position) x for x [n, heads, head_dim], as complex numbers in fp64; shares no code with the package."""
    half = shape.rotary_dim // 2
    inv_freq = 10000.0 ** -(torch.arange(half).double() * 2 / shape.rotary_dim)
    rotation = torch.polar(torch.ones(len(x), 1, half).double(), positions.double()[:, None, None] * inv_freq)
    first = slice(0, half) if shape.is_neox else slice(0, shape.rotary_dim, 2)
    second = slice(half, shape.rotary_dim) if shape.is_neox else slice(1, shape.rotary_dim, 2)
    rotated = torch.complex(x[..., first], x[..., second]) * rotation
    result = x.clone()
    result[..., first], result[..., second] = rotated.real, rotated.imag
    return result


def attention(prompt, shape):
    """Softmax attention of one prompt, with every key rotated by its absolute position and a mask by position."""
    group = shape.num_qo_heads // shape.num_kv_heads
    q = rotate(prompt["q"], prompt["q_positions"], shape)
    k = rotate(prompt["k"], prompt["positions"], shape).repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->qhk", q, k) * shape.head_dim**-0.5
    scores = scores.masked_fill((prompt["positions"] > prompt["q_positions"][:, None])[:, None], -torch.inf)
    return torch.einsum("qhk,khd->qhd", scores.softmax(-1), prompt["v"].repeat_interleave(group, 1)), scores.logsumexp(
        -1
    )


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("rotary_dim", [64, 24])
@pytest.mark.parametrize("preamble", [0, 30])
@pytest.mark.parametrize("seed", range(4))
def test_rotating_queries_back_equals_keys_at_absolute_positions(seed, preamble, rotary_dim, is_neox):
    # The caches hold fp64 values rounded to fp32 after rotation, hence EXACT instead of fp64's precision.
    shape = Shape(rotary_dim=rotary_dim, is_neox=is_neox, preamble=preamble)
    batch = random_batch(seed, shape)
    expected = [attention(prompt, shape) for prompt in batch.prompts]
    out, lse = naive("extend", batch, torch.float64)
    assert relative_error(out.cpu(), torch.cat([o for o, _ in expected])) < EXACT
    assert lse_error(lse.cpu(), torch.cat([e for _, e in expected])) < EXACT


def test_the_identity_in_full_precision():
    """< R(m) q, R(p + i) k > = < R(m - p) q, R(i) k >, without float32 anywhere."""
    shape, rng = Shape(rotary_dim=48), random.Random(0)
    for _ in range(20):
        q, k = torch.randn(2, 1, 1, 64, dtype=torch.float64)
        m, p, i = (torch.tensor([rng.randrange(100000)]) for _ in range(3))
        absolute = (rotate(q, m, shape) * rotate(k, p + i, shape)).sum()
        deferred = (rotate(rotate(q, m, shape), -p, shape) * rotate(k, i, shape)).sum()
        assert (absolute - deferred).abs() < 1e-9


@pytest.mark.parametrize("is_neox", [True, False])
def test_rotate_queries(is_neox):
    shape = Shape(is_neox=is_neox, rotary_dim=40)
    batch = random_batch(0, shape)
    table = batch.extend["cos_sin_cache"].cpu()
    x = torch.randn(9, 3, 64, dtype=torch.float64)
    positions = torch.randint(0, shape.max_position, (9,))
    rotated = rotate_queries(x, positions, table, is_neox=is_neox)
    assert relative_error(rotated, rotate(x, positions, shape)) < 1e-6
    assert relative_error(rotate_queries(rotated, positions, table, is_neox=is_neox, inverse=True), x) < 1e-6
    assert torch.equal(rotate_queries(x, 0, table, is_neox=is_neox, inverse=True), x)
    assert torch.equal(rotated[3:4], rotate_queries(x[3:4], int(positions[3]), table, is_neox=is_neox))


def test_negative_positions_are_indexed_from_the_end():
    """Row len - j of the table is position -j; the rows before are those of a table without negative positions."""
    inv_freq = 10000.0 ** -(torch.arange(32).double() / 32)
    table = rope_cos_sin(inv_freq, 100, num_negative=7)
    assert torch.equal(table[:100], rope_cos_sin(inv_freq, 100))
    x = torch.randn(7, 3, 64, dtype=torch.float64)
    back = torch.arange(1, 8)
    for is_neox in (True, False):
        rotated = rotate_queries(x, len(table) - back, table, is_neox=is_neox)
        assert relative_error(rotated, rotate(x, -back, Shape(is_neox=is_neox))) < 1e-6
