"""Time recurrent layers with a gated delta rule: chunks and pieces of text against SGLang's own prefill and prefix hit.

    python -m benchmark.kernels.recurrent --out recurrent.json    # needs SGLang's kernels and a GPU

A case is one request in the shape of Qwen3.6-35B-A3B: 30 such layers, 16 key and 32 value heads of 128. Each layer runs
its convolution, the gates and the rule, in bf16 with states in fp32; projections, which do not depend on chunks, are
left out. Columns: wall_ms of 30 layers, launches included, and gpu_ms, the same from a CUDA graph; p20, p50, p80.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from sglang.kernels.ops.attention.fla.chunk import chunk_gated_delta_rule
from sglang.kernels.ops.attention.linear.fused_gdn_gating import fused_gdn_gating
from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_fn

from benchmark.kernels import timing
from sgl_kernel_lazy import get_implementation
from sglang_lazy.recurrent.beginnings import begin_rows
from sglang_lazy.recurrent.delta_rule import DeltaRule
from sglang_lazy.recurrent.passes import LayerStates
from sglang_lazy.recurrent.pieces import Chunk, ChunkRow, Pieces, Text, TextRow
from sglang_lazy.recurrent.pool import StateLayout, StatePool

LAYERS, KEY_HEADS, HEADS, DIM, WIDTH = 30, 16, 32, 128, 3
CONV_DIM = 2 * KEY_HEADS * DIM + HEADS * DIM
QUESTION = 64
CASES: dict[str, list[TextRow | ChunkRow]] = {
    "SGLang, prefix hit": [TextRow(1, True, [Text(QUESTION)])],
    "SGLang, 10,304 tokens": [TextRow(1, False, [Text(10 * 1024 + QUESTION)])],
    "SGLang, 4,096 tokens": [TextRow(1, False, [Text(4096)])],
    "10 chunks, question": [TextRow(1, False, [*map(Chunk, range(1, 11)), Text(QUESTION)])],
    "10 chunks with text between, question": [
        TextRow(1, False, [part for slot in range(1, 11) for part in (Text(16), Chunk(slot))] + [Text(QUESTION)])
    ],
    "fill of 4 chunks of 1,024": [ChunkRow(slot, 1024) for slot in range(1, 5)],
    "fill of 1 chunk of 4,096": [ChunkRow(1, 4096)],
}


class Layers:
    """Weights and states of one layer, states for 30."""

    def __init__(self, device: torch.device):
        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=device, dtype=torch.bfloat16)

        self.weight, self.device = normal(CONV_DIM, WIDTH + 1) / 2, device
        self.A_log = torch.empty(HEADS, device=device).uniform_(-7, -2)
        self.dt_bias = torch.zeros(HEADS, device=device)
        self.inputs, self.a, self.b = normal(16384, CONV_DIM), normal(16384, HEADS), normal(16384, HEADS)
        layout = StateLayout(
            LAYERS, ((CONV_DIM, WIDTH),), torch.bfloat16, (HEADS, DIM, DIM), torch.float32, transition="matrix"
        )
        self.chunks = StatePool(layout, 11, device)
        assert self.chunks.wide is not None
        self.chunks.wide.normal_(std=0.01)
        self.requests = torch.zeros(LAYERS, 3, HEADS, DIM, DIM, device=device)
        self.last = torch.zeros(LAYERS, 3, CONV_DIM, WIDTH, device=device, dtype=torch.bfloat16)
        self.link_states = get_implementation("triton").link_states

    def parts(self, pieces: Pieces, last: torch.Tensor, slots: torch.Tensor, known: torch.Tensor):
        """Queries, keys, values and gates of all tokens, as SGLang's backend computes them."""
        n = sum(pieces.lens)
        convolved = causal_conv1d_fn(
            self.inputs[:n].T, self.weight, None, last, pieces.cu_seqlens, pieces.lens, slots, known, "silu"
        ).T  # fmt: skip
        q, k, v = convolved.split([KEY_HEADS * DIM, KEY_HEADS * DIM, HEADS * DIM], 1)
        heads = [x.unflatten(1, (-1, DIM))[None] for x in (q, k, v)]
        return *heads, *fused_gdn_gating(self.A_log, self.a[:n], self.b[:n], self.dt_bias)

    def rule(self, parts, v: torch.Tensor, states: torch.Tensor, slots: torch.Tensor, pieces: Pieces) -> torch.Tensor:
        q, k, _, g, beta = parts
        return chunk_gated_delta_rule(
            q, k, v, g, beta, initial_state=states, initial_state_indices=slots, cu_seqlens=pieces.cu_seqlens,
            use_qk_l2norm_in_kernel=True,
        )[0]  # fmt: skip

    def stock(self, pieces: Pieces, layer: int) -> None:
        """One sequence, as SGLang computes it."""
        assert pieces.last is not None
        slots, known = pieces.last.slots, ~pieces.inputs.of_nobody
        parts = self.parts(pieces, self.last[layer], slots, known)
        self.rule(parts, parts[2], self.requests[layer], slots, pieces)

    def begin(self, pieces: Pieces) -> None:
        """What precedes the layers' passes over text behind chunks."""
        begin_rows(pieces, self.chunks, [self.last], self.requests, self.link_states)

    def linked(self, pieces: Pieces, layer: int) -> None:
        states = LayerStates(
            pieces, self.last[layer], self.requests[layer], self.chunks.conv[0][layer], self.chunks.effects[layer],
            self.link_states,
        )  # fmt: skip
        parts = states.convolve(
            lambda last: self.parts(pieces, last, pieces.indices, pieces.known), self.inputs[: sum(pieces.lens)]
        )
        states.compute(DeltaRule(lambda v, wide: self.rule(parts, v, wide, pieces.indices, pieces), parts[2]))


def measure(layers: Layers, name: str, rows: list[TextRow | ChunkRow], repetitions: int) -> dict:
    pieces = Pieces.of(rows, WIDTH, layers.device)
    one = layers.stock if pieces.is_text_behind_chunks else layers.linked
    calls: list[Callable[[], None]] = [lambda layer=layer: one(pieces, layer) for layer in range(LAYERS)]
    if pieces.is_text_behind_chunks and not name.startswith("SGLang"):
        calls.insert(0, lambda: layers.begin(pieces))

    def run() -> None:
        for call in calls:
            call()

    for _ in range(3):
        run()
    torch.cuda.synchronize()
    replay = timing.captured(calls)
    walls = [timing.wall_ms(run) for _ in range(repetitions)]
    on_gpu = [timing.event_ms(replay) for _ in range(repetitions)]
    return {
        "case": name,
        "tokens": sum(pieces.lens),
        "wall_ms": timing.quantiles(walls),
        "gpu_ms": timing.quantiles(on_gpu),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repetitions", type=int, default=20)
    args = parser.parse_args()
    torch.manual_seed(0)
    layers = Layers(torch.device("cuda"))
    measured = [measure(layers, name, rows, args.repetitions) for name, rows in CASES.items()]
    for row in measured:
        print(json.dumps(row))
    args.out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": measured}, indent=1) + "\n")


if __name__ == "__main__":
    main()
