"""Rotary position embedding: the cos/sin table and the rotation of query rows."""

import torch


def rope_cos_sin(inv_freq: torch.Tensor, max_position: int, num_negative: int = 0) -> torch.Tensor:
    """Table of cos(p * f) | sin(p * f) for positions p in [0, max_position), computed in float64.

    inv_freq: [rotary_dim / 2], the layer's own inverse frequencies after any scaling (llama3, YaRN, ...).
    num_negative: the number of rows for negative positions, which follow: row len(table) - j is position -j, as in
        Python's indexing. All ops take such an index as a negative offset.
    Returns float32 [max_position + num_negative, rotary_dim] on inv_freq's device, without any magnitude factor.
    """
    if inv_freq.dim() != 1:
        raise ValueError(f"inv_freq: expected shape [rotary_dim / 2], got {list(inv_freq.shape)}")
    positions = torch.arange(-num_negative, max_position, dtype=torch.float64, device=inv_freq.device)
    positions = positions.roll(-num_negative)
    angles = torch.outer(positions, inv_freq.double())
    return torch.cat([angles.cos(), angles.sin()], dim=-1).float()


def rotate_queries(
    q: torch.Tensor, positions: torch.Tensor | int, cos_sin_cache: torch.Tensor, *, is_neox: bool, inverse: bool = False
) -> torch.Tensor:
    """R(position) q, or R(-position) q when inverse, over the first rotary_dim dimensions.

    q: [..., num_heads, head_dim], left unchanged.
    positions: one position for all rows, or a tensor of q's leading shape [...].
    cos_sin_cache: [num_rows, rotary_dim], see `rope_cos_sin`.
    The rotation is done in float32 (float64 for float64 input) and rounded once to q's dtype.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    rotary_dim = cos_sin_cache.shape[-1]
    cos, sin = cos_sin_cache[positions].to(dtype).unsqueeze(-2).chunk(2, dim=-1)
    if inverse:
        sin = -sin
    rotated, rest = q[..., :rotary_dim].to(dtype), q[..., rotary_dim:]
    if is_neox:
        first, second = rotated.chunk(2, dim=-1)
    else:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    first, second = first * cos - second * sin, second * cos + first * sin
    if is_neox:
        rotated = torch.cat([first, second], dim=-1)
    else:
        rotated = torch.stack([first, second], dim=-1).flatten(-2)
    return torch.cat([rotated.to(q.dtype), rest], dim=-1)
