"""The oracle: a Hugging Face model in fp32 under an explicit mask that lets a chunk see only itself."""

import torch
import transformers

from .segments import Segment, token_ids

MIN_GAP = 1e-3  # between the best two log-probabilities: ten times what an implementation may be off


def visibility(segments: list[Segment], num_generated: int = 0) -> torch.Tensor:
    """Which token (row) attends to which (column), diagonal included.

    Returns [n, n] bool, where n counts the prompt and `num_generated` tokens after it. A text token sees every
    token before it; a chunk token sees the earlier tokens of its own chunk; the last token of the prompt and the
    generated tokens are text, wherever they stand.
    """
    # start[i]: the first position that token i may see
    start = []
    for segment in segments:
        start += [len(start) if segment.kind == "chunk" else 0] * len(segment.ids)
    start[-1] = 0
    start += [0] * num_generated
    position = torch.arange(len(start))
    return (position[None, :] <= position[:, None]) & (position[None, :] >= torch.tensor(start)[:, None])


class Oracle:
    """One model, its positions absolute everywhere: rotary scores depend on distances only, so a chunk encoded at
    its place under the mask is the chunk encoded alone."""

    def __init__(self, model_path: str):
        self.model = load_model(model_path, torch.float32, "cpu")

    @torch.inference_mode()
    def logprobs(self, segments: list[Segment], generated: list[int] = ()) -> torch.Tensor:
        """Log-probabilities of the next token after the prompt and after each generated token.

        Returns [1 + len(generated), vocab_size] fp32: row i is the distribution of generated token i.
        """
        ids = token_ids(segments) + list(generated)
        logits = self._forward(torch.tensor(ids), visibility(segments, len(generated)))
        return logits[len(ids) - len(generated) - 1 :].log_softmax(-1)

    def generate(self, segments: list[Segment], num_tokens: int) -> tuple[list[int], list[float]]:
        """Greedy decoding: the tokens and the log-probability of each. Every step runs the whole prompt again."""
        tokens, chosen = [], []
        for _ in range(num_tokens):
            logprob, token = self.logprobs(segments, tokens)[-1].max(-1)
            tokens.append(token.item())
            chosen.append(logprob.item())
        return tokens, chosen

    def _forward(self, ids: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        """ids: [n]; visible: [n, n] bool. Returns logits [n, vocab_size] fp32."""
        mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
        position_ids = torch.arange(len(ids))[None]
        out = self.model(ids[None], attention_mask=mask[None, None], position_ids=position_ids, use_cache=False)
        return out.logits[0].float()


def greedy(logprobs: torch.Tensor) -> list[int]:
    """The best token of each row. Raises ValueError where another comes close: such a prompt is to be drawn anew."""
    best = logprobs.topk(2)
    gap = (best.values[:, 0] - best.values[:, 1]).min().item()
    if gap < MIN_GAP:
        raise ValueError(f"the best two tokens are only {gap:.1e} apart, too close to tell right from wrong")
    return best.indices[:, 0].tolist()


def load_model(model_path: str, dtype: torch.dtype, device: str) -> transformers.PreTrainedModel:
    """The model for masks of any kind, with the rotary frequencies that SGLang serves it with."""
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype, attn_implementation="eager")
    _fix_dynamic_ntk(model)
    return model.to(device).eval()


def _fix_dynamic_ntk(model) -> None:
    """Give a dynamic-NTK model the frequencies SGLang serves it with.

    Hugging Face raises the rotary base with the length of the prompt at hand; SGLang fixes it at the value for the
    longest context, factor times max_position_embeddings, so that cached keys stay valid.
    """
    rotary = getattr(model.base_model, "rotary_emb", None)
    if getattr(rotary, "rope_type", None) != "dynamic":
        return
    rope = model.config.rope_parameters
    factor, dim = rope["factor"], 2 * len(rotary.inv_freq)
    base = rope["rope_theta"] * (factor * factor - (factor - 1)) ** (dim / (dim - 2))
    rotary.inv_freq = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    rotary.rope_type = "default"  # or the forward pass would compute the base anew
