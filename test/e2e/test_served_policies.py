"""Policies that recompute tokens, and chunks after a preamble: served answers against the policies' oracle."""

import gc
import itertools
import json
import math
import shutil

import pytest
from served import NUM_TOKENS, TWO_RANKS, Served

from fakes.passes import counted
from oracle.models import MODELS
from oracle.models.build import build
from oracle.policies import keep_all_but
from oracle.scenarios import Dice
from oracle.segments import Segment, chunk, text

TRAINED = {"kvlink": {"link": [7, 8, 9, 10, 11]}, "packet": {"before": [12, 13], "behind": [14]}}
TRAINED_LINKS = ["kvlink:tokens=2", "packet"]
MIXED = "query:ratio=0.3,static=0.1"
LINKS = ["block", "epic:tokens=3", "query:ratio=0.3", MIXED, "blend:ratio=0.3", "static:ratio=0.3"]
BASES = ["", "base+", "base:preamble=lead+"]


WAYS = {
    "llama": ("llama", {}),
    "llama on two ranks": ("llama", {"tp_size": 2}),
    "glm4": ("glm4", {"chunked_prefill_size": 48, "disable_overlap_schedule": True}),
    "gpt-oss": ("gpt-oss", {**MODELS["gpt-oss"].cpu_options, "disable_hybrid_swa_memory": True}),
}
"""The models, and how they are served."""
SLOW = [pytest.param(way, marks=pytest.mark.slow) for way in WAYS if way != "llama"]


@pytest.fixture(scope="module", params=["llama", *SLOW])
def served(request, model_dir, tmp_path_factory):
    model, options = WAYS[request.param]
    path = shutil.copytree(build(model, model_dir), tmp_path_factory.mktemp("model") / model)
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
    with pytest.MonkeyPatch.context() as environment:
        for name, value in TWO_RANKS.items() if "tp_size" in options else ():
            environment.setenv(name, value)
        served = Served(path, max_total_tokens=2048, forward_hooks=hooks, **options)
    served.path, served.num_ranks = path, options.get("tp_size", 1)
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


@pytest.mark.parametrize("link", [*LINKS[1:], "base+query:ratio=0.3", *TRAINED_LINKS])
def test_the_next_turn_finds_text_and_choices(served, link):
    """The second question is answered over the tokens chosen for the first, so that nothing is computed again."""
    dice = Dice(f"turns {link}")
    prompt = [dice.text(6), *dice.chunks(3, 10, 20), dice.text(5)]
    (first,) = served.ask([prompt], [link])
    seen = with_tokens(prompt, link)
    kept, preamble = served.kept(seen, link)
    served.check(seen, first, kept, preamble)
    following = [text(first["output_ids"]), dice.text(4)]
    (second,) = served.ask([[*prompt, *following]], [link])
    served.check([*seen, *following], second, kept, preamble)
    length = sum(len(segment.ids) for segment in seen)
    assert second["meta_info"]["cached_tokens"] >= length + NUM_TOKENS - 1


def test_each_question_has_its_own_choice(served):
    dice = Dice("questions")
    head, docs = dice.text(6), dice.chunks(3, 10, 20)
    prompts = [[head, *docs, dice.text(5)] for _ in range(3)]
    served.answer(prompts, ["query:ratio=0.3"] * 3)
    served.answer(prompts[::-1], ["query:ratio=0.3"] * 3)


def test_blend_keeps_what_the_second_layer_cannot_see(served):
    """At a ratio of 1, the chunk that begins the prompt is kept, and all tokens past a window of the first layer."""
    dice = Dice("unseen")
    docs = dice.chunks(3, 40, 60)
    window = 24 if served.path.name == "gpt-oss" else math.inf
    for base in ("", "base:preamble=lead+"):
        lead = dice.text(6)
        prompt = [lead, *docs, dice.text(5)] if base else [*docs, dice.text(5)]
        served.answer([prompt], [f"{base}blend:ratio=1.0"])
        (output,) = served.answer([[*prompt[:-1], dice.text(5)]], [f"{base}blend:ratio=1.0"])
        num_kept = len(docs[0].ids) + sum(max(0, len(doc.ids) - window + 1) for doc in docs[1:])
        assert output["meta_info"]["cached_tokens_details"]["chunk"] == num_kept


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
    # A single token is decode; each rank counts all tokens.
    first, second = (sum(n for n in counted(file) if n > 1) / served.num_ranks for file in files)
    assert second == prompt_len - num_cached
    assert first == prompt_len + second


def with_tokens(prompt: list[Segment], link: str) -> list[Segment]:
    """What the model sees of `prompt`."""
    if link not in TRAINED_LINKS:
        return prompt
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
@pytest.mark.parametrize("link", TRAINED_LINKS)
def test_trained_tokens_surround_chunks(served, link, base):
    dice = Dice(f"trained {base}{link}")
    docs = dice.chunks(4, 5, 15)
    head, gap, question = dice.text(6), dice.text(3), dice.text(5)
    preamble = served.preamble if base else ()
    for prompt in ([head, *docs[:3], question], [head, *docs[:3], question], [docs[2], gap, docs[0], docs[3]]):
        (output,) = served.ask([prompt], [base + link])
        seen = with_tokens(prompt, link)
        served.check(seen, output, keep_all_but(seen, ()), preamble)
