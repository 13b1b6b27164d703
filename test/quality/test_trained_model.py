"""The trained models of examples/models: they use today's tokenizer and are good at the questions they are for."""

import collections

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmark.policies.comb import CombModel
from benchmark.quality.asking import Prompts
from benchmark.quality.leaning import LEANING
from benchmark.quality.questions import from_documents
from benchmark.quality.reference import Claim, Reference
from benchmark.quality.vocabulary import train_tokenizer
from benchmark.quality.worlds import records
from benchmark.sample import COMB, STOCK, TRAINED, WORLDS, load_sample
from oracle.segments import text, token_ids
from sglang_lazy.verify.scores import exact_match

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("model", sorted(STOCK.parent.iterdir()), ids=lambda path: path.name)
def test_tokenizer(model):
    """The words of worlds.py are those the model was trained on."""
    assert Tokenizer.from_file(str(model / "tokenizer.json")).to_str() == train_tokenizer().to_str()


@pytest.mark.parametrize("mask", ["block", "full"])
def test_answers(mask):
    """Under either mask the reference gets at most one of the demo's questions wrong."""
    tokenizer, reference = AutoTokenizer.from_pretrained(TRAINED), Reference(str(TRAINED), torch.float32, "cpu")
    prompts, right = Prompts(tokenizer), 0
    for record in load_sample(WORLDS):
        question = from_documents(record, "demo")
        segments = prompts.make(question)
        if mask == "full":
            segments = [text(token_ids(segments))]
        answer = tokenizer.decode(reference.answer(segments, 8))
        right += exact_match(answer, question.answers) == 1
    assert right >= 15


def test_leaning_answers():
    """The stock model is nearly always right under the full mask; under the block mask, where documents stand alone."""
    tokenizer, reference = AutoTokenizer.from_pretrained(STOCK), Reference(str(STOCK), torch.float32, "cpu")
    prompts, right = Prompts(tokenizer), collections.Counter()
    for family in ("alone", "pronoun", "table", "conversation"):
        for record in records(1, "test", 8, 1, make=LEANING[family].make):
            question = from_documents(record, family)
            segments = prompts.make(question)
            for mask, prompt in (("block", segments), ("full", [text(token_ids(segments))])):
                # One pass over all of the right answer, instead of one for each token of the model's.
                answer = tokenizer.encode(f" {question.answers[0]}", add_special_tokens=False)
                (verdict,) = reference.judge([Claim(prompt, answer, 8)])
                right[mask, family] += verdict.same
    assert sum(right["full", family] for family in LEANING) >= 30
    assert right["block", "alone"] >= 7
    assert sum(right["block", family] for family in ("pronoun", "table", "conversation")) <= 16


def test_comb_answers():
    """With the stock model's weights, the Comb model is nearly always right where documents stand alone; where one
    answers another, only if both are in one chunk."""
    stock = AutoModelForCausalLM.from_pretrained(STOCK, dtype=torch.float32)
    tokenizer, comb = AutoTokenizer.from_pretrained(COMB), CombModel(COMB, stock.state_dict(), "cpu")
    prompts, right = Prompts(tokenizer), collections.Counter()
    for family in ("alone", "conversation"):
        for record in records(1, "test", 8, 1, make=LEANING[family].make):
            question = from_documents(record, family)
            for together in (False, True):
                prompt = comb.start(prompts.make(question), together)
                answer = tokenizer.decode(prompt.greedy(8, tokenizer.eos_token_id)).strip()
                right[family, together] += answer == question.answers[0]
    assert min(right["alone", False], right["alone", True], right["conversation", True]) >= 6
    assert right["conversation", False] <= 7
