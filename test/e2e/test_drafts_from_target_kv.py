"""Gemma 4's assistant, which drafts from the model's own KV: answers over chunks are the oracle's, runs of every length
are accepted, and drafts are those of Hugging Face's assistant."""

import gc

import pytest
import torch
from test_oracle_matrix import GROUPS, hits, reuse
from test_speculation_oracle import Speculating, chain, stops_within_a_run

from fakes import noted_drafts
from oracle.assistant import Assistant
from oracle.models.build import build
from oracle.models.drafts import build_draft
from oracle.scenarios import Dice
from oracle.segments import text, token_ids

pytestmark = [
    pytest.mark.slow,  # starts engines
    pytest.mark.skipif(torch.cuda.is_available(), reason="replaces kernels that a GPU has"),
]

WAYS = {"three": {"chunked_prefill_size": 64}, "one": chain(1), "seven": {**chain(7), "chunked_prefill_size": 64}}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(way, marks=[pytest.mark.xdist_group(f"target's KV {way}"), *marks])
        for way, marks in (("three", []), ("one", [pytest.mark.nightly]), ("seven", [pytest.mark.nightly]))
    ],
)
def served(request, model_dir, with_plugin, tmp_path_factory):
    notes = tmp_path_factory.mktemp("target's KV") / "drafts"
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(noted_drafts.PATH_VARIABLE, str(notes))
        with with_plugin(noted_drafts.load):
            served = Speculating("FROZEN_KV_MTP", "gemma4", model_dir, **WAYS[request.param])
    served.notes, served.steps = notes, WAYS[request.param].get("speculative_num_steps", 3)
    yield served
    served.flush()  # an idle server checks its accounting
    served.engine.shutdown()
    gc.collect()


@pytest.fixture(scope="module")
def assistant(model_dir):
    target = build("gemma4", model_dir)
    return Assistant(target, build_draft("FROZEN_KV_MTP", target, model_dir))


@pytest.mark.parametrize(
    "names", [GROUPS[0], *(pytest.param(names, marks=pytest.mark.nightly) for names in GROUPS[1:])]
)
def test_scenarios(served, names):
    """Cold, warm, reordered, second turns, beside prompts without chunks; twice, and nothing is held afterwards."""
    for _ in range(2):
        assert any(hit for _, hit in reuse(served.play(names)))
    served.flush()


def test_runs_of_every_length(served, monkeypatch):
    """Drafts of an answer that is given again break off where a token was followed by several. Answers are longer than
    a window."""
    monkeypatch.setattr(served, "num_tokens", 60)
    dice = Dice("runs over the target's KV")
    prompts = [[dice.text(7), dice.chunk(40), dice.chunk(25), dice.text(5)] for _ in range(6)]
    for prompt in prompts:
        served.answer(prompt)
        served.answer(prompt)
    assert served.accepted() == set(range(served.steps + 1))
    served.flush()


def test_drafts_are_the_assistants(served, assistant):
    """Prompts without chunks, cold ones, warm ones, in another order, with text between, over more than a window, and
    second turns: the first drafts of each. Later ones depend on what was accepted."""
    dice = Dice("the assistant")
    a, b, c = (dice.chunk(length) for length in (60, 45, 33))
    orders = [[dice.text(50)], [a, b], [a, b], [c, dice.text(8), a, dice.text(3), b], [b, c, a]]
    differ = 0
    for order in orders:
        prompt = [dice.text(6), *order, dice.text(4)]
        for _turn in range(2):
            served.notes.unlink(missing_ok=True)
            (output,) = served.answer(prompt)
            first = served.notes.read_text().splitlines()[0]
            expected = assistant.drafts(prompt, output["output_ids"][:1], served.steps)
            assert first == str([expected])
            as_text = assistant.drafts([text(token_ids(prompt))], output["output_ids"][:1], served.steps)
            differ += len(order) > 1 and as_text != expected
            prompt = [*prompt, text(output["output_ids"]), dice.text(3)]
    assert hits(output) == [True] * 3
    assert differ, "drafts do not tell which KV was read"


@pytest.mark.nightly
@pytest.mark.parametrize("length", range(1, 9))
def test_an_answer_that_stops_within_a_run(served, length):
    dice = Dice(f"stop {length}")
    stops_within_a_run(served, [dice.text(7), dice.chunk(40), dice.chunk(25), dice.text(5)], length)
