"""Greedy answers of a Hugging Face model under the block mask: what a server with chunk reuse is compared with."""

import dataclasses

import project_paths  # noqa: F401 - puts the tests' oracle on the path
import torch
from oracle.block_mask import load_model, visibility
from oracle.segments import Segment, token_ids


@dataclasses.dataclass(frozen=True)
class Answer:
    """Generated tokens without the end of sequence. gap: between a step's best two log-probabilities, the smallest."""

    ids: list[int]
    gap: float


class Reference:
    """The tests' model and mask in any dtype and on any device.

    The prompt is computed in one pass under an explicit mask. Generated tokens see everything before them, so each is
    an ordinary step with the cached keys and values.
    """

    def __init__(self, model_path: str, dtype: torch.dtype, device: str):
        self.model = load_model(model_path, dtype, device)
        eos = self.model.generation_config.eos_token_id
        self.eos = set(eos if isinstance(eos, list) else [eos])

    @torch.inference_mode()
    def answer(self, segments: list[Segment], max_new_tokens: int) -> Answer:
        """Greedy decoding until the end of sequence or `max_new_tokens`."""
        prompt = torch.tensor([token_ids(segments)], device=self.model.device)
        visible = visibility(segments).to(self.model.device)
        mask = torch.zeros(visible.shape, dtype=self.model.dtype, device=self.model.device)
        mask = mask.masked_fill(~visible, torch.finfo(mask.dtype).min)[None, None]
        positions = torch.arange(prompt.shape[1], device=self.model.device)[None]
        out = self.model(prompt, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1)
        ids, gap = [], float("inf")
        while True:
            best = out.logits[0, -1].float().log_softmax(-1).topk(2)
            gap = min(gap, (best.values[0] - best.values[1]).item())
            token = best.indices[0].item()
            if token in self.eos:
                return Answer(ids, gap)
            ids.append(token)
            if len(ids) == max_new_tokens:
                return Answer(ids, gap)
            last = torch.tensor([[token]], device=self.model.device)
            position = torch.tensor([[prompt.shape[1] + len(ids) - 1]], device=self.model.device)
            out = self.model(last, position_ids=position, past_key_values=out.past_key_values, use_cache=True)
