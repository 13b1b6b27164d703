"""Compile the Triton kernels for sm_90 ahead of time, without a GPU, and print how much shared memory each needs."""

import importlib
import re
import subprocess
import sys
import tempfile

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sgl_kernel_lazy.triton.common import accumulator, block_sizes, operand_size, score_scales

attention = importlib.import_module("sgl_kernel_lazy.triton.accumulate_attention")
decode = importlib.import_module("sgl_kernel_lazy.triton.link_decode")
extend = importlib.import_module("sgl_kernel_lazy.triton.link_extend")
copies = importlib.import_module("sgl_kernel_lazy.triton.copy_rotated")
rows = importlib.import_module("sgl_kernel_lazy.triton.copy_rows")
states = importlib.import_module("sgl_kernel_lazy.triton.link_states")
windows = importlib.import_module("sgl_kernel_lazy.triton.window_rows")
whole = importlib.import_module("sgl_kernel_lazy.triton.whole_rows")

FLOAT_POINTERS = ("lse", "partial_out", "cos_sin_cache", "sums", "before", "last")
FLOAT_POINTERS += ("initial_states", "piece_transitions", "piece_states")
INPUT_POINTERS = ("q", "k_cache", "v_cache", "sinks", "out", "cache", "chunk_transitions", "chunk_states")
INDEX_POINTERS = ("qo_indptr", "kv_indptr", "kv_positions", "num_segments", "segment_ends", "segment_offsets")
INDEX_POINTERS += ("all_num_segments", "all_ends", "all_offsets", "all_ids", "segment_ids")
INDEX_POINTERS += ("req_to_token", "tail_ends", "tail_indices", "tail_positions", "part_indptr")
WIDE_POINTERS = ("kv_indices", "q_positions", "distances", "source", "target", "offsets", "places", "seq_lens")
WIDE_POINTERS += ("initial_slots", "parts", "sources", "targets", "source_rows", "target_rows", "window_slots")
# Dtypes of queries, and of caches with another dtype.
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DTYPES |= {"bf16/fp8e4nv": torch.bfloat16, "fp16/fp8e5": torch.float16}
MAX_SHARED = 227 * 1024


def compile_kernel(kernel, dtype, num_warps, num_stages, **constants):
    """Compile a kernel; pointers and row strides are multiples of 16, as for contiguous tensors."""
    dtype, _, cache_dtype = dtype.partition("/")
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        if name == "partial_lse" or (name == "lse" and (constants.get("SPLIT") or "sums" in kernel.arg_names)):
            signature[name] = f"*{constants['ACC'].name}"
        elif name in FLOAT_POINTERS or (name == "out" and constants.get("SPLIT")):
            signature[name] = "*fp32"
        elif name in ("k_cache", "v_cache") and cache_dtype:
            signature[name] = f"*{cache_dtype}"
        elif name in INPUT_POINTERS:
            signature[name] = f"*{dtype}"
        elif name in INDEX_POINTERS:
            signature[name] = "*i32"
        elif name in WIDE_POINTERS:
            signature[name] = "*i64"
        else:
            signature[name] = "fp32" if name == "v_scale" else "i32"
        if "*" in signature[name] or re.match("stride_([qkv]|out|position|slot)", name):
            attributes[(index,)] = [["tt.divisibility", 16]]
    options = dict(num_warps=num_warps, num_stages=num_stages)
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert compiled.metadata.shared <= MAX_SHARED, f"{compiled.metadata.shared} bytes of shared memory"
    return compiled


def compile_decode(dtype, group, head_dim, rotary_dim, is_neox, logit_cap=None):
    shared = dict(HEAD_DIM=head_dim, ACC=accumulator(DTYPES[dtype])[0])
    decode.shared_memory = lambda device: MAX_SHARED
    launch = decode._launch(head_dim, DTYPES[dtype], torch.device("cuda"))
    shared |= block_sizes(head_dim, DTYPES[dtype], launch.tile_bytes)
    block_h, _ = decode._plan(8 * group, 8, launch.programs, torch.device("cpu"))
    main = compile_kernel(
        decode._link_decode_kernel, dtype, launch.num_warps, launch.num_stages, **shared, GROUP=group,
        ROTARY_DIM=rotary_dim, IS_NEOX=is_neox, **score_scales(head_dim**-0.5, logit_cap), BLOCK_H=block_h,
        BLOCK_BS=128, BLOCK_SEGMENTS=16,
    )  # fmt: skip
    return main, *(
        compile_kernel(decode._merge_kernel, dtype, 4, 3, **shared, **sinks, BLOCK_S=64)
        for sinks in ({}, {"sinks": None})
    )


def compile_extend(dtype, group, head_dim, rotary_dim, is_neox, extend_len, split, window=0, logit_cap=None):
    """With sinks if there is a window."""
    shared = dict(HEAD_DIM=head_dim, ACC=accumulator(DTYPES[dtype])[0])
    options = {"WINDOW": window, **({} if window else {"sinks": None}), **({} if split else {"lse": None})}
    row_bytes = head_dim * operand_size(DTYPES[dtype])
    block_m, _ = extend._plan(1, extend_len, 10000, extend_len, 8 * group, 8, head_dim, row_bytes, 132)
    extend.shared_memory = lambda device: MAX_SHARED
    blocks = block_sizes(head_dim, DTYPES[dtype], extend._tile_bytes(block_m, "cuda"))
    main = compile_kernel(
        extend._link_extend_kernel, dtype, *extend._launch(block_m, head_dim, "cuda").values(),
        **options, **shared, **blocks, GROUP=group, ROTARY_DIM=rotary_dim, IS_NEOX=is_neox,
        STRIDE_K_SLOT=8 * head_dim, STRIDE_V_SLOT=8 * head_dim, **score_scales(head_dim**-0.5, logit_cap), SPLIT=split,
        BLOCK_M=block_m, BLOCK_SEGMENTS=16,
    )  # fmt: skip
    merge = compile_kernel(
        extend._merge_kernel, dtype, 4, 3, sinks=None, **shared, BLOCK_D=blocks["BLOCK_D"], BLOCK_S=16
    )
    return (main, merge) if split else (main,)


def compile_attention(dtype, group, head_dim, rotary_dim, is_neox, extend_len, logit_cap=None):
    blocks, launch = attention._tiles(extend_len * group, head_dim, DTYPES[dtype])
    shared = dict(
        GROUP=group, HEAD_DIM=head_dim, ROTARY_DIM=rotary_dim, IS_NEOX=is_neox, ACC=accumulator(DTYPES[dtype])[0],
        BLOCK_SEGMENTS=16, **blocks, **score_scales(head_dim**-0.5, logit_cap),
    )  # fmt: skip
    lse = compile_kernel(attention._lse_kernel, dtype, *launch.values(), **shared)
    return lse, compile_kernel(attention._sum_kernel, dtype, *launch.values(), **shared, NUM_KV_HEADS=8)


def compile_copy(dtype, num_heads, head_dim, rotary_dim, is_neox):
    blocks = dict(
        BLOCK_T=copies.BLOCK_T,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_HALF=triton.next_power_of_2(rotary_dim // 2),
    )
    heads = dict(NUM_HEADS=num_heads, HEAD_DIM=head_dim, ROTARY_DIM=rotary_dim, IS_NEOX=is_neox)
    return (compile_kernel(copies._copy_rotated_kernel, dtype, copies.NUM_WARPS, 3, **heads, **blocks),)


def compile_rows(row_bytes):
    """Rows of multiples of 16 bytes are copied 16 bytes at a time."""
    kernel = compile_kernel(rows._copy_rows_kernel, "bf16", rows.NUM_WARPS, 3, **rows.layout(row_bytes))
    assert row_bytes % 16 or all(re.search(rf"{op}\.global\S*\.v2\.b64", kernel.asm["ptx"]) for op in ("ld", "st"))
    return kernel


def compile_states(dtype, v, k, matrices):
    """The parts of a row come one after another, so registers that spill cost each of them their time."""
    blocks = dict(BLOCK_V=states.BLOCK_V, BLOCK_K=k, MATRIX=matrices)
    kernel = compile_kernel(states._link_states_kernel, dtype, states.NUM_WARPS, 3, V=v, K=k, **blocks)
    assert (spilled := stack_bytes(kernel)) == 0, f"{spilled} bytes a thread are spilled"
    return kernel


def stack_bytes(kernel) -> int:
    """Local memory of each thread, by the resource usage that ptxas notes in the binary."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", usage)[1])


# dtype, group, head_dim, rotary_dim, is_neox
HEADS = [
    ("bf16", 4, 128, 128, True),
    ("bf16/fp8e4nv", 4, 128, 128, True),
    ("fp16/fp8e5", 7, 80, 32, False),
    ("fp16", 7, 80, 32, False),
    ("bf16", 1, 64, 64, True),
    ("bf16", 8, 256, 256, True),
    ("bf16", 8, 512, 512, True),
    ("fp32", 8, 512, 512, True),
    ("fp32", 1, 128, 64, True),
    ("fp32", 2, 256, 64, False),
]
# What the test compiles; all configurations take minutes.
QUICK = HEADS[:2]

if __name__ == "__main__":
    for max_tail in (128, 4096):
        blocks = dict(NUM_QUERIES=4, HAS_POOL=True, BLOCK_B=256, BLOCK_T=max_tail, BLOCK_N=128, BLOCK_S=128)
        kernel = compile_kernel(windows._window_rows_kernel, "bf16", 4, 3, **blocks)
        print(max_tail, kernel.metadata.name, kernel.metadata.shared, flush=True)
    for num_queries in (1, 4):
        blocks = dict(NUM_QUERIES=num_queries, BLOCK_B=256, BLOCK_N=1024, BLOCK_S=128)
        kernel = compile_kernel(whole._whole_rows_kernel, "bf16", 4, 1, **blocks)
        print(num_queries, kernel.metadata.name, kernel.metadata.shared, flush=True)
    for row_bytes in (2048, 1152, 72):
        kernel = compile_rows(row_bytes)
        print(row_bytes, kernel.metadata.name, kernel.metadata.shared, flush=True)
    for layer in (("fp32", 128, 128, True), ("bf16", 128, 128, True), ("fp32", 64, 256, False)):
        kernel = compile_states(*layer)
        print(*layer, kernel.metadata.name, kernel.metadata.shared, flush=True)
    for heads in QUICK if "--quick" in sys.argv else HEADS:
        links = (*compile_decode(*heads), *compile_extend(*heads, 512, False), *compile_extend(*heads, 2, True))
        links += (*compile_extend(*heads, 512, False, 128, 50.0), *compile_decode(*heads, 50.0))
        for kernel in (*links, *compile_attention(*heads, 64), *compile_copy(*heads)):
            print(*heads, kernel.metadata.name, kernel.metadata.shared, flush=True)
