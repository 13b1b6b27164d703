"""Tokens that models were trained to see around chunks: where prompts get them, and what is refused."""

import json
import random

import pytest

from fakes.server import FakeServer, new_frontend
from sglang_lazy.core.policy import TrainedTokens
from sglang_lazy.policies import get_policy
from sglang_lazy.serving.plans import Plan
from sglang_lazy.serving.tokenization import TokenizedPrompt
from sglang_lazy.serving.trained_tokens import FILE, add_trained_tokens, load, remove_trained_tokens, tokens_for

VOCAB_SIZE = 100
PROMPT = TokenizedPrompt([1, 2, 3, 4, 5, 6, 7], ((1, 3), (3, 4), (5, 7)))


def test_link_tokens_follow_chunks_in_order():
    """The numbering starts over where a prompt has more chunks than tokens."""
    prompt = add_trained_tokens(PROMPT, get_policy("kvlink:tokens=2"), TrainedTokens(link=(90, 91, 92, 93)))
    assert prompt.input_ids == [1, 2, 3, 90, 91, 4, 92, 93, 5, 6, 7, 90, 91]
    assert prompt.chunks == ((1, 3), (5, 6), (9, 11))


def test_packet_tokens_are_part_of_the_chunk():
    prompt = add_trained_tokens(PROMPT, get_policy("packet"), TrainedTokens(before=(80, 81), behind=(82,)))
    assert prompt.input_ids == [1, 80, 81, 2, 3, 82, 80, 81, 4, 82, 5, 80, 81, 6, 7, 82]
    assert prompt.chunks == ((1, 6), (6, 10), (11, 16))


@pytest.mark.parametrize("link", ["kvlink", "kvlink:tokens=3", "packet", "base+packet"])
def test_wrapping_is_undone(link):
    dice = random.Random(link)
    trained = TrainedTokens((80,), (81, 82), tuple(range(90, 97)))
    for _ in range(50):
        cuts = sorted(dice.sample(range(12), 6))
        prompt = TokenizedPrompt([dice.randrange(9) for _ in range(12)], tuple(zip(cuts[::2], cuts[1::2], strict=True)))
        put = add_trained_tokens(prompt, get_policy(link), trained)
        assert len(put.input_ids) > 12
        assert remove_trained_tokens(put.input_ids, put.chunks, get_policy(link), trained) == prompt


def test_only_policies_that_want_them_get_tokens(tmp_path):
    (tmp_path / FILE).write_text(json.dumps({"packet": {"before": [80], "behind": [81]}}))
    prompts = new_frontend(FakeServer(vocab_size=VOCAB_SIZE, model_path=str(tmp_path))).prompts
    for link in ("block", "base+query:ratio=0.1", "full"):
        plan = Plan.of(PROMPT.chunks, get_policy(link))
        assert prompts.with_trained_tokens(PROMPT, plan.policy) == PROMPT
        assert prompts.without_trained_tokens(PROMPT.input_ids, plan) == PROMPT
    packet = get_policy("packet")
    prompt = prompts.with_trained_tokens(PROMPT, packet)
    assert prompts.without_trained_tokens(prompt.input_ids, Plan.of(prompt.chunks, packet)) == PROMPT
    with pytest.raises(ValueError, match="link kvlink: this model was not trained for it"):
        prompts.with_trained_tokens(PROMPT, get_policy("kvlink"))


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{",
        '{"packet": []}',
        '{"packet": {"before": 3}}',
        '{"packet": {"before": [true]}}',
        '{"packet": {"before": [-1]}}',
        '{"packet": {"before": [100]}}',
        '{"packet": {"above": [3]}}',
    ],
)
def test_malformed_files(tmp_path, content):
    (tmp_path / FILE).write_text(content)
    with pytest.raises(ValueError, match=FILE):
        load(str(tmp_path), VOCAB_SIZE)


@pytest.mark.parametrize("content", [None, "{}", '{"packet": {}}', '{"kvlink": {"before": [3]}}'])
def test_models_without_tokens(tmp_path, content):
    if content is not None:
        (tmp_path / FILE).write_text(content)
    for link in ("packet", "kvlink"):
        with pytest.raises(ValueError, match=f"link {link}: this model was not trained for it"):
            tokens_for(get_policy(link), str(tmp_path), VOCAB_SIZE)
