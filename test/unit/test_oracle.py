"""The end-to-end oracle against facts that do not come from it."""

import functools

import pytest
import torch
from transformers import AutoTokenizer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from oracle.block_mask import Oracle, RoundingOracle, attention_mask, visibility
from oracle.models import MODELS
from oracle.models.build import build, model_class, random_model
from oracle.models.spec import MAX_POSITION
from oracle.scenarios import SCENARIOS, Dice, build_scenario
from oracle.segments import chunk, text, token_ids
from oracle.tokenizer import BOS, FIRST_ORDINARY_ID, VOCAB_SIZE

# The oracle of each model changes with Hugging Face's code, or with ours for all models.
every_model = pytest.mark.parametrize(
    "name", [name if spec.core else pytest.param(name, marks=pytest.mark.nightly) for name, spec in MODELS.items()]
)


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """load(name): a model's oracle, cached for the module."""
    folder = tmp_path_factory.mktemp("models")
    return functools.cache(lambda name: Oracle(build(name, folder)))


def logits(oracle, segments, *, ids=None, position_ids=None):
    """The model's logits under the mask of `segments`: [n, vocab_size]. `ids` and `position_ids` ([n]) override
    theirs."""
    ids = torch.tensor(token_ids(segments) if ids is None else ids)
    position_ids = torch.arange(len(ids)) if position_ids is None else position_ids
    places = torch.arange(len(ids))
    mask = attention_mask(oracle.model, visibility(segments), places, places)
    with torch.inference_mode():
        return oracle.model(ids[None], attention_mask=mask, position_ids=position_ids[None]).logits[0]


def test_rounding_to_the_same_type_changes_nothing(load, tmp_path):
    """Rotating keys to their stored positions and back is exact up to the last bits of fp32."""
    dice = Dice(1)
    segments = [text(dice.ids(3)), chunk(dice.ids(20)), text(dice.ids(4))]
    rounding = RoundingOracle(build("llama", tmp_path), torch.float32)
    assert torch.allclose(rounding.logprobs(segments, [20]), load("llama").logprobs(segments, [20]), atol=1e-5)


def test_visibility_of_a_small_prompt():
    """Text of 2, a chunk of 2, text of 1, a chunk of 3 whose last token ends the prompt, 1 generated token."""
    segments = [text([0, 0]), chunk([0, 0]), text([0]), chunk([0, 0, 0])]
    expected = """
        1 . . . . . . . .
        1 1 . . . . . . .
        . . 1 . . . . . .
        . . 1 1 . . . . .
        1 1 1 1 1 . . . .
        . . . . . 1 . . .
        . . . . . 1 1 . .
        1 1 1 1 1 1 1 1 .
        1 1 1 1 1 1 1 1 1
    """
    rows = [[cell == "1" for cell in row.split()] for row in expected.strip().splitlines()]
    assert visibility(segments, 1).tolist() == rows


@every_model
def test_all_text_is_plain_generation(load, name):
    """Without chunks, the oracle equals Hugging Face's own greedy generation, with its cache and mask."""
    oracle, prompt = load(name), Dice(name).ids(50)
    expected = oracle.model.generate(
        torch.tensor([prompt]),
        max_new_tokens=8,
        do_sample=False,
        eos_token_id=VOCAB_SIZE,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens, chosen = oracle.generate([text(prompt[:20]), text(prompt[20:])], 8)
    assert tokens == expected.sequences[0, 50:].tolist()
    expected_logprobs = torch.cat(expected.logits).log_softmax(-1)
    assert torch.allclose(oracle.logprobs([text(prompt)], tokens[:-1]), expected_logprobs, atol=1e-4, rtol=0)
    assert chosen == pytest.approx(expected_logprobs.amax(-1).tolist(), abs=1e-4)


@every_model
def test_chunk_in_a_prompt_is_the_chunk_alone(load, name):
    """The logits at a chunk's tokens are the stock model's on the chunk by itself, from position 0."""
    oracle, dice = load(name), Dice(name)
    first, second = dice.chunk(30), dice.chunk(21)
    in_prompt = logits(oracle, [dice.text(300), first, dice.text(2), second, dice.text(3)])
    with torch.inference_mode():
        for doc, offset in ((first, 300), (second, 332)):
            alone = oracle.model(torch.tensor([doc.ids])).logits[0]
            assert torch.allclose(in_prompt[offset : offset + len(doc.ids)], alone, atol=1e-4, rtol=0)


@every_model
def test_a_masked_token_changes_nothing(load, name):
    """Any token outside a chunk may change: the logits at the chunk stay bitwise equal, except with experts, whose
    matrix products change shape when other tokens are routed to them. The logits after the chunk do change."""
    oracle, dice = load(name), Dice(name)
    segments = [dice.text(10), dice.chunk(12), dice.chunk(9), dice.text(4)]
    ids = token_ids(segments)
    changed = [(token + 1 - FIRST_ORDINARY_ID) % 500 + FIRST_ORDINARY_ID for token in ids[:10]] + ids[10:]
    before, after = logits(oracle, segments), logits(oracle, segments, ids=changed)
    allowed = 1e-5 if hasattr(oracle.model.config, "num_experts_per_tok") else 0  # for logits of about 10
    assert (before[10:31] - after[10:31]).abs().max() <= allowed
    assert (before[31:] - after[31:]).abs().amax(-1).min() > 0.05


@every_model
def test_models_are_sensitive(load, name):
    """A far token, the mask, and a position off by one each change the next token's logits; greedy decoding does not
    loop."""
    oracle, dice = load(name), Dice(name)
    segments = [dice.text(20), dice.chunk(60), dice.text(1), dice.chunk(100), dice.text(12)]
    expected = logits(oracle, segments)[-1]
    ids = token_ids(segments)
    other_token = [*ids[:30], ids[31], *ids[31:]]
    shifted = torch.arange(len(ids))
    shifted[20:80] -= 1
    for wrong in (
        logits(oracle, segments, ids=other_token),
        logits(oracle, [text(ids)]),
        logits(oracle, segments, position_ids=shifted),
    ):
        assert (wrong[-1] - expected).abs().max() > 0.05
    assert len(set(oracle.generate(segments, 12)[0])) >= 5


def test_last_token_of_the_prompt_is_text(load):
    """A prompt that ends in a chunk equals one whose last token is text, also for a chunk of one token."""
    oracle, dice = load("llama"), Dice(0)
    head, doc, one = dice.text(6), dice.chunk(15), dice.chunk(1)
    split = [head, chunk(doc.ids[:-1]), text(doc.ids[-1:])]
    assert torch.equal(oracle.logprobs([head, doc]), oracle.logprobs(split))
    assert torch.equal(oracle.logprobs([head, doc, one]), oracle.logprobs([head, doc, text(one.ids)]))


def test_generated_tokens_are_text(load):
    """Generated tokens equal the same tokens given as the prompt's last text segment."""
    oracle, dice = load("qwen2"), Dice(1)
    prompt = [dice.text(6), dice.chunk(15), dice.text(2)]
    tokens, _ = oracle.generate(prompt, 4)
    assert torch.allclose(oracle.logprobs(prompt, tokens)[-1], oracle.logprobs([*prompt, text(tokens)])[-1], atol=1e-5)


def test_dynamic_ntk_is_fixed_at_the_longest_context(load):
    """Its frequencies are Hugging Face's for a prompt of factor x max_position_embeddings tokens."""
    model = load("llama-dynamic").model
    longest, _ = ROPE_INIT_FUNCTIONS["dynamic"](model.config, "cpu", seq_len=4 * MAX_POSITION)
    assert torch.allclose(model.base_model.rotary_emb.inv_freq, longest, rtol=1e-6)
    position_ids = torch.arange(8)[None]
    cos, _ = model.base_model.rotary_emb(torch.zeros(1), position_ids)
    assert torch.allclose(cos[0, :, : len(longest)], (position_ids[0][:, None] * longest).cos(), atol=1e-6)


@every_model
def test_build_is_reproducible(load, name):
    """The saved model holds exactly the seeded weights, in fp32, and a second build reuses it."""
    oracle = load(name)
    path = oracle.model.config._name_or_path
    assert build(name, path.rsplit("/", 1)[0]) == path
    expected = random_model(MODELS[name]).state_dict()
    saved = model_class(oracle.model.config).from_pretrained(path).state_dict()
    assert saved.keys() == expected.keys()
    for key, weight in saved.items():
        assert weight.dtype == torch.float32 and torch.equal(weight, expected[key]), key


@every_model
def test_tokenizer(load, name):
    """It loads offline, adds BOS once where asked to, round-trips text, and renders the chat template."""
    tokenizer = AutoTokenizer.from_pretrained(load(name).model.config._name_or_path)
    sample = "Who built the bridge? Zoë's 12 maps, naïvely…"
    plain = tokenizer.encode(sample, add_special_tokens=False)
    assert set(plain) <= set(range(FIRST_ORDINARY_ID, VOCAB_SIZE))
    assert tokenizer.decode(plain) == sample
    assert tokenizer.encode(sample) == [BOS] * MODELS[name].add_bos + plain
    assert len(plain) < len(sample.encode())
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    message = {"role": "user", "content": parts if MODELS[name].chat_parts else "onetwo"}
    rendered = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    assert rendered == "<s>" * MODELS[name].add_bos + "<|user|>onetwo</s><|assistant|>"


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenarios_are_seeded_and_fit(scenario):
    """The same seed gives the same steps; tokens are legal; turns refer back; prompts with every turn's answer fit the
    context."""
    steps = build_scenario(scenario)
    assert steps == build_scenario(scenario) != build_scenario(scenario, seed=1)
    lengths = []
    for index, step in enumerate(steps):
        assert all(segment.ids for segment in step.segments)
        assert all(FIRST_ORDINARY_ID <= token < VOCAB_SIZE for token in token_ids(step.segments))
        assert step.after is None or step.after < index
        lengths.append(len(token_ids(step.segments)) + (0 if step.after is None else lengths[step.after] + 16))
    assert max(lengths) + 16 < MAX_POSITION
