"""Greedy answers of a Hugging Face model under the block mask: the reference for servers with chunk reuse."""

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from oracle.block_mask import load_model, visibility
from oracle.segments import Segment, token_ids

BATCH_SCORES = 1 << 24
"""The most attention scores per head in one batch."""


@dataclasses.dataclass(frozen=True)
class Claim:
    """The claim that greedy decoding of a prompt gives `output_ids` (without the end of sequence, at most `limit`)."""

    segments: list[Segment]
    output_ids: list[int]
    limit: int

    @property
    def length(self) -> int:
        return len(token_ids(self.segments)) + len(self.output_ids)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """gap: the smallest difference between a step's two best log-probabilities, up to the first token that differs."""

    same: bool
    gap: float


def in_fp32(layer: torch.nn.Linear) -> torch.nn.Linear:
    """A copy in fp32, which takes inputs of any dtype. The layer itself stays, since its weight may be tied."""
    wide = torch.nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    wide.weight = torch.nn.Parameter(layer.weight.detach().float())
    wide.register_forward_pre_hook(lambda _, given: (given[0].float(),))
    return wide


class Reference:
    """The tests' model and mask in any dtype and on any device.

    fp32_lm_head: logits are computed in fp32, as servers with --enable-fp32-lm-head do. In bf16 a logit of 8 to 16 is a
        multiple of 0.0625, so two tokens can tie.
    """

    def __init__(self, model_path: str, dtype: torch.dtype, device: str, fp32_lm_head: bool = False):
        self.model = load_model(model_path, dtype, device)
        if fp32_lm_head:
            self.model.set_output_embeddings(in_fp32(self.model.get_output_embeddings()))
        eos = self.model.generation_config.eos_token_id
        self.eos = set(eos if isinstance(eos, list) else [eos])

    def judge(self, claims: Sequence[Claim]) -> Iterator[Verdict]:
        """Returns a verdict on each claim.

        The claimed tokens are checked in one pass: they are right if each is the best after the ones before it, and the
        end of sequence is the best after all of them, unless they reach the limit.
        """
        batch: list[Claim] = []
        for claim in claims:
            if batch and (len(batch) + 1) * max(one.length for one in [*batch, claim]) ** 2 > BATCH_SCORES:
                yield from self._judge(batch)
                batch = []
            batch.append(claim)
        if batch:
            yield from self._judge(batch)

    def answer(self, segments: list[Segment], limit: int) -> list[int]:
        """Greedy decoding without the end of sequence. Every step runs the whole prompt again."""
        output_ids: list[int] = []
        while len(output_ids) < limit:
            token = self._last_logits([Claim(segments, output_ids, limit)])[0][-1].argmax().item()
            if token in self.eos:
                break
            output_ids.append(token)
        return output_ids

    def _judge(self, batch: list[Claim]) -> Iterator[Verdict]:
        for claim, logits in zip(batch, self._last_logits(batch), strict=True):
            expected = claim.output_ids if len(claim.output_ids) == claim.limit else [*claim.output_ids, None]
            values, best = logits[: len(expected)].log_softmax(-1).topk(2)
            gap = float("inf")
            for token, right, (first, second) in zip(expected, best[:, 0].tolist(), values.tolist(), strict=True):
                gap = min(gap, first - second)
                if not (right in self.eos if token is None else right == token):
                    yield Verdict(False, gap)
                    break
            else:
                yield Verdict(True, gap)

    @torch.inference_mode()
    def _last_logits(self, batch: list[Claim]) -> list[torch.Tensor]:
        """For each claim the logits after its prompt and after each token, [1 + len(output_ids), vocab_size]."""
        longest = max(claim.length for claim in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        visible = torch.eye(longest, dtype=torch.bool).repeat(len(batch), 1, 1)  # padding sees itself
        for row, claim in enumerate(batch):
            ids[row, : claim.length] = torch.tensor(token_ids(claim.segments) + claim.output_ids)
            visible[row, : claim.length, : claim.length] = visibility(claim.segments, len(claim.output_ids))
        mask = torch.zeros(visible.shape, dtype=self.model.dtype).masked_fill(
            ~visible, torch.finfo(self.model.dtype).min
        )
        device = self.model.device
        out = self.model(
            ids.to(device),
            attention_mask=mask[:, None].to(device),
            position_ids=torch.arange(longest, device=device).expand(len(batch), -1),
            use_cache=False,
        )
        ends = [(claim.length - len(claim.output_ids) - 1, claim.length) for claim in batch]
        return [logits[start:end].float().cpu() for logits, (start, end) in zip(out.logits, ends, strict=True)]
