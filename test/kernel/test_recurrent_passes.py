"""Passes of recurrent layers over chunks and pieces of text, against the recurrence token by token in float64, which
knows of neither: with PyTorch in place of the layers' kernels, and on a GPU with SGLang's own."""

import dataclasses
import importlib
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ragged import DEVICE, NAN

from fakes import recurrent_layers
from fakes.recurrent_batches import NUM_SLOTS, Batch
from oracle.recurrence import Recurrence, Shape, States
from sgl_kernel_lazy import get_implementation
from sgl_kernel_lazy.states import Effects
from sglang_lazy.recurrent.delta_rule import DeltaRule
from sglang_lazy.recurrent.mamba2 import Mamba2, blocks, log_decays
from sglang_lazy.recurrent.passes import LayerStates
from sglang_lazy.recurrent.pieces import Chunk, Pieces, Text, TextRow

OPS = "sglang.kernels.ops"
SEEDS = 12
BLOCK = 64  # of Mamba-2's kernel
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="SGLang's kernels run on GPUs only")


def sglang_kernels():
    homes = dict(
        causal_conv1d_fn="mamba.causal_conv1d_triton", chunk_gated_delta_rule="attention.fla.chunk",
        chunk_kda="attention.fla.kda", mamba_chunk_scan_combined="mamba.triton_ops",
    )  # fmt: skip
    return SimpleNamespace(
        **{name: getattr(importlib.import_module(f"{OPS}.{home}"), name) for name, home in homes.items()}
    )


@dataclasses.dataclass(frozen=True)
class Setting:
    """sglang: whether the kernels are SGLang's.  dtype: of inputs and of last inputs; states are in fp32.
    tolerance: of states and outputs, relative to the largest element."""

    sglang: bool
    dtype: torch.dtype
    tolerance: float
    longest: int
    shapes: tuple[Shape, ...]


STAND_IN = Setting(
    False, torch.float32, 1e-5, 20, (Shape("delta", 4, 2, 8, 12), Shape("kda", 4, 4, 8, 12), Shape("mamba", 4, 2, 6, 8))
)  # fmt: skip
SGLANG = Setting(
    True, torch.bfloat16, 2e-2, 200,
    (Shape("delta", 4, 2, 128, 128), Shape("kda", 4, 4, 128, 128), Shape("mamba", 4, 2, 64, 128)),
)  # fmt: skip
CASES = [
    pytest.param(setting, shape, seed, id=f"{name}-{shape.kind}-{seed}", marks=[needs_gpu] if setting.sglang else [])
    for name, setting in (("stand-in", STAND_IN), ("sglang", SGLANG))
    for shape in setting.shapes
    for seed in range(SEEDS)
]


class Run:
    """A layer over a random batch.

    requests, chunks: of each slot, `inputs`, its last ones, and `states`; of chunks `transitions`, too. What is in no
    slot is NaN.
    """

    def __init__(self, setting: Setting, shape: Shape, seed: int):
        self.setting, self.shape = setting, shape
        self.batch = Batch(seed, setting.longest, shape.width)
        self.layer = Recurrence(shape, max(self.batch.context), seed, setting.dtype)
        self.oracle = States(self.layer, self.batch.context)
        self.kernels = sglang_kernels() if setting.sglang else recurrent_layers
        self.link_states = get_implementation("triton" if DEVICE == "cuda" else "torch").link_states
        self.pieces = Pieces.of(self.batch.rows, shape.width, torch.device(DEVICE))
        self.requests, self.chunks = self.slots(self.batch.requests), self.slots(self.batch.chunks, transitions=True)
        self.outputs = None

    def slots(self, tokens, transitions=False):
        """What is in slots of these tokens."""
        kept = SimpleNamespace(
            inputs=self.to_device(torch.stack([self.layer.last_inputs(each) for each in tokens])),
            states=torch.stack([self.oracle.after(each) for each in tokens]).float().to(DEVICE),
        )
        if transitions:
            kept.transitions = torch.stack([self.transition(each) for each in tokens]).float().to(DEVICE)
        for each in vars(kept).values():
            each[0] = NAN
        return kept

    def transition(self, tokens):
        """By the recurrence, without values."""
        if self.shape.kind == "mamba":
            return self.oracle.unchanged(torch.ones(self.shape.heads, 1, 1).double(), tokens)[:, 0, 0]
        identity = torch.eye(self.shape.k).double()
        return self.oracle.unchanged(identity.expand(self.shape.heads, *identity.shape), tokens)

    def to_device(self, tensor):
        return tensor.to(self.setting.dtype).to(DEVICE).contiguous()

    def of_tokens(self, tensor, dtype=torch.float32):
        return tensor[self.batch.tokens].to(dtype).to(DEVICE)

    def run(self):
        inputs = self.of_tokens(self.layer.inputs, self.setting.dtype)
        states = LayerStates(
            self.pieces, self.requests.inputs, self.requests.states, self.chunks.inputs,
            Effects(self.chunks.transitions, self.chunks.states), self.link_states,
        )  # fmt: skip
        convolved = states.convolve(lambda last: self.convolution(inputs, last), inputs)
        parts = [each.contiguous() for each in convolved.split(self.shape.dims, 1)]
        layer = (self.mamba if self.shape.kind == "mamba" else self.delta_rule)(*parts)
        states.compute(layer)
        if self.shape.kind != "mamba":
            assert layer.outputs.is_contiguous()
            self.outputs = layer.outputs[0]
        return self

    def convolution(self, inputs, last):
        return self.kernels.causal_conv1d_fn(
            inputs.T, self.to_device(self.layer.weight), None, query_start_loc=self.pieces.cu_seqlens,
            cache_indices=self.pieces.indices, has_initial_state=self.pieces.indices >= 0, conv_states=last,
            seq_lens_cpu=self.pieces.lens, activation="silu",
        ).T  # fmt: skip

    @staticmethod
    def by_head(x, dim):
        return x.unflatten(1, (-1, dim))[None]

    def delta_rule(self, q, k, v):
        q, k, v = (
            x.unflatten(1, (-1, dim))[None] for x, dim in ((q, self.shape.k), (k, self.shape.k), (v, self.shape.v))
        )
        write, given = self.of_tokens(self.layer.write)[None], {}
        if self.shape.kind == "kda":
            gates, rates = self.of_tokens(self.layer.gates, self.setting.dtype)[None], self.layer.rates
            given = dict(
                A_log=rates.log().float().to(DEVICE),
                dt_bias=torch.zeros(self.shape.heads * self.shape.k, device=DEVICE),
            )
        else:
            gates = self.of_tokens(self.layer.decay)[None]

        def extend(values, states):
            kernel = self.kernels.chunk_kda if given else self.kernels.chunk_gated_delta_rule
            out = kernel(
                q, k, values, gates, write, initial_state=states, initial_state_indices=self.pieces.indices,
                cu_seqlens=self.pieces.cu_seqlens, use_qk_l2norm_in_kernel=True, **given,
            )  # fmt: skip
            return out if given else out[0]

        return DeltaRule(extend, v)

    def mamba(self, x, B, C):
        x, B, C = (
            x.unflatten(1, (-1, dim))[None] for x, dim in ((x, self.shape.v), (B, self.shape.k), (C, self.shape.k))
        )
        dt = self.of_tokens(self.layer.dt, self.setting.dtype)
        A, bias, D = (each.float().to(DEVICE) for each in (self.layer.A, self.layer.dt_bias, self.layer.D))
        lens, self.outputs = self.pieces.lens, torch.empty_like(x[0])
        of_tokens = np.repeat(np.arange(len(lens)), lens)
        indices = (of_tokens, *blocks(lens, BLOCK))
        seq_idx, begins, offsets = (torch.tensor(each, dtype=torch.int32, device=DEVICE) for each in indices)

        def scan(states):
            return self.kernels.mamba_chunk_scan_combined(
                x, dt[None], A, B, C, chunk_size=BLOCK, D=D, dt_bias=bias, seq_idx=seq_idx[None], chunk_indices=begins,
                chunk_offsets=offsets, cu_seqlens=self.pieces.cu_seqlens, initial_states=states, dt_softplus=True,
                return_varlen_states=True, return_track_states=True, out=self.outputs[None], state_dtype=torch.float32,
            )[1]  # fmt: skip

        return Mamba2(scan, log_decays(dt, A, bias, self.pieces.cu_seqlens))

    def errors(self):
        """The largest differences to the recurrence, relative to the largest element: of outputs, states, and so on."""
        bounds = np.cumsum([0, *self.pieces.lens])
        new = [self.batch.tokens[begin:end] for begin, end in zip(bounds, bounds[1:], strict=False)]
        outputs = [self.oracle.outputs(seen, tokens) for seen, tokens in zip(self.batch.before, new, strict=True)]
        found = {"outputs": off(self.outputs, torch.cat(outputs))}
        requests, chunks = ([after.get(slot, before[slot]) for slot in range(NUM_SLOTS)] for before, after in (
            (self.batch.requests, self.batch.requests_after), (self.batch.chunks, self.batch.chunks_after)
        ))  # fmt: skip
        for owner, actual, expected in (
            ("requests'", self.requests, self.slots(requests)), ("chunks'", self.chunks, self.slots(chunks, True))
        ):  # fmt: skip
            for name, tensor in vars(expected).items():
                found[f"{owner} {name}"] = off(vars(actual)[name], tensor)
        return found


def off(actual, expected):
    actual, expected = actual.double().cpu(), expected.double().cpu()
    assert torch.equal(actual.isnan(), expected.isnan())
    return float((actual - expected).nan_to_num().abs().max() / expected.nan_to_num().abs().max())


@pytest.mark.parametrize(("setting", "shape", "seed"), CASES)
def test_outputs_and_states_are_those_of_the_recurrence(setting, shape, seed):
    errors = Run(setting, shape, seed).run().errors()
    assert max(errors.values()) <= setting.tolerance, errors


MISTAKES = {
    "states alone": lambda kept: kept.transitions[1:].zero_(),
    "transposed": lambda kept: kept.transitions[1:].copy_(kept.transitions[1:].mT.clone()),
    "another chunk's last inputs": lambda kept: kept.inputs[1:].copy_(kept.inputs[1:].roll(1, 0)),
    "no last inputs": lambda kept: kept.inputs[1:].zero_(),
}


@pytest.mark.parametrize(
    ("setting", "shape", "mistake"),
    [
        pytest.param(*case.values[:2], mistake, id=f"{case.id}-{mistake}", marks=case.marks)
        for case in CASES[::SEEDS]
        for mistake in MISTAKES
        if mistake != "transposed" or case.values[1].kind != "mamba"
    ],
)
def test_these_layers_remember(setting, shape, mistake):
    """Without all of what chunks do to states, the test above fails."""
    run = next(run for seed in itertools.count() if has_text_before_a_chunk((run := Run(setting, shape, seed)).batch))
    MISTAKES[mistake](run.chunks)
    assert run.run().errors()["outputs"] > 2 * setting.tolerance


def has_text_before_a_chunk(batch):
    return any(
        isinstance(part, Text) and isinstance(after, Chunk)
        for row in batch.rows
        if isinstance(row, TextRow)
        for part, after in itertools.pairwise(row.parts)
    )
