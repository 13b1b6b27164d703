"""Makes SGLang verify drafts by sampling on a CPU, as `speculation_on_cpu` does greedily: plain PyTorch replaces its
kernel, and gets the probabilities of SGLang's forward pass."""

from typing import Any

import torch

from fakes import speculation_on_cpu


def load() -> None:
    """The SGLang plugin; runs in each process that SGLang starts."""
    from sglang.srt.speculative import eagle_utils

    speculation_on_cpu.load()
    eagle_utils._verify_uses_greedy = lambda *, is_all_greedy, **_: is_all_greedy
    eagle_utils.tree_speculative_sampling_target_only = _sample_chain
    eagle_utils.top_k_renorm_prob = _most_likely
    eagle_utils.sampling_softmax = lambda logits, temperatures: (logits.float() / temperatures).softmax(-1)


def _most_likely(probs: torch.Tensor, top_ks: torch.Tensor) -> torch.Tensor:
    """The `top_ks` most likely tokens of each row. Greedy requests in a batch, as fills are, ask for the first."""
    last = (top_ks.long().clamp(max=probs.shape[-1]) - 1)[:, None]
    kept = probs.where(probs >= probs.sort(descending=True).values.gather(1, last), 0)
    return kept / kept.sum(1, keepdim=True)


def _sample_chain(
    *,
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    **_: Any,
) -> None:
    """Accept each draft as often as the model would say it, and sample another token in place of the first refused.

    candidates: [bs, n], of which the first is no draft.  target_probs: [bs, n, vocab_size], after each of them.
    """
    accept_index.fill_(-1)
    for b, (drafts, probs) in enumerate(zip(candidates.tolist(), target_probs.clone(), strict=True)):
        accepted = 0
        accept_index[b, 0] = retrive_index[b, 0]
        for draft, coin in zip(drafts[1:], uniform_samples[b].tolist(), strict=False):
            if coin >= probs[accepted, draft]:
                probs[accepted, draft] = 0
                break
            predicts[retrive_index[b, accepted]] = draft
            accepted += 1
            accept_index[b, accepted] = retrive_index[b, accepted]
        sums = probs[accepted].cumsum(0)
        token = int((sums <= uniform_samples_for_final_sampling[b] * sums[-1]).sum())
        predicts[retrive_index[b, accepted]] = min(token, len(sums) - 1)
        accept_token_num[b] = accepted
