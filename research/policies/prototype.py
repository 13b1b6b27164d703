"""The policies' oracle, fast enough for evaluations: computes what several policies share for a prompt only once."""

from collections.abc import Sequence

import torch

from oracle.policies import Layers, PolicyOracle, Ranges
from oracle.segments import Segment


class Prototype(PolicyOracle):
    """Caches fills and scores of the last prompt, and uses PyTorch's fused attention unless weights are needed."""

    def __init__(self, model_path: str, dtype: torch.dtype = torch.float32, device: str = "cpu"):
        super().__init__(model_path, dtype, device)
        self.tokens = None
        self.remembered: dict = {}

    def fill(self, segments: list[Segment], preamble: Sequence[int] = ()) -> Layers:
        return self._once("fill", segments, preamble, super().fill)

    def attention_scores(self, segments: list[Segment], preamble: Sequence[int] = ()) -> torch.Tensor:
        return self._once("attention", segments, preamble, super().attention_scores)

    def blend_scores(self, segments: list[Segment], preamble: Sequence[int] = ()) -> torch.Tensor:
        return self._once("blend", segments, preamble, super().blend_scores)

    def second_layer_keys(self, ids: Sequence[int]) -> torch.Tensor:
        body = self.model.base_model
        layers = body.layers
        body.layers = layers[:2]
        try:
            return super().second_layer_keys(ids)
        finally:
            body.layers = layers

    def forward(self, *args, output_attentions: bool = False, **options):
        self.model.set_attn_implementation("eager" if output_attentions else "sdpa")
        return super().forward(*args, output_attentions=output_attentions, **options)

    @torch.inference_mode()
    def start(self, segments: list[Segment], kept: Sequence[Ranges], preamble: Sequence[int] = ()) -> "Prompt":
        """Compute the prompt, for scoring and generating after it."""
        output = self.extend(segments, (), kept, preamble, logits_to_keep=1)
        return Prompt(self.model, output.past_key_values, output.logits[0])

    def _once(self, name: str, segments: list[Segment], preamble: Sequence[int], compute):
        if segments != self.tokens:
            self.tokens, self.remembered = list(segments), {}
        key = (name, tuple(preamble))
        if key not in self.remembered:
            self.remembered[key] = compute(segments, preamble)
        return self.remembered[key]


class Prompt:
    """A computed prompt. Tokens scored or generated after it are dropped afterwards."""

    def __init__(self, model, cache, logits: torch.Tensor):
        """logits: [1, vocab_size], after the last token."""
        self.model, self.cache, self.logits = model, cache, logits
        self.length = cache.get_seq_length()

    @torch.inference_mode()
    def score(self, tokens: Sequence[int]) -> torch.Tensor:
        """The log-probabilities for the position of each of `tokens`, [len(tokens), vocab_size] fp32."""
        logits = [self.logits, self._forward(tokens[:-1])] if len(tokens) > 1 else [self.logits]
        self.cache.crop(self.length)
        return torch.cat(logits).float().log_softmax(-1)

    @torch.inference_mode()
    def greedy(self, limit: int, end: int) -> list[int]:
        """The best tokens, at most `limit`, up to the token `end`."""
        tokens: list[int] = []
        token = self.logits[0].argmax().item()
        while token != end and len(tokens) < limit:
            tokens.append(token)
            token = self._forward([token])[-1].argmax().item()
        self.cache.crop(self.length)
        return tokens

    def _forward(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits after each of `tokens`, [len(tokens), vocab_size]; the tokens stay in the cache."""
        start = self.cache.get_seq_length()
        position_ids = torch.arange(start, start + len(tokens), device=self.model.device)[None]
        ids = torch.tensor([list(tokens)], device=self.model.device)
        return self.model(ids, position_ids=position_ids, past_key_values=self.cache).logits[0]
