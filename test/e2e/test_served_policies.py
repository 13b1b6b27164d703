"""Policies that recompute tokens, and chunks after a preamble: served answers against the policies' oracle."""

import gc
import itertools
import json
import shutil

import pytest
from served import NUM_TOKENS, Served

from fakes.passes import counted
from oracle.models import MODELS
from oracle.models.build import build
from oracle.policies import keep_all_but
from oracle.scenarios import Dice
from oracle.segments import Segment, chunk, text

TRAINED = {"kvlink": {"link": [7, 8, 9, 10, 11]}, "packet": {"before": [12, 13], "behind": [14]}}
LINKS = ["block", "epic:tokens=3", "query:ratio=0.3", "blend:ratio=0.3", "static:ratio=0.3"]
BASES = ["", "base+", "base:preamble=lead+"]


OPTIONS = {
    "llama": {},
    "glm4": {"chunked_prefill_size": 48, "disable_overlap_schedule": True},
    "gpt-oss": {**MODELS["gpt-oss"].cpu_options, "disable_hybrid_swa_memory": True},
}


@pytest.fixture(
    scope="module", params=["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("glm4", "gpt-oss"))]
)
def served(request, model_dir, tmp_path_factory):
    path = shutil.copytree(build(request.param, model_dir), tmp_path_factory.mktemp("model") / request.param)
    (path / "lazy_tokens.json").write_text(json.dumps(TRAINED))
    hooks = [
        {
            "name": name,
            "target_modules": [f"*layers.{name}.mlp"],
            "hook_factory": "fakes.passes:count_tokens",
            "config": {"path": str(path / f"mlp-{name}")},
        }
        for name in "01"
    ]
    served = Served(path, max_total_tokens=2048, forward_hooks=hooks, **OPTIONS[request.param])
    served.path = path
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
    """Side by side over the same chunks, cold and warm; some prompts start or end with a chunk."""
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
    """The second question is answered over the tokens chosen for the first, so that nothing is computed again."""
    dice = Dice(f"turns {link}")
    prompt = [dice.text(6), *dice.chunks(3, 10, 20), dice.text(5)]
    (first,) = served.answer([prompt], [link])
    kept, preamble = served.kept(prompt, link)
    following = [*prompt, text(first["output_ids"]), dice.text(4)]
    (second,) = served.ask([following], [link])
    served.check(following, second, kept, preamble)
    length = sum(len(segment.ids) for segment in prompt)
    assert second["meta_info"]["cached_tokens"] >= length + NUM_TOKENS - 1


def test_each_question_has_its_own_choice(served):
    dice = Dice("questions")
    head, docs = dice.text(6), dice.chunks(3, 10, 20)
    prompts = [[head, *docs, dice.text(5)] for _ in range(3)]
    served.answer(prompts, ["query:ratio=0.3"] * 3)
    served.answer(prompts[::-1], ["query:ratio=0.3"] * 3)


def test_blends_probe_ends_at_the_second_layers_keys(served):
    """Nothing after these keys is computed for the probe; the first layer computes the whole prompt."""
    dice = Dice("passes")
    head, docs = dice.text(6), dice.chunks(3, 10, 20)
    served.answer([[head, *docs, dice.text(5)]], ["block"])
    prompt = [head, *dice.shuffled(docs), dice.text(5)]
    files = [served.path / "mlp-0", served.path / "mlp-1"]
    for file in files:
        counted(file)
    (output,) = served.answer([prompt], ["blend:ratio=0.3"])
    prompt_len, num_cached = (output["meta_info"][name] for name in ("prompt_tokens", "cached_tokens"))
    first, second = (sum(n for n in counted(file) if n > 1) for file in files)  # a single token is decode
    assert second == prompt_len - num_cached
    assert first == prompt_len + second


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
def test_trained_tokens_surround_chunks(served, link, base):
    dice = Dice(f"trained {base}{link}")
    docs = dice.chunks(4, 5, 15)
    head, gap, question = dice.text(6), dice.text(3), dice.text(5)
    preamble = served.preamble if base else ()
    for prompt in ([head, *docs[:3], question], [head, *docs[:3], question], [docs[2], gap, docs[0], docs[3]]):
        (output,) = served.ask([prompt], [base + link])
        seen = with_tokens(prompt, link)
        served.check(seen, output, keep_all_but(seen, ()), preamble)
