"""A trained Comb model in the comparison of policies; its frozen decoder is the model under evaluation."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from oracle.segments import Segment
from research.quality.comb import KeyValues, load_comb

COMB = {"comb": False, "comb:chunks=1": True}
"""Names that are evaluated like policies, and whether each puts all chunks of a prompt into one."""


class CombModel:
    """Without chunks it answers like its decoder, so it only gets prompts with chunks."""

    def __init__(self, directory: Path, decoder: Mapping[str, torch.Tensor], device: str):
        """decoder: the weights of the model under evaluation. Raises ValueError if those in `directory` differ."""
        own, comb = load_comb(directory)
        for name, weight in own.state_dict().items():
            if not torch.equal(weight, decoder[name].float().cpu()):
                raise ValueError(f"{directory} is not of this model: {name} differs")
        self.decoder, self.comb, self.device = own.to(device).eval(), comb.to(device).eval(), device

    @property
    def bytes_per_token(self) -> int:
        return self.comb.bytes_per_token

    @torch.inference_mode()
    def start(self, segments: list[Segment], together: bool) -> "CombPrompt":
        """Encode the chunks of a prompt, to score and generate after its text.  together: as one chunk."""
        chunks = [segment.ids for segment in segments if segment.kind == "chunk"]
        text = [token for segment in segments if segment.kind == "text" for token in segment.ids]
        chunks = [tuple(token for ids in chunks for token in ids)] if together else chunks
        encoded = [self.encode(ids) for ids in chunks]
        joined = [
            tuple(torch.cat(parts, 2) for parts in zip(*layer, strict=True)) for layer in zip(*encoded, strict=True)
        ]
        return CombPrompt(self, text, joined)

    def encode(self, ids: Sequence[int]) -> KeyValues:
        count = len(ids)
        mask = torch.ones(1, 1, count, count, dtype=torch.bool, device=self.device)
        tokens = torch.tensor([list(ids)], device=self.device)
        return self.comb.encode(self.decoder, tokens, torch.arange(count, device=self.device)[None], mask)


class CombPrompt:
    """Like the result of `Prototype.start`, for a Comb model. Every call recomputes the text, which is short."""

    def __init__(self, model: CombModel, text: Sequence[int], chunks: KeyValues):
        self.model, self.text, self.chunks = model, list(text), chunks

    @torch.inference_mode()
    def score(self, tokens: Sequence[int]) -> torch.Tensor:
        """The log-probabilities for the position of each of `tokens`, [len(tokens), vocab_size] fp32."""
        model, ids = self.model, [*self.text, *tokens[:-1]]
        count = len(ids)
        causal = torch.ones(1, 1, count, count, dtype=torch.bool, device=model.device).tril()
        sees = torch.ones(1, 1, count, self.chunks[0][0].shape[2], dtype=torch.bool, device=model.device)
        positions = torch.arange(count, device=model.device)[None]
        given = torch.tensor([ids], device=model.device)
        states = model.comb.states(model.decoder, given, positions, causal, self.chunks, sees)
        return model.decoder.logits(states[0, len(self.text) - 1 :]).float().log_softmax(-1)

    def greedy(self, limit: int, end: int) -> list[int]:
        """The best tokens, at most `limit`, up to the token `end`."""
        tokens: list[int] = []
        while len(tokens) < limit:
            token = int(self.score([*tokens, end])[-1].argmax())
            if token == end:
                break
            tokens.append(token)
        return tokens
