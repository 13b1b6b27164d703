"""An EAGLE head drafts in training as it does when it is served."""

import pytest
import torch

from benchmark.report.speculation import acceptance, mean_length
from benchmark.sample import TRAINED
from oracle.block_mask import visibility
from oracle.segments import chunk, text, token_ids
from research.quality.acceptance import make_prompts, served
from research.quality.draft_head import DraftHead
from research.quality.llama import Llama, Shape, load_llama, rotate
from research.quality.train_draft import Recipe, Trainer, following

SMALL = Shape(50, hidden_size=32, intermediate_size=48, num_attention_heads=4, head_dim=8, max_position_embeddings=64)
PROMPT = [text([1, 2]), chunk([3, 4, 5]), chunk([6, 7, 8, 9]), text([10, 11, 12, 13, 14, 15])]


def test_tokens_that_follow():
    """Chunks end with their own first tokens, so that what is computed of them depends on them alone."""
    assert following(PROMPT)[:-1] == [2, 3, 4, 5, 3, 7, 8, 9, 6, 11, 12, 13, 14, 15]


def one_by_one(head, target, states, after, sees, start, steps):
    """A chain that begins at slot `start`, slot by slot: each pass has one query and the KV of the slots before."""
    layer, cos_sin = head.layers[0], target.rotary[:, None, None]

    def project(state, slot):
        x = head.fc(torch.cat([target.model.embed_tokens.weight[after[slot]], state]))
        q, k, v = (
            p(x).unflatten(-1, (-1, SMALL.head_dim))
            for p in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
        )
        turned = [rotate(y[None, :, None], cos_sin[..., slot : slot + 1, :])[0, :, 0] for y in (q, k)]
        return x, turned[0], turned[1].repeat_interleave(2, 0), v.repeat_interleave(2, 0)

    cached = {slot: project(states[slot], slot)[2:] for slot in range(start)}
    outputs, state = [], states[start]
    for slot in range(start, start + steps):
        x, query, key, value = project(state, slot)
        cached[slot] = key, value
        seen = [cached[other] for other in range(slot + 1) if sees[slot, other]]
        scores = torch.stack([(query * key).sum(-1) for key, _ in seen]) / SMALL.head_dim**0.5
        read = (scores.softmax(0)[..., None] * torch.stack([value for _, value in seen])).sum(0)
        x = x + layer.self_attn.o_proj(read.flatten())
        state = x + layer.mlp(layer.post_attention_layernorm(x))
        outputs.append(state)
    return outputs


def test_steps_of_a_chain():
    torch.manual_seed(0)
    target, head = Llama(SMALL), DraftHead(SMALL)
    torch.nn.init.normal_(head.fc.weight, std=0.3)
    for weight in head.layers.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    states, after, sees = torch.randn(1, 15, 32), torch.tensor([following(PROMPT)]), visibility(PROMPT)[None]
    outputs = head(target, states, after, sees, num_last=6, steps=3)
    for start in range(9, 13):
        for step, expected in enumerate(one_by_one(head, target, states[0], after[0], sees[0], start, 3)):
            torch.testing.assert_close(outputs[step][0, start + step - 9], expected, atol=1e-3, rtol=1e-3)


def runs(target, head, prompt, answer, chain=3):
    """How many drafts each verification of an answer accepts, by one pass under an explicit mask; the last one's may be
    more, beyond the answer's end."""
    tokens = [*token_ids(prompt), *answer]
    whole = [*prompt, text(answer)]
    sees = visibility(whole)[None]
    states = target.states(torch.tensor([tokens]), torch.arange(len(tokens))[None], sees[:, None])
    outputs = head(target, states, torch.tensor([following(whole)]), sees, len(answer) + 1, chain)
    guesses = [target.logits(output)[0].argmax(-1).tolist() for output in outputs]
    found, done = [], 1  # the first token is not drafted
    while done < len(answer):
        left = min(chain, len(answer) - done)
        right = [guesses[step][done - 1 + step] == answer[done + step] for step in range(left)]
        found.append([*right, False].index(False))
        done += found[-1] + 1
    return found


@pytest.mark.slow
def test_a_server_accepts_what_the_reference_does(tmp_path):
    """Plain prompts, chunks, and chunks of a document each."""
    trainer = Trainer(Recipe(steps=24, rows=2, warm_up=4), TRAINED)
    for number in range(24):
        trainer.step(number)
    trainer.head.save(tmp_path / "draft", TRAINED)
    target, head = load_llama(TRAINED), DraftHead(trainer.target.shape).load(tmp_path / "draft")
    prompts = [*make_prompts(2), *make_prompts(1, by_document=True)]
    prompts.append([text(token_ids(prompts[0]))])
    lengths = set()
    with served(TRAINED, tmp_path / "draft") as asked, torch.inference_mode():
        for prompt in prompts:
            params = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
            output = asked.engine.generate(segments=[part.to_request() for part in prompt], sampling_params=params)
            *whole, last = runs(target, head, prompt, output["output_ids"])
            histogram = output["meta_info"]["spec_correct_drafts_histogram"]
            left = [count - whole.count(length) for length, count in enumerate(histogram)]
            assert sum(left) == sum(map(abs, left)) == 1 and left.index(1) >= last, (histogram, whole, last)
            lengths |= set(whole)
    assert len(lengths) > 1


def test_table(tmp_path):
    """Means are over verifications, not over prompts."""
    file = tmp_path / "rows.jsonl"
    file.write_text(
        '{"draft": "d", "prompts": "plain", "accepted": [[0, 0, 0, 2], [4]]}\n'
        '{"draft": "d", "prompts": "chunks", "accepted": [[0, 2], [0, 2]]}\n'
    )
    assert mean_length([[0, 0, 0, 2], [4]]) == 2
    assert acceptance([file]).splitlines()[2:] == [
        "| plain | 2.00 |  |",
        "| chunks | 2.00 | 100.0% (50.0% to 200.0%) |",
    ]


def test_rows_have_both_masks():
    rows = [row for number in range(4) for row in Trainer(Recipe(), TRAINED).rows(number)]
    kinds = {frozenset(segment.kind for segment in row) for row in rows}
    assert kinds == {frozenset({"text"}), frozenset({"text", "chunk"})}
    assert all(len(token_ids(row)) >= Recipe().length for row in rows)
