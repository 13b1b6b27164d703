"""Recurrent layers in plain PyTorch, token by token, with the signatures of the kernels that SGLang calls for them.

A batch's sequences are concatenated: sequence i has the tokens cu_seqlens[i] to cu_seqlens[i + 1]. States are in slots
and written in place; a slot below 0 is padding. Arithmetic is in fp32, or wider where the state is.
"""

import itertools

import torch
import torch.nn.functional as F


def _sequences(cu_seqlens, indices):
    """(begin, end, slot) of each sequence that has tokens and a slot."""
    bounds = itertools.pairwise(cu_seqlens.tolist())
    slots = range(len(cu_seqlens) - 1) if indices is None else indices.tolist()
    return [(begin, end, slot) for (begin, end), slot in zip(bounds, slots, strict=False) if begin < end and slot >= 0]


# Short convolutions: a slot's state is the last inputs, [dim, width - 1].


def _convolve(x, weight, bias, activation, past):
    """x: [dim, n]. past: [dim, width - 1], the inputs before, replaced by the last ones."""
    inputs = torch.cat([past.to(x.dtype), x], 1)
    past.copy_(inputs[:, -past.shape[1] :])
    out = F.conv1d(inputs[None], weight[:, None].to(x.dtype), bias, groups=len(x))[0]
    return F.silu(out) if activation in ("silu", "swish", True) else out


def causal_conv1d_fn(
    x, weight, bias=None, query_start_loc=None, cache_indices=None, has_initial_state=None, conv_states=None,
    activation="silu", **_,
):  # fmt: skip
    """x: [dim, tokens]."""
    out, before = torch.zeros_like(x), weight.shape[1] - 1
    for i, slot in enumerate(cache_indices.tolist()):
        begin, end = query_start_loc[i : i + 2].tolist()
        if begin < end and slot >= 0:
            past = conv_states[slot][:, -before:]
            if has_initial_state is None or not has_initial_state[i]:
                past.zero_()
            out[:, begin:end] = _convolve(x[:, begin:end], weight, bias, activation, past)
    return out


def causal_conv1d_update(
    x, conv_state, weight, bias=None, activation=None, conv_state_indices=None, intermediate_conv_window=None,
    intermediate_state_indices=None, **_,
):  # fmt: skip
    """x: [bs, dim] or [bs, dim, n]. intermediate_conv_window: [rows, n, dim, width - 1], to verify a chain: the last
    inputs at each of its tokens, written in place of those in the slot."""
    tokens, before = (x[..., None] if x.dim() == 2 else x), weight.shape[1] - 1
    out = torch.zeros_like(tokens)
    for i, slot in enumerate(conv_state_indices.tolist()):
        if slot < 0:
            continue
        past = conv_state[slot][:, -before:]
        if intermediate_conv_window is not None:
            inputs, row = torch.cat([past.to(x.dtype), tokens[i]], 1), int(intermediate_state_indices[i])
            for step in range(tokens.shape[2]):
                intermediate_conv_window[row, step] = inputs[:, step + 1 : step + 1 + before]
            past = past.clone()
        out[i] = _convolve(tokens[i], weight, bias, activation, past)
    return out.view_as(x)


# Gated delta rule, and KDA: a slot's state is [value heads, V, K].

BLOCK = 64
"""The tokens of a block, before each of which the kernel tells the state."""


def fused_gdn_gating(A_log, a, b, dt_bias, *_, **__):
    """Log decays and write strengths, [1, tokens, value heads] each."""
    decay = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid()[None]


def _delta_steps(q, k, v, g, beta, state, scale, normalize):
    """One sequence. q, k: [n, key heads, K]; v: [n, value heads, V]; g, beta: [n, value heads], of KDA g for each of K,
    too. state: changed."""
    if normalize:
        q, k = (x.float() * (x.float().square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1).float() for x in (q, k))
    x, out, decay = state.float(), torch.empty_like(v), g.float().exp().view(*beta.shape, 1, -1)
    for t in range(len(v)):
        x = x * decay[t]
        error = v[t].float() - (x * k[t, :, None]).sum(-1)
        x = x + (beta[t].float()[:, None] * error)[..., None] * k[t, :, None]
        out[t] = (x * q[t, :, None]).sum(-1) * scale
    state.copy_(x)
    return out


def chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None, initial_state_indices=None, cu_seqlens=None,
    use_qk_l2norm_in_kernel=False, inplace_update=True, **_,
):  # fmt: skip
    """Everything but states has a first dimension of 1. Returns also the states before each block of a sequence."""
    out, scale, within = torch.zeros_like(v), k.shape[-1] ** -0.5 if scale is None else scale, []
    for begin, end, slot in _sequences(cu_seqlens, initial_state_indices):
        state = initial_state[slot] if inplace_update else initial_state[slot].clone()
        for start in range(begin, end, BLOCK):
            within.append(state.clone())
            one = [x[0, start : min(start + BLOCK, end)] for x in (q, k, v, g, beta)]
            out[0, start : min(start + BLOCK, end)] = _delta_steps(*one, state, scale, use_qk_l2norm_in_kernel)
    return out, None, torch.stack(within)[None]


def fused_recurrent_gated_delta_rule_packed_decode(
    mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out, ssm_state_indices, use_qk_l2norm_in_kernel=False, **_
):
    """One token of each request. mixed_qkv: [bs, q k v]; out: [bs, 1, value heads, V]."""
    g, beta = (x[0] for x in fused_gdn_gating(A_log, a, b, dt_bias))
    return _packed_decode(mixed_qkv, g, beta, scale, initial_state, out, ssm_state_indices, use_qk_l2norm_in_kernel)


def _packed_decode(mixed_qkv, g, beta, scale, initial_state, out, slots, normalize):
    _, num_heads, v_dim, k_dim = initial_state.shape
    q, k, v = mixed_qkv.tensor_split([(mixed_qkv.shape[1] - num_heads * v_dim) // 2, -num_heads * v_dim], 1)
    q, k, v = q.unflatten(1, (-1, k_dim)), k.unflatten(1, (-1, k_dim)), v.unflatten(1, (-1, v_dim))
    out.zero_()
    for i, slot in enumerate(slots.tolist()):
        if slot >= 0:
            one = [x[i : i + 1] for x in (q, k, v, g, beta)]
            out[i] = _delta_steps(*one, initial_state[slot], scale, normalize)
    return out, initial_state


def _kda_gating(A_log, a, b, dt_bias):
    """Log decays of each key channel and write strengths. a: [..., heads, K]; b: [..., heads]."""
    steps = F.softplus(a.float() + dt_bias.float().view(a.shape[-2:]))
    return -A_log.float().exp().view(-1, 1) * steps, b.float().sigmoid()


def chunk_kda(
    q, k, v, g, beta, scale=None, initial_state=None, initial_state_indices=None, use_qk_l2norm_in_kernel=False,
    cu_seqlens=None, A_log=None, dt_bias=None, lower_bound=None, output_intermediate_states=False, track_state=None,
    track_chunk_idx=None, beta_is_raw=False, **_,
):  # fmt: skip
    """KDA. g: [1, tokens, heads, K], as layers give it; beta: [1, tokens, heads]. track_state: of each sequence, the
    state before its block track_chunk_idx, where that is not below 0."""
    assert lower_bound is None
    g, written = _kda_gating(A_log, g, beta, dt_bias)
    beta = written if beta_is_raw else beta
    out, _, within = chunk_gated_delta_rule(
        q, k, v, g, beta, scale, initial_state, initial_state_indices, cu_seqlens, use_qk_l2norm_in_kernel
    )
    if track_state is not None:
        blocks = -(-cu_seqlens.diff() // BLOCK)
        rows = (track_chunk_idx >= 0).nonzero()[:, 0]
        track_state[rows] = within[0, ((blocks.cumsum(0) - blocks)[rows] + track_chunk_idx[rows]).long()].float()
    return (out, within) if output_intermediate_states else out


def fused_recurrent_kda_packed_decode(
    mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out, ssm_state_indices, use_qk_l2norm_in_kernel=False,
    lower_bound=None,
):  # fmt: skip
    """One token of each request. mixed_qkv: [bs, q k v]; a: [bs, heads K]; b: [bs, heads]; out: [bs, 1, heads, V]."""
    assert lower_bound is None
    g, beta = _kda_gating(A_log, a.unflatten(1, (-1, initial_state.shape[-1])), b, dt_bias)
    return _packed_decode(mixed_qkv, g, beta, scale, initial_state, out, ssm_state_indices, use_qk_l2norm_in_kernel)


def fused_sigmoid_gating_delta_rule_update(
    A_log, a, dt_bias, softplus_beta, softplus_threshold, q, k, v, b, initial_state_source, initial_state_indices,
    scale=None, use_qk_l2norm_in_kernel=False, cu_seqlens=None, disable_state_update=False,
    intermediate_states_buffer=None, intermediate_state_indices=None, **_,
):  # fmt: skip
    """Verifies a chain of each request. intermediate_states_buffer: [rows, n, value heads, V, K], the state at each of
    its tokens, written in place of that in the slot."""
    assert disable_state_update
    g, beta = fused_gdn_gating(A_log, a, b, dt_bias)
    out, scale = torch.zeros_like(v), k.shape[-1] ** -0.5 if scale is None else scale
    for i, (begin, end, slot) in enumerate(_sequences(cu_seqlens, initial_state_indices)):
        state, row = initial_state_source[slot].clone(), int(intermediate_state_indices[i])
        for t in range(begin, end):
            one = [x[0, t : t + 1] for x in (q, k, v, g, beta)]
            out[0, t : t + 1] = _delta_steps(*one, state, scale, use_qk_l2norm_in_kernel)
            intermediate_states_buffer[row, t - begin] = state
    return out


def scatter_mamba_states_after_mtp_verify(
    caches, slots, steps, mamba_track_indices, mamba_steps_to_track, src_indices_raw=None
):
    """Write the states at the last accepted token of each chain to the slots, and those at other tokens to others.

    caches: of all layers. steps, mamba_steps_to_track: [bs], -1 for none.
    """
    assert src_indices_raw is None
    written = [
        (caches.temporal, caches.intermediate_ssm),
        *zip(caches.conv, caches.intermediate_conv_window, strict=True),
    ]
    for to, at in ((slots, steps), (mamba_track_indices, mamba_steps_to_track)):
        for row, (slot, step) in enumerate(zip(to.tolist(), at.tolist(), strict=True) if to is not None else ()):
            if slot >= 0 and step >= 0:
                for states, of_steps in written:
                    states[:, slot] = of_steps[:, row, step]


def track_mamba_states_if_needed(
    conv_states, ssm_states, slots, mask, track_slots, batch_size, check_freed_slots=False
):
    """Copy the states of the rows that `mask` names to other slots. conv_states, ssm_states: [slots, ...]."""
    rows = mask[:batch_size].nonzero()[:, 0]
    for states in (conv_states, ssm_states):
        states[track_slots[rows].long()] = states[slots[rows].long()]


def track_mamba_states_all_layers(conv_states, ssm_states, *args, **kwargs):
    """The same in all layers, [num_layers, slots, ...]."""
    for of_layer in zip(conv_states, ssm_states, strict=True):
        track_mamba_states_if_needed(*of_layer, *args, **kwargs)


def fused_qkvzba_split_reshape_cat_contiguous(qkvz, ba, num_key_heads, num_value_heads, k_dim, v_dim):
    """The parts of a projection: q k v, gates of the output, b, a."""
    qkv, z = qkvz.tensor_split([2 * num_key_heads * k_dim + num_value_heads * v_dim], -1)
    b, a = ba.tensor_split([num_value_heads], -1)
    return qkv.contiguous(), z.unflatten(-1, (num_value_heads, v_dim)).contiguous(), b.contiguous(), a.contiguous()


def fused_qkvzba_split_reshape_cat(qkvz, ba, num_key_heads, num_value_heads, k_dim, v_dim):
    """The same, where a projection gives them by key heads."""
    each = num_value_heads // num_key_heads
    sizes = [k_dim, k_dim, each * v_dim, each * v_dim]
    *qkv, z = qkvz.unflatten(-1, (num_key_heads, -1)).split(sizes, -1)
    b, a = ba.unflatten(-1, (num_key_heads, -1)).split([each, each], -1)
    z = z.reshape(len(z), num_value_heads, v_dim)
    return torch.cat([x.flatten(1) for x in qkv], -1), z, b.flatten(1), a.flatten(1)


def layernorm_fn(
    x, weight, bias, z=None, eps=1e-6, group_size=None, norm_before_gate=True, is_rms_norm=True, activation="swish"
):
    """An RMS norm by groups, multiplied by a gate of z after or before it."""
    assert is_rms_norm and bias is None
    gate = 1 if z is None else F.silu(z.float()) if activation in ("swish", "silu") else z.float().sigmoid()
    y = x.float() if norm_before_gate else x.float() * gate
    groups = y.unflatten(-1, (-1, group_size or y.shape[-1]))
    y = (groups * (groups.square().mean(-1, keepdim=True) + eps).rsqrt()).view_as(y) * weight.float()
    return (y * gate if norm_before_gate else y).to(x.dtype)


def rms_norm_gated(x, g, weight, bias, activation="swish", residual=None, eps=1e-6, prenorm=False, **_):
    """As SGLang's, it reads the rows of `x` one after another from the first, whatever their strides."""
    assert residual is None and not prenorm
    x = x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride())
    return layernorm_fn(x, weight, bias, g, eps, activation=activation)


def fused_sigmoid_mul(x, gate, inplace=True):
    out = (x.float() * gate.float().reshape(x.shape).sigmoid()).to(x.dtype)
    return x.copy_(out) if inplace else out


def fused_gate_sigmoid_mul(hidden_states, gate_weight, shared_output):
    """What shared experts give, by a gate of the hidden states, [tokens, dim]."""
    gate = (hidden_states.float() @ gate_weight.float().view(-1, 1)).sigmoid()
    return (shared_output.float() * gate).to(shared_output.dtype)


def fused_gate_sigmoid_mul_add(hidden_states, gate_weight, shared_output, out):
    out += fused_gate_sigmoid_mul(hidden_states, gate_weight, shared_output)


# Mamba-2: a slot's state is [heads, P, N].


def _steps_of(dt, bias, softplus, limit=(0.0, float("inf"))):
    dt = dt.float() + (0 if bias is None else bias.float())
    return (F.softplus(dt) if softplus else dt).clamp(*limit)


def mamba_chunk_scan_combined(
    x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None, cu_seqlens=None,
    dt_softplus=False, dt_limit=(0.0, float("inf")), return_varlen_states=False, return_track_states=False,
    track_seq_idx=None, track_end_locs=None, out=None, state_dtype=None, **_,
):  # fmt: skip
    """x: [1, tokens, heads, P]; dt: [1, tokens, heads]; A: [heads]; B, C: [1, tokens, groups, N]; D: [heads], or with
    P. initial_states: [sequences, heads, P, N]. Writes out and returns the states after the sequences; if asked, also
    those before blocks of the batch's tokens, and those of the sequences track_seq_idx before tokens track_end_locs."""
    assert return_varlen_states and z is None
    x, B, C = (each[0].float() for each in (x, B, C))
    dt, per_group = _steps_of(dt[0], dt_bias, dt_softplus, dt_limit), x.shape[1] // B.shape[1]
    B, C = B.repeat_interleave(per_group, 1), C.repeat_interleave(per_group, 1)
    y, states, before = torch.zeros_like(x), [], {}
    for i, (begin, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        state = x.new_zeros(*x.shape[1:], B.shape[-1]) if initial_states is None else initial_states[i].float()
        for t in range(begin, end):
            before[t] = i, state
            added = (dt[t, :, None] * x[t])[..., None] * B[t, :, None]
            state = state * (dt[t] * A.float()).exp()[:, None, None] + added
            y[t] = (state * C[t, :, None]).sum(-1)
        states.append(state)
    if D is not None:
        y += x * (D.float()[:, None] if D.dim() == 1 else D.float())
    out.view(y.shape).copy_(y)

    def stacked(some):
        return torch.stack(some).to(state_dtype or torch.float32)

    if not return_track_states:
        return None, stacked(states)
    tracked = None
    if track_end_locs is not None and len(track_end_locs):
        wanted = [before[t] for t in track_end_locs.tolist()]
        assert [i for i, _ in wanted] == track_seq_idx.tolist()
        tracked = stacked([state for _, state in wanted])[None]
    return stacked([before[t][1] for t in range(0, len(x), chunk_size)])[None], stacked(states), tracked


def selective_state_update(
    state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, state_batch_indices=None, out=None, **_
):
    """One token of each request. x, dt: [bs, heads, P]; A: [heads, P, N]; B, C: [bs, groups, N]."""
    assert z is None
    dt, per_group = _steps_of(dt, dt_bias, dt_softplus), x.shape[1] // B.shape[1]
    B, C = (each.float().repeat_interleave(per_group, 1)[:, :, None] for each in (B, C))
    for i, slot in enumerate(state_batch_indices.tolist()):
        if slot >= 0:
            new = state[slot].float() * (dt[i, ..., None] * A.float()).exp()
            new = new + (dt[i] * x[i].float())[..., None] * B[i]
            state[slot] = new.to(state.dtype)
            out[i] = (new * C[i]).sum(-1) + (0 if D is None else x[i].float() * D.float())
