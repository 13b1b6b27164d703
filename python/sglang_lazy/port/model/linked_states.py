"""What is mixed into SGLang's backends of recurrent layers with states: in a batch with chunks, they take its pieces.

All other batches go to SGLang's own code, and those of text behind chunks, once its rows have begun.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.linear.kernels.gdn_triton import TritonGDNKernel
from sglang.srt.layers.attention.linear.kernels.kda_triton import TritonKDAKernel
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
    link_pieces: of the current batch, with slots of SGLang's pool; None if SGLang's code computes it.
    link_metadata: SGLang's description of the batch, in pieces. What its cache wants of the states within them is that
        of rows without chunks, each of which is one piece.
    """

    def init_link_states(self, layers: Any) -> None:
        self.link_layers = layers
        self.link_pieces: Pieces | None = None
        device = layers.pool.h.device
        self.link_kernels = get_implementation("triton" if device.type == "cuda" else "torch")

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        self.link_pieces, pieces, metadata = None, self.link_layers.pieces, self.forward_metadata
        if pieces is None:
            return
        in_slots = pieces.in_slots(metadata.mamba_cache_indices)
        if pieces.is_text_behind_chunks:
            self.link_layers.begin_rows(in_slots, self.link_kernels.link_states)
            return
        self.link_pieces, self.link_metadata = in_slots, metadata
        if metadata.has_mamba_track_mask:
            of_rows = torch.zeros_like(metadata.mamba_cache_indices)
            of_rows[pieces.last.slots] = pieces.last.pieces.to(of_rows.dtype)
            self.link_metadata = self.link_tracked(metadata, pieces, of_rows)

    def link_tracked(self, metadata: Any, pieces: Pieces, of_rows: torch.Tensor) -> Any:
        """The same metadata, if the kernel returns states by piece.  of_rows: the last piece of each row."""
        raise NotImplementedError

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)
        self.link_pieces = None

    def link_states(self, layer_id: int, pieces: Pieces) -> LayerStates:
        """Of a layer in the current batch."""
        index, pool = self.req_to_token_pool.mamba2_layer_index(layer_id), self.link_layers.pool
        cache = self.req_to_token_pool.mamba2_layer_cache(layer_id)
        return LayerStates(
            pieces, self.link_layers.inputs_of(cache)[0], cache.temporal,
            pool.conv[0][index], pool.effects[index], self.link_kernels.link_states,
        )  # fmt: skip


class LinkDeltaRule(LinkStates):
    """For `GDNAttnBackend`. Its calls for segments of scored items do what pieces need, but for the states.

    The kernel is Triton's, whatever the flags say: FlashInfer's takes values of no other width.
    """

    def init_link_states(self, layers: Any) -> None:
        super().init_link_states(layers)
        self.link_extend = TritonGDNKernel().extend

    def link_tracked(self, metadata: Any, pieces: Pieces, of_rows: torch.Tensor) -> Any:
        """Each piece has its own blocks, whose states before them are returned."""
        ends = pieces.cu_seqlens.diff().add(self.mamba_chunk_size - 1).floor_divide(self.mamba_chunk_size).cumsum(0)
        begins = F.pad(ends, (1, 0))
        rows = metadata.track_ssm_h_batch_src
        return dataclasses.replace(metadata, track_ssm_h_src=begins[of_rows[rows]] + metadata.track_chunk_idx[rows])

    def forward_extend(self, layer: Any, forward_batch: Any, mixed_qkv: Any, a: Any, b: Any, **kwargs: Any) -> Any:
        if (pieces := self.link_pieces) is None:
            return super().forward_extend(layer, forward_batch, mixed_qkv, a, b, **kwargs)
        states, metadata = self.link_states(layer.layer_id, pieces), self.link_metadata
        extend = _Extend(states, self.link_extend)
        shown = Overlay(self, kernel_dispatcher=extend)
        if metadata.has_mamba_track_mask:
            states.requests_inputs[metadata.conv_states_mask_indices] = mixed_qkv[metadata.track_conv_indices].mT

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
                has_initial_states=pieces.known,
                query_start_loc=pieces.cu_seqlens,
                seq_lens_cpu=pieces.lens,
                ssm_states=None,
                ssm_cache_indices=None,
                inplace_update=True,
            )

        out = states.convolve(convolution_and_rule, mixed_qkv)
        self._track_mamba_state_extend(forward_batch, extend.within, states.requests, metadata)
        return out


@dataclasses.dataclass
class _Extend:
    """In place of the backend's dispatcher of kernels, for one layer.

    within: what it returns, [1, num_blocks, heads, V, K], the states before each block of the pieces.
    """

    states: LayerStates
    kernel: Callable
    within: torch.Tensor | None = None

    def extend(self, q: Any, k: Any, v: Any, g: Any, beta: Any, **_: Any) -> tuple[torch.Tensor, None, None]:
        pieces = self.states.pieces

        def run(values: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
            where = dict(ssm_states=states, cache_indices=pieces.indices, query_start_loc=pieces.cu_seqlens)
            out, _, within = self.kernel(q, k, values, g, beta, **where)
            self.within = within[..., : v.shape[-1], :]
            return out

        layer = DeltaRule(run, v)
        self.states.compute(layer)
        return layer.outputs, None, None


class LinkKDA(LinkStates):
    """For `KDAAttnBackend`, whose code runs over pieces as if they were rows: what it calls for convolution and rule
    is replaced. The kernel is Triton's, as for the delta rule."""

    def init_link_states(self, layers: Any) -> None:
        super().init_link_states(layers)
        self.link_extend = TritonKDAKernel().extend

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        if (pieces := self.link_pieces) is not None:
            self.link_metadata = dataclasses.replace(
                self.link_metadata,
                query_start_loc=pieces.cu_seqlens,
                mamba_cache_indices=pieces.indices,
                logical_num_tokens=sum(pieces.lens),
            )

    def link_tracked(self, metadata: Any, pieces: Pieces, of_rows: torch.Tensor) -> Any:
        """The kernel returns one state of each piece, which is read by its index."""
        rows = metadata.track_ssm_h_batch_src
        blocks = metadata.track_chunk_idx.new_full((len(pieces.lens),), -1)
        blocks[of_rows[rows]] = metadata.track_chunk_idx[rows]
        return dataclasses.replace(metadata, track_chunk_idx=blocks, track_ssm_h_batch_src=of_rows[rows])

    def forward_extend(self, layer: Any, forward_batch: Any, mixed_qkv: Any, a: Any, b: Any, **kwargs: Any) -> Any:
        if (pieces := self.link_pieces) is None:
            return super().forward_extend(layer, forward_batch, mixed_qkv, a, b, **kwargs)
        states = self.link_states(layer.layer_id, pieces)
        batch = Overlay(forward_batch, extend_prefix_lens=pieces.known, extend_seq_lens_cpu=pieces.lens)

        # mypy does not know the class that this is mixed into.
        run = super(LinkKDA, type(self))._convolve_prefill  # type: ignore[misc]

        def convolve(_layer: Any, _batch: Any, inputs: torch.Tensor, *_: Any) -> torch.Tensor:
            return states.convolve(lambda last: run(shown, layer, batch, inputs, last, pieces.indices), inputs)

        shown = Overlay(
            self,
            forward_metadata=self.link_metadata,
            kernel_dispatcher=_KDAExtend(states, self.link_extend),
            _convolve_prefill=convolve,
        )
        return super(LinkKDA, type(self)).forward_extend(shown, layer, batch, mixed_qkv, a, b, **kwargs)


@dataclasses.dataclass
class _KDAExtend:
    """In place of the backend's dispatcher of kernels, for one layer."""

    states: LayerStates
    kernel: Callable

    def extend(
        self, q: Any, k: Any, v: Any, g: Any, beta: Any, *, ssm_states: Any, return_intermediate_states: bool,
        track_state: torch.Tensor | None, **given: Any,
    ) -> Any:  # fmt: skip
        """As the stock dispatcher, but the states after pieces are written by `LayerStates`, and no states within them
        are returned other than in `track_state`."""

        def run(values: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
            if track_state is None:
                return self.kernel(q, k, values, g, beta, ssm_states=states, **given)
            within = track_state.new_empty(states.shape)
            out = self.kernel(q, k, values, g, beta, ssm_states=states, track_state=within, **given)
            track_state.copy_(within[..., : v.shape[-1], :])
            return out

        layer = DeltaRule(run, v)
        self.states.compute(layer)
        return (layer.outputs, None) if return_intermediate_states else layer.outputs

    def effective_extend_kernel(self, *_: Any) -> type[TritonKDAKernel]:
        """Which kernel it will be."""
        return TritonKDAKernel


class LinkMamba2(LinkStates):
    """For `Mamba2AttnBackend`. The mixer computes everything, with calls to kernels in its module."""

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        if (pieces := self.link_pieces) is not None:
            self.link_metadata = self._described(pieces)

    def link_tracked(self, metadata: Any, pieces: Pieces, of_rows: torch.Tensor) -> Any:
        """Blocks are those of the batch, but states within them are computed by piece."""
        return dataclasses.replace(metadata, track_ssm_seq_idx=of_rows[metadata.track_ssm_seq_idx])

    def _described(self, pieces: Pieces) -> Mamba2Metadata:
        of_tokens = np.repeat(np.arange(len(pieces.lens)), pieces.lens)
        begins = blocks(pieces.lens, self.mamba_chunk_size)
        seq_idx, indices, offsets = ints_to_device([of_tokens, *begins], pieces.cu_seqlens.device)
        mixed = Mamba2Metadata.MixedMetadata(
            has_initial_states=pieces.known,
            prep_initial_states=False,  # they are given in `_scan`
            chunk_size=self.mamba_chunk_size,
            seq_idx=seq_idx[None],
            chunk_indices=indices,
            chunk_offsets=offsets,
            extend_seq_lens_cpu=list(pieces.lens),
        )
        return dataclasses.replace(
            self.link_metadata,
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
        states = self.link_states(layer_id, pieces)
        with _wrapped(states, convolution):
            out, within, tracked = mixer.forward(
                hidden_states=hidden_states,
                output=output,
                layer_cache=self.req_to_token_pool.mamba2_layer_cache(layer_id),
                metadata=self.link_metadata,
                mup_vector=mup_vector,
                use_triton_causal_conv=use_triton_causal_conv,
            )
        self._track_mamba_state_extend(forward_batch, within, states.requests, self.link_metadata, track_states=tracked)
        return out


@contextmanager
def _wrapped(states: LayerStates, convolution: str) -> Iterator[None]:
    """Within, the kernels that SGLang's mixer calls for one layer run over pieces.

    convolution: the name of the one in its module.
    """

    def convolve(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """x: [dim, num_tokens]."""
        return states.convolve(lambda last: stock[convolution](x, *args, **kwargs | {"conv_states": last}), x.T)

    def scan(x: Any, dt: torch.Tensor, A: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, None, Any]:
        """Has the states after the pieces written, so that it returns only those within."""
        within = tracked = None

        def run(before: torch.Tensor) -> torch.Tensor:
            nonlocal within, tracked
            given = kwargs | {"initial_states": before, "state_dtype": torch.float32}
            within, after, tracked = stock["mamba_chunk_scan_combined"](x, dt, A, *args, **given)
            return after

        states.compute(Mamba2(run, log_decays(dt[0], A, kwargs["dt_bias"], states.pieces.cu_seqlens)))
        return within, None, tracked

    wrapped = {convolution: convolve, "mamba_chunk_scan_combined": scan}
    stock = {name: getattr(mamba, name) for name in wrapped}
    vars(mamba).update(wrapped)
    try:
        yield
    finally:
        vars(mamba).update(stock)
