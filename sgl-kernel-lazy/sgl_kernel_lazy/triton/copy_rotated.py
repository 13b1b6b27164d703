"""Copies of cached KV tokens whose keys are rotated to other positions: all layers in one launch."""

import torch
import triton
import triton.language as tl

from sgl_kernel_lazy.caches import Caches, check_copies

BLOCK_T, NUM_WARPS = 16, 4
# The compiler must know a divisor of the distances that it loads, or it copies one element at a time.
DISTANCE_UNIT = tl.constexpr(16)


@triton.jit(do_not_specialize=["num_tokens"])
def _copy_rotated_kernel(
    cache, distances, source, target, offsets, cos_sin_cache, num_tokens, num_layers, stride_slot, stride_position,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, IS_NEOX: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """cache[l][target] = R(offset) cache[l][source] for keys, cache[l][target] = cache[l][source] for values.

    cache: any of the caches, for its type.  distances: [2 num_layers] int64, from there to each layer's keys, then to
    each layer's values, in elements. One program copies BLOCK_T KV tokens of one layer.
    """
    HALF: tl.constexpr = ROTARY_DIM // 2
    layer = tl.program_id(1)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    known = token < num_tokens
    read = tl.load(source + token, mask=known, other=0).to(tl.int64)[:, None] * stride_slot
    write = tl.load(target + token, mask=known, other=0).to(tl.int64)[:, None] * stride_slot
    offset = tl.load(offsets + token, mask=known, other=0).to(tl.int64)
    k_cache = cache + tl.multiple_of(tl.load(distances + layer), DISTANCE_UNIT)
    v_cache = cache + tl.multiple_of(tl.load(distances + num_layers + layer), DISTANCE_UNIT)

    frequency = tl.arange(0, BLOCK_HALF)
    first, second = (frequency, HALF + frequency) if IS_NEOX else (2 * frequency, 2 * frequency + 1)
    rotated = known[:, None] & (frequency < HALF)[None, :]
    row = cos_sin_cache + offset[:, None] * stride_position + frequency[None, :]
    cos = tl.load(row, mask=rotated, other=1.0)
    sin = tl.load(row + HALF, mask=rotated, other=0.0)
    dim = tl.arange(0, BLOCK_D)
    whole = known[:, None] & (dim < HEAD_DIM)[None, :]
    rest = known[:, None] & ((dim >= ROTARY_DIM) & (dim < HEAD_DIM))[None, :]
    for head in tl.static_range(NUM_HEADS):
        begin = head * HEAD_DIM
        x = tl.load(k_cache + read + begin + first[None, :], mask=rotated, other=0.0).to(tl.float32)
        y = tl.load(k_cache + read + begin + second[None, :], mask=rotated, other=0.0).to(tl.float32)
        v = tl.load(v_cache + read + begin + dim[None, :], mask=whole, other=0.0)
        tl.store(k_cache + write + begin + first[None, :], x * cos - y * sin, mask=rotated)
        tl.store(k_cache + write + begin + second[None, :], y * cos + x * sin, mask=rotated)
        tl.store(v_cache + write + begin + dim[None, :], v, mask=whole)
        if ROTARY_DIM < HEAD_DIM:
            k = tl.load(k_cache + read + begin + dim[None, :], mask=rest, other=0.0)
            tl.store(k_cache + write + begin + dim[None, :], k, mask=rest)


def copy_rotated(caches: Caches, source: torch.Tensor, target: torch.Tensor, offsets: torch.Tensor) -> None:
    """See `sgl_kernel_lazy.torch_impl.copy_rotated`."""
    check_copies(caches, source, target, offsets)
    if not len(source):
        return
    k_caches, cos_sin_cache = caches.k_caches, caches.cos_sin_cache
    cache = k_caches[0]
    _, num_heads, head_dim = cache.shape
    rotary_dim = cos_sin_cache.shape[1]
    apart = [other.data_ptr() - cache.data_ptr() for other in (*k_caches, *caches.v_caches)]
    unit = DISTANCE_UNIT.value
    if any(distance % (unit * cache.itemsize) for distance in apart):
        raise ValueError(f"k_caches, v_caches: expected to lie multiples of {unit} elements apart")
    distances = torch.tensor([distance // cache.itemsize for distance in apart])
    if cache.is_cuda:
        distances = distances.pin_memory().to(cache.device, non_blocking=True)
    _copy_rotated_kernel[(triton.cdiv(len(source), BLOCK_T), len(k_caches))](
        cache,
        distances,
        source,
        target,
        offsets,
        cos_sin_cache,
        len(source),
        len(k_caches),
        cache.stride(0),
        cos_sin_cache.stride(0),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        ROTARY_DIM=rotary_dim,
        IS_NEOX=caches.is_neox,
        BLOCK_T=BLOCK_T,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_HALF=triton.next_power_of_2(rotary_dim // 2),
        num_warps=NUM_WARPS,
    )
