"""Policies that recompute tokens, and chunks behind a preamble: served answers against the oracle of policies."""

import functools
import gc
import itertools
import json
import math
import shutil

import pytest
import torch

from oracle.models import build
from oracle.policies import PolicyOracle, epic, keep_all_but, leading_text, without_best, without_best_of_each
from oracle.scenarios import Dice
from oracle.segments import Segment, chunk, text
from sglang_lazy.testing import CPU_OPTIONS

TOLERANCE = 1e-4  # of a log-probability
NUM_TOKENS = 6
PREAMBLE = "These lines stand alone."
TRAINED = {"kvlink": {"link": [7, 8, 9, 10, 11]}, "packet": {"before": [12, 13], "behind": [14]}}
LINKS = ["block", "epic:tokens=3", "query:ratio=0.3", "blend:ratio=0.3", "static:ratio=0.3"]
BASES = ["", "base+", "base:preamble=lead+"]


class Served:
    """One model, served by the engine and known to the oracle."""

    def __init__(self, name: str, folder, tmp_path, **options):
        from transformers import AutoTokenizer

        from sglang_lazy import Engine

        path = shutil.copytree(build(name, folder), tmp_path / name)
        (tmp_path / name / "lazy_tokens.json").write_text(json.dumps(TRAINED))
        self.oracle = PolicyOracle(path)
        self.preamble = AutoTokenizer.from_pretrained(path).encode(PREAMBLE)
        self.engine = Engine(
            model_path=str(path),
            **CPU_OPTIONS,
            max_total_tokens=2048,
            log_level="error",
            lazy_preamble=PREAMBLE,
            **options,
        )

    def kept(self, prompt: list[Segment], link: str):
        """What the oracle keeps of each chunk under `link`, and what it computes chunks behind."""
        base, _, name = link.rpartition("+")
        preamble = {"": (), "base": self.preamble, "base:preamble=lead": leading_text(prompt)}[base]
        if name.startswith("epic"):
            return epic(prompt, 3), preamble
        num_layers = self.oracle.model.config.num_hidden_layers
        last_third = range(num_layers - math.ceil(num_layers / 3), num_layers)
        query_scores = functools.partial(self.oracle.query_scores, layers=last_third)
        measures = {"query:ratio=0.3": query_scores, "blend:ratio=0.3": self.oracle.blend_scores}
        if name == "static:ratio=0.3":
            return without_best_of_each(prompt, -self.oracle.key_sizes(prompt, preamble), 0.3), preamble
        if name in measures:
            scores = measures[name](prompt, preamble=preamble)
            best = scores.sort(descending=True).values
            edge = -(-len(scores) * 3 // 10)
            assert edge == len(best) or best[edge - 1] - best[edge] > 1e-6, "the choice is too close: draw anew"
            return without_best(prompt, scores, 0.3), preamble
        return keep_all_but(prompt, ()), preamble

    def ask(self, prompts: list[list[Segment]], links: list[str]) -> list[dict]:
        return self.engine.generate(
            segments=[[segment.to_request() for segment in prompt] for prompt in prompts],
            link=links,
            sampling_params={"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True},
            return_logprob=True,
        )

    def check(self, prompt: list[Segment], output: dict, kept, preamble) -> None:
        """Each token is the oracle's best after those before it, and the log-probabilities are its."""
        tokens = output["output_ids"]
        expected = self.oracle.logprobs(prompt, tokens[:-1], kept, preamble)
        chosen = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        reported = torch.tensor([entry[0] for entry in output["meta_info"]["output_token_logprobs"]])
        assert (chosen - reported).abs().max() <= TOLERANCE
        assert (expected.amax(-1) - chosen).max() <= TOLERANCE

    def answer(self, prompts: list[list[Segment]], links: list[str]) -> list[dict]:
        """Serve the prompts as one batch and hold every answer against the oracle."""
        outputs = self.ask(prompts, links)
        for prompt, link, output in zip(prompts, links, outputs, strict=True):
            self.check(prompt, output, *self.kept(prompt, link))
        return outputs


@pytest.fixture(scope="module", params=["llama", pytest.param("glm4", marks=pytest.mark.slow)])
def served(request, model_dir, tmp_path_factory):
    options = {"llama": {}, "glm4": {"chunked_prefill_size": 48, "disable_overlap_schedule": True}}
    served = Served(request.param, model_dir, tmp_path_factory.mktemp("model"), **options[request.param])
    yield served
    served.engine.shutdown()
    gc.collect()


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("link", LINKS)
def test_cold_warm_and_another_order(served, link, base):
    dice = Dice(f"{base}{link}")
    docs = dice.chunks(3, 9, 30)
    head, gap, question = dice.text(7), dice.text(2), dice.text(6)
    prompts = [[head, *docs, question], [head, *docs, question], [head, docs[2], gap, docs[0], docs[1], question]]
    for prompt in prompts:
        (output,) = served.answer([prompt], [base + link])
    assert all(chunk["hit"] for chunk in output["meta_info"]["chunks"])


def test_batches_of_mixed_policies(served):
    """Side by side over the same chunks, cold and warm; some prompts begin or end in a chunk."""
    dice = Dice("mixed")
    docs = dice.chunks(4, 8, 20)
    links = [base + link for base in BASES for link in LINKS]
    prompts = [[dice.text(5), *dice.shuffled(docs), dice.text(4)] for _ in links]
    prompts[1], prompts[4] = [docs[0], docs[1], dice.text(5)], [docs[3], dice.text(3), docs[2]]
    prompts[8] = [dice.text(3), docs[0], docs[0], dice.text(2)]
    for _ in range(2):
        served.answer(prompts, links)


@pytest.mark.parametrize("link", ["epic:tokens=3", "query:ratio=0.3", "base+query:ratio=0.3", "blend:ratio=0.3"])
def test_the_next_turn_finds_text_and_choices(served, link):
    """The second question is answered over the tokens that were chosen for the first, so nothing is computed again."""
    dice = Dice(f"turns {link}")
    prompt = [dice.text(6), *dice.chunks(3, 10, 20), dice.text(5)]
    (first,) = served.answer([prompt], [link])
    kept, preamble = served.kept(prompt, link)
    following = [*prompt, text(first["output_ids"]), dice.text(4)]
    (second,) = served.ask([following], [link])
    served.check(following, second, kept, preamble)
    length = sum(len(segment.ids) for segment in prompt)
    assert second["meta_info"]["cached_tokens"] >= length + NUM_TOKENS - 1


def test_a_choice_is_each_question_s_own(served):
    dice = Dice("questions")
    head, docs = dice.text(6), dice.chunks(3, 10, 20)
    prompts = [[head, *docs, dice.text(5)] for _ in range(3)]
    served.answer(prompts, ["query:ratio=0.3"] * 3)
    served.answer(prompts[::-1], ["query:ratio=0.3"] * 3)


def with_tokens(prompt: list[Segment], link: str) -> list[Segment]:
    """What the model sees of `prompt`."""
    segments, link_ids = [], itertools.cycle(TRAINED["kvlink"]["link"])
    for segment in prompt:
        if segment.kind == "text":
            segments.append(segment)
        elif link == "packet":
            segments.append(chunk((12, 13, *segment.ids, 14)))
        else:
            segments += [segment, text([next(link_ids) for _ in range(2)])]
    return segments


@pytest.mark.parametrize("base", ["", "base+"])
@pytest.mark.parametrize("link", ["kvlink:tokens=2", "packet"])
def test_trained_tokens_stand_around_chunks(served, link, base):
    dice = Dice(f"trained {base}{link}")
    docs = dice.chunks(4, 5, 15)
    head, gap, question = dice.text(6), dice.text(3), dice.text(5)
    preamble = served.preamble if base else ()
    for prompt in ([head, *docs[:3], question], [head, *docs[:3], question], [docs[2], gap, docs[0], docs[3]]):
        (output,) = served.ask([prompt], [base + link])
        seen = with_tokens(prompt, link)
        served.check(seen, output, keep_all_but(seen, ()), preamble)
