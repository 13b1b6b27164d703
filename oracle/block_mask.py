"""The oracle: a Hugging Face model in fp32 under an explicit mask that lets a chunk see only itself."""

import torch
import transformers
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from .models.build import model_class
from .segments import Segment, token_ids

MIN_GAP = 1e-3  # between the two best log-probabilities: ten times the tolerated error


def visibility(segments: list[Segment], num_generated: int = 0) -> torch.Tensor:
    """Whether a token (row) attends to another (column), including itself.

    Returns [n, n] bool, where n counts the prompt and `num_generated` tokens after it. A text token sees every
    token before it; a chunk token sees the earlier tokens of its own chunk; the last token of the prompt and the
    generated tokens are text, wherever they stand.
    """
    start = first_visible(segments, num_generated)
    position = torch.arange(len(start))
    return (position[None, :] <= position[:, None]) & (position[None, :] >= start[:, None])


def first_visible(segments: list[Segment], num_generated: int = 0) -> torch.Tensor:
    """The first position that each token may see, [n]: 0 for text, the beginning of the chunk for chunk tokens."""
    start = []
    for segment in segments:
        start += [len(start) if segment.kind == "chunk" else 0] * len(segment.ids)
    start[-1] = 0
    return torch.tensor(start + [0] * num_generated)


def attention_mask(
    model: transformers.PreTrainedModel, visible: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor | dict[str, torch.Tensor]:
    """The model's `attention_mask`: one for all layers, or one per kind of layer.

    visible: [n, m] bool, without windows.  queries, keys: positions, [n] and [m]. A layer with a window of W sees
    distances below W.
    """

    def additive(seen: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(seen.shape, dtype=model.dtype, device=seen.device)
        return mask.masked_fill(~seen, torch.finfo(model.dtype).min)[None, None]

    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    if "sliding_attention" not in kinds:
        return additive(visible)
    near = queries[:, None] - keys[None, :] < config.sliding_window
    masks = {"full_attention": additive(visible), "sliding_attention": additive(visible & near)}
    return {kind: masks[kind] for kind in kinds}


class Oracle:
    """A model with absolute positions: rotary scores depend only on distances, so a chunk encoded in place under the
    mask equals the chunk encoded alone."""

    def __init__(self, model_path: str, dtype: torch.dtype = torch.float32, device: str = "cpu"):
        self.model = load_model(model_path, dtype, device)

    @torch.inference_mode()
    def logprobs(self, segments: list[Segment], generated: list[int] = ()) -> torch.Tensor:
        """Log-probabilities of the next token after the prompt and after each generated token.

        Returns [1 + len(generated), vocab_size] fp32, on the CPU: row i is the distribution of generated token i.
        """
        ids = token_ids(segments) + list(generated)
        logits = self._forward(torch.tensor(ids), visibility(segments, len(generated)))
        return logits[len(ids) - len(generated) - 1 :].log_softmax(-1).cpu()

    def generate(self, segments: list[Segment], num_tokens: int) -> tuple[list[int], list[float]]:
        """Greedy decoding: the tokens and their log-probabilities. Every step runs the whole prompt again."""
        tokens, chosen = [], []
        for _ in range(num_tokens):
            logprob, token = self.logprobs(segments, tokens)[-1].max(-1)
            tokens.append(token.item())
            chosen.append(logprob.item())
        return tokens, chosen

    def _forward(self, ids: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        """ids: [n]; visible: [n, n] bool. Returns logits [n, vocab_size] fp32."""
        ids, visible = ids.to(self.model.device), visible.to(self.model.device)
        positions = torch.arange(len(ids), device=ids.device)
        mask = attention_mask(self.model, visible, positions, positions)
        out = self.model(ids[None], attention_mask=mask, position_ids=positions[None], use_cache=False)
        return out.logits[0].float()


class RoundedCache:
    """Makes a Hugging Face Llama round its keys and values to a cache's dtype.

    A key is rounded at the position it is stored for, relative to the beginning of its chunk.
    scales: keys and values are divided by these before rounding, and multiplied by them when read.
    """

    def __init__(self, model, dtype: torch.dtype, scales: tuple[float, float] = (1.0, 1.0)):
        self.model, self.dtype, (self.k_scale, v_scale) = model.model, dtype, scales
        for layer in self.model.layers:
            layer.self_attn.k_proj.register_forward_hook(lambda _module, _args, keys: self._round_keys(keys))
            layer.self_attn.v_proj.register_forward_hook(lambda _module, _args, values: self._round(values, v_scale))

    def expect(self, segments: list[Segment], num_generated: int) -> None:
        """Set the segments of the next forward pass."""
        start = first_visible(segments, num_generated)
        self.position = (torch.arange(len(start)) - start).to(self.model.device)

    def _round(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return (x / scale).to(self.dtype).to(x.dtype) * scale

    def _round_keys(self, keys: torch.Tensor) -> torch.Tensor:
        """Rotate, round and rotate back.  keys: [1, n, num_kv_heads * head_dim], before the rotation."""
        by_head = keys.unflatten(-1, (-1, self.model.config.head_dim)).transpose(1, 2)
        cos, sin = self.model.rotary_emb(keys, self.position[None])
        rounded = self._round(apply_rotary_pos_emb(by_head, by_head, cos, sin)[1], self.k_scale)
        return apply_rotary_pos_emb(rounded, rounded, cos, -sin)[1].transpose(1, 2).flatten(2)


class RoundingOracle(Oracle):
    """The oracle of a Llama with a cache of a narrower dtype."""

    def __init__(
        self,
        model_path: str,
        cache_dtype: torch.dtype,
        scales: tuple[float, float] = (1.0, 1.0),
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ):
        super().__init__(model_path, dtype, device)
        self.cache = RoundedCache(self.model, cache_dtype, scales)

    def logprobs(self, segments: list[Segment], generated: list[int] = ()) -> torch.Tensor:
        self.cache.expect(segments, len(generated))
        return super().logprobs(segments, generated)


def greedy(logprobs: torch.Tensor) -> list[int]:
    """The best token of each row. Raises ValueError if the runner-up is close; tests then draw another prompt."""
    best = logprobs.topk(2)
    gap = (best.values[:, 0] - best.values[:, 1]).min().item()
    if gap < MIN_GAP:
        raise ValueError(f"the best two tokens are only {gap:.1e} apart, too close to tell right from wrong")
    return best.indices[:, 0].tolist()


def load_model(model_path: str, dtype: torch.dtype, device: str) -> transformers.PreTrainedModel:
    """Load the model for arbitrary masks, with the rotary frequencies and windows that SGLang uses."""
    kind = model_class(transformers.AutoConfig.from_pretrained(model_path))
    model = kind.from_pretrained(model_path, dtype=dtype, attn_implementation="eager")
    _fix_dynamic_ntk(model)
    if model.config.model_type in ("gemma3", "gemma4", "gemma4_unified"):
        _count_from_one(model)
    if model.config.model_type == "cohere2":
        model.config.sliding_window += 1  # SGLang does not count the token itself
    return model.to(device).eval()


def _count_from_one(model) -> None:
    """Give a Gemma that sees images the positions that SGLang rotates by, which begin at one.

    Scores depend on distances only, but angles are products in fp32, whose errors grow with the position and are others
    one position further: 1.4e-4 of a log-probability at position 890.
    """

    def shift(_rotary, args):
        hidden, positions, *kind = args
        return hidden, positions + 1, *kind

    model.get_decoder().rotary_emb.register_forward_pre_hook(shift)


def _fix_dynamic_ntk(model) -> None:
    """Give a dynamic-NTK model the frequencies that SGLang uses.

    Hugging Face raises the rotary base with the current prompt's length; SGLang fixes it at the value for the
    longest context, factor times max_position_embeddings, so that cached keys stay valid.
    """
    rotary = getattr(model.base_model, "rotary_emb", None)
    if getattr(rotary, "rope_type", None) != "dynamic":
        return
    rope = model.config.rope_parameters
    factor, dim = rope["factor"], 2 * len(rotary.inv_freq)
    base = rope["rope_theta"] * (factor * factor - (factor - 1)) ** (dim / (dim - 2))
    rotary.inv_freq = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    rotary.rope_type = "default"  # or the forward pass would recompute the base
