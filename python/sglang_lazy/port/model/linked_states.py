"""What is mixed into SGLang's backends of recurrent layers with states: in a batch with chunks, they take its pieces.

All other batches go to SGLang's own code.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.linear.kernels.gdn_triton import TritonGDNKernel
from sglang.srt.layers.attention.mamba import mamba
from sglang.srt.layers.attention.mamba.mamba2_metadata import Mamba2Metadata

from sgl_kernel_lazy import get_implementation
from sglang_lazy.core.device import ints_to_device
from sglang_lazy.core.overlay import Overlay
from sglang_lazy.recurrent.delta_rule import DeltaRule
from sglang_lazy.recurrent.mamba2 import Mamba2, blocks, log_decays
from sglang_lazy.recurrent.passes import LayerStates
from sglang_lazy.recurrent.pieces import Pieces


class LinkStates(AttentionBackend):
    """link_layers: of the model, with their pool.
    link_pieces: of the current batch, with slots of SGLang's pool; None if it is entirely SGLang's.
    """

    def init_link_states(self, layers: Any) -> None:
        self.link_layers = layers
        self.link_pieces: Pieces | None = None
        device = layers.pool.h.device
        self.link_kernels = get_implementation("triton" if device.type == "cuda" else "torch")

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        pieces = self.link_layers.pieces
        self.link_pieces = None if pieces is None else pieces.in_slots(self.forward_metadata.mamba_cache_indices)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)
        self.link_pieces = None

    def link_states(self, layer_id: int, pieces: Pieces) -> LayerStates:
        """Of a layer in the current batch."""
        index, pool = self.req_to_token_pool.mamba2_layer_index(layer_id), self.link_layers.pool
        cache = self.req_to_token_pool.mamba2_layer_cache(layer_id)
        return LayerStates(
            pieces, cache.conv[0], cache.temporal, pool.conv[0][index], pool.h[index], pool.p[index],
            self.link_kernels.link_states,
        )  # fmt: skip


class LinkDeltaRule(LinkStates):
    """For `GDNAttnBackend`. Its calls for segments of scored items do what pieces need, but for the states.

    The kernel is Triton's, whatever the flags say: FlashInfer's takes values of no other width.
    """

    def init_link_states(self, layers: Any) -> None:
        super().init_link_states(layers)
        self.link_extend = TritonGDNKernel().extend

    def forward_extend(self, layer: Any, forward_batch: Any, mixed_qkv: Any, a: Any, b: Any, **kwargs: Any) -> Any:
        if (pieces := self.link_pieces) is None:
            return super().forward_extend(layer, forward_batch, mixed_qkv, a, b, **kwargs)
        states = self.link_states(layer.layer_id, pieces)
        shown = Overlay(self, kernel_dispatcher=_Extend(states, self.link_extend))

        # mypy does not know the class that this is mixed into, nor that of `LinkMamba2` below.
        def convolution_and_rule(last: torch.Tensor) -> torch.Tensor:
            return type(self)._forward_mis_segments(  # type: ignore[attr-defined]
                shown,
                layer=layer,
                mixed_qkv=mixed_qkv,
                a=a,
                b=b,
                conv_states=last,
                conv_cache_indices=pieces.indices,
                has_initial_states=torch.ones_like(pieces.indices, dtype=torch.bool),
                query_start_loc=pieces.cu_seqlens,
                seq_lens_cpu=pieces.lens,
                ssm_states=None,
                ssm_cache_indices=None,
                inplace_update=True,
            )

        return states.convolve(convolution_and_rule, mixed_qkv)


class _Extend(NamedTuple):
    """In place of the backend's dispatcher of kernels, for one layer."""

    states: LayerStates
    kernel: Callable

    def extend(self, q: Any, k: Any, v: Any, g: Any, beta: Any, **_: Any) -> tuple[torch.Tensor, None, None]:
        pieces = self.states.pieces

        def run(values: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
            where = dict(ssm_states=states, cache_indices=pieces.indices, query_start_loc=pieces.cu_seqlens)
            return self.kernel(q, k, values, g, beta, **where)[0]

        layer = DeltaRule(run, v)
        self.states.compute(layer)
        return layer.outputs, None, None


class LinkMamba2(LinkStates):
    """For `Mamba2AttnBackend`. The mixer computes everything, with calls to kernels in its module.

    link_metadata: SGLang's description of the batch, in pieces.
    """

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        if (pieces := self.link_pieces) is not None:
            self.link_metadata = self._described(pieces)

    def _described(self, pieces: Pieces) -> Mamba2Metadata:
        of_tokens = np.repeat(np.arange(len(pieces.lens)), pieces.lens)
        begins = blocks(pieces.lens, self.mamba_chunk_size)
        seq_idx, indices, offsets = ints_to_device([of_tokens, *begins], pieces.cu_seqlens.device)
        mixed = Mamba2Metadata.MixedMetadata(
            has_initial_states=torch.ones_like(pieces.indices, dtype=torch.bool),
            prep_initial_states=False,  # they are given in `_scan`
            chunk_size=self.mamba_chunk_size,
            seq_idx=seq_idx[None],
            chunk_indices=indices,
            chunk_offsets=offsets,
            extend_seq_lens_cpu=list(pieces.lens),
        )
        return Mamba2Metadata(
            query_start_loc=pieces.cu_seqlens,
            mamba_cache_indices=pieces.indices,
            num_prefills=len(pieces.lens),
            num_prefill_tokens=sum(pieces.lens),
            num_decodes=0,
            mixed_metadata=mixed,
        )

    def forward(
        self,
        mixer: Any,
        hidden_states: torch.Tensor,
        output: torch.Tensor | None,
        layer_id: int,
        forward_batch: Any,
        mup_vector: torch.Tensor | None = None,
        use_triton_causal_conv: bool = False,
    ) -> Any:
        if (pieces := self.link_pieces) is None:
            return super().forward(  # type: ignore[misc]
                mixer, hidden_states, output, layer_id, forward_batch, mup_vector, use_triton_causal_conv
            )
        convolution = "causal_conv1d_fn_triton" if use_triton_causal_conv else "causal_conv1d_fn"
        with _wrapped(self.link_states(layer_id, pieces), convolution):
            out, _, _ = mixer.forward(
                hidden_states=hidden_states,
                output=output,
                layer_cache=self.req_to_token_pool.mamba2_layer_cache(layer_id),
                metadata=self.link_metadata,
                mup_vector=mup_vector,
                use_triton_causal_conv=use_triton_causal_conv,
            )
        return out


@contextmanager
def _wrapped(states: LayerStates, convolution: str) -> Iterator[None]:
    """Within, the kernels that SGLang's mixer calls for one layer run over pieces.

    convolution: the name of the one in its module.
    """

    def convolve(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """x: [dim, num_tokens]."""
        return states.convolve(lambda last: stock[convolution](x, *args, **kwargs | {"conv_states": last}), x.T)

    def scan(x: Any, dt: torch.Tensor, A: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[None, None, None]:
        """Has the states written, so that it returns none."""

        def run(before: torch.Tensor) -> torch.Tensor:
            given = kwargs | {"initial_states": before, "state_dtype": torch.float32}
            return stock["mamba_chunk_scan_combined"](x, dt, A, *args, **given)[1]

        states.compute(Mamba2(run, log_decays(dt[0], A, kwargs["dt_bias"], states.pieces.cu_seqlens)))
        return None, None, None

    wrapped = {convolution: convolve, "mamba_chunk_scan_combined": scan}
    stock = {name: getattr(mamba, name) for name in wrapped}
    vars(mamba).update(wrapped)
    try:
        yield
    finally:
        vars(mamba).update(stock)
