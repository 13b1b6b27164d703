"""The trained model of examples/models: it uses today's tokenizer and is good at the questions it is for."""

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from benchmark.sample import TRAINED, WORLDS, load_sample
from oracle.segments import text, token_ids
from research.quality.asking import Prompts
from research.quality.questions import from_documents
from research.quality.reference import Reference
from research.quality.vocabulary import train_tokenizer
from sglang_lazy.verify.scores import exact_match

pytestmark = pytest.mark.slow


def test_tokenizer():
    """The words of worlds.py are those the model was trained on."""
    assert Tokenizer.from_file(str(TRAINED / "tokenizer.json")).to_str() == train_tokenizer().to_str()


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
