"""The oracle for drafts from the target's KV: Hugging Face's Gemma 4 and its assistant."""

import torch
import transformers

from .block_mask import attention_mask, load_model, visibility
from .segments import Segment, token_ids


class Assistant:
    """target, draft: the folders of a Gemma 4 and of its assistant."""

    def __init__(self, target: str, draft: str):
        self.target = load_model(target, torch.float32, "cpu")
        kind = transformers.Gemma4AssistantForCausalLM
        self.draft = kind.from_pretrained(draft, dtype=torch.float32, attn_implementation="eager").eval()

    @torch.inference_mode()
    def drafts(self, segments: list[Segment], generated: list[int], num_drafts: int) -> list[int]:
        """The best drafts after a prompt and at least one generated token, of which the target has not read the last.

        As in SGLang, all are drafted at the position of the last token that the target has read, counted from zero,
        from keys at positions counted from one.
        """
        ids = torch.tensor([token_ids(segments) + generated[:-1]])
        num_read = ids.shape[1]
        positions, last = torch.arange(num_read), torch.tensor([num_read - 1])
        read = self.target(
            ids,
            attention_mask=attention_mask(self.target, visibility(segments, len(generated) - 1), positions, positions),
            position_ids=positions[None],
            output_hidden_states=True,
            return_shared_kv_states=True,
            use_cache=False,
        )
        hidden, token, drafts = read.hidden_states[-1][:, -1:], generated[-1], []
        sees = attention_mask(self.draft, torch.ones(1, num_read, dtype=torch.bool), last, positions)
        for _ in range(num_drafts):
            embedded = self.target.get_input_embeddings()(torch.tensor([[token]]))
            out = self.draft.model(
                inputs_embeds=self.draft.pre_projection(torch.cat([embedded, hidden], -1)),
                attention_mask=sees,
                position_ids=last[None],
                shared_kv_states=dict(read.shared_kv_states),
                use_cache=False,
            ).last_hidden_state
            hidden, token = self.draft.post_projection(out), self.draft.lm_head(out).argmax().item()
            drafts.append(token)
        return drafts
