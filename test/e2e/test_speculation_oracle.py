"""Speculation over chunks on a CPU: answers are the oracle's, whatever was drafted and accepted."""

import gc

import pytest
import torch
from served import TWO_RANKS
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor
from test_oracle_matrix import GROUPS, Served, reuse

from fakes import remembered_drafts, speculation_on_cpu, streams
from oracle.models import MODELS
from oracle.models.build import build
from oracle.models.drafts import build_draft
from oracle.policies import PolicyOracle, epic, keep_all_but
from oracle.scenarios import Dice
from oracle.segments import chunk, text, token_ids
from oracle.tokenizer import VOCAB_SIZE

pytestmark = [
    pytest.mark.slow,  # starts engines
    pytest.mark.skipif(torch.cuda.is_available(), reason="replaces kernels that a GPU has"),
]

TOLERANCE = 1e-4  # of a log-probability


class Speculating(Served):
    """A model and its draft."""

    num_tokens = 14

    def __init__(self, algorithm, model, folder, **options):
        self.histograms, self.is_standalone = [], algorithm == "STANDALONE"
        draft = build_draft(algorithm, build(model, folder), folder)
        super().__init__(
            model,
            folder,
            speculative_algorithm=algorithm,
            **({"model_path": draft} if algorithm == "NEXTN" else {"speculative_draft_model_path": draft}),
            enable_custom_logit_processor=True,
            grammar_backend="llguidance",
            **{**MODELS[model].cpu_options, **speculation_on_cpu.OPTIONS, **options},
        )

    def accepted(self) -> set[int]:
        """The lengths of accepted runs so far, without the token that follows."""
        return {length for counts in self.histograms for length, count in enumerate(counts) if count}

    def check(self, prompt, output):
        """As long answers may come close to a tie, their log-probabilities are compared with the best ones."""
        tokens, meta = output["output_ids"], output["meta_info"]
        assert len(tokens) == self.num_tokens
        self.compare(self.expected(tuple(prompt), tuple(tokens[:-1])), output)
        self.histograms.append(meta["spec_correct_drafts_histogram"])

    def compare(self, expected, output):
        """expected: log-probabilities, [number of tokens, vocab_size]."""
        tokens, meta = output["output_ids"], output["meta_info"]
        chosen = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        reported = torch.tensor([entry[0] for entry in meta["output_token_logprobs"]])
        assert (chosen - reported).abs().max() <= TOLERANCE
        assert (expected.amax(-1) - chosen).max() <= TOLERANCE


def chain(steps):
    """The options of a server that drafts so many tokens."""
    return {"speculative_num_steps": steps, "speculative_num_draft_tokens": steps + 1}


WAYS = {
    "STANDALONE": ("STANDALONE", "llama", {}),
    "STANDALONE synchronous": ("STANDALONE", "llama", {"disable_overlap_schedule": True, "chunked_prefill_size": 64}),
    "STANDALONE by one": ("STANDALONE", "llama", chain(1)),
    "STANDALONE by seven": ("STANDALONE", "llama", {**chain(7), "chunked_prefill_size": 64}),
    "STANDALONE on two ranks": ("STANDALONE", "llama", {"tp_size": 2}),
    "EAGLE": ("EAGLE", "llama", {}),
    "EAGLE synchronous": ("EAGLE", "llama", {"disable_overlap_schedule": True}),
    "EAGLE3": ("EAGLE3", "llama", {"chunked_prefill_size": 64}),
    # Windows and sinks, of which the draft has none; in one pool, where policies may copy
    "EAGLE3 of gpt-oss": ("EAGLE3", "gpt-oss", {"disable_hybrid_swa_memory": True}),
}


def served_in(*usual):
    """Parametrizes a test by all ways, of which CI runs those named by day."""
    params = [
        pytest.param(way, marks=[pytest.mark.xdist_group(way), *([pytest.mark.nightly] if way not in usual else [])])
        for way in WAYS
    ]
    return pytest.mark.parametrize("served", params, indirect=True)


@pytest.fixture(scope="module")
def served(request, model_dir, with_plugin):
    algorithm, model, options = WAYS[request.param]
    with with_plugin(speculation_on_cpu.load), pytest.MonkeyPatch.context() as environment:
        for name, value in TWO_RANKS.items() if "tp_size" in options else ():
            environment.setenv(name, value)
        served = Speculating(algorithm, model, model_dir, **options)
    yield served
    served.engine.shutdown()
    gc.collect()


@served_in("STANDALONE", "EAGLE", "EAGLE3 of gpt-oss")
@pytest.mark.parametrize("names", GROUPS, ids=["one half", "the other half", "long"])
def test_scenarios(served, names):
    """Cold, warm, reordered, second turns, beside prompts without chunks; nothing is held afterwards."""
    assert any(hit for _, hit in reuse(served.play(names)))
    served.flush()  # an idle server checks its accounting, and a leaked slot or lock ends it


@served_in("STANDALONE", "STANDALONE by seven", "EAGLE3 of gpt-oss")
def test_whole_chains_are_accepted_and_none(served):
    """Heads with random weights are hardly ever right."""
    served.histograms.clear()
    dice, docs = Dice("runs"), [Dice("runs").chunk(length) for length in (60, 45, 80)]
    for _ in range(4):
        served.answer([dice.text(9), *dice.shuffled(docs), dice.text(6)], [dice.text(30)])
    served.flush()
    longest = len(served.histograms[0]) - 1
    assert served.accepted() >= ({0, longest} if served.is_standalone else {0})


@pytest.mark.parametrize(
    ("algorithm", "model"),
    [
        ("STANDALONE", "llama"),
        *(pytest.param("EAGLE3", model, marks=pytest.mark.nightly) for model in ("llama", "gpt-oss")),
    ],
)
def test_chunks_from_the_host(algorithm, model, model_dir, with_plugin):
    """A draft's KV comes back with the chunk's, and before the draft reads it: as many drafts are accepted as before.
    Only STANDALONE's are ever right; EAGLE3's shows that layers unlike the model's do not disturb it. Copies are as
    late as a GPU allows."""
    tiers = {"enable_hierarchical_cache": True, "hicache_ratio": 32.0, "max_total_tokens": 1024}
    with with_plugin(speculation_on_cpu.load), with_plugin(streams.load):
        served = Speculating(algorithm, model, model_dir, **tiers)
    try:
        dice, accepted = Dice("from the host"), []
        prompt = [dice.text(6), *(dice.chunk(length) for length in (40, 25, 60)), dice.text(9)]
        for number in range(3):
            (output,) = served.answer(prompt)
            accepted.append(output["meta_info"]["spec_correct_drafts_histogram"])
            assert (output["meta_info"]["cached_tokens_details"] or {}).get("host", 0) == (125 if number else 0)
            served.answer(*([dice.text(240)] for _ in range(4)))  # which the pool has no room for beside the chunks
        assert accepted[1:] == accepted[:1] * 2
        for names in GROUPS[:2]:
            assert any(hit for _, hit in reuse(served.play(names)))
        served.flush()
    finally:
        served.engine.shutdown()


@pytest.mark.nightly  # gpt-oss has windows by day
def test_layers_with_windows(model_dir, with_plugin):
    """Each token of a chain has a window of its own. A draft with windows keeps SGLang's attention."""
    with with_plugin(speculation_on_cpu.load):
        served = Speculating("STANDALONE", "mellum", model_dir)
    try:
        for names in GROUPS[:2]:
            assert any(hit for _, hit in reuse(served.play(names)))
            served.flush()
    finally:
        served.engine.shutdown()


@pytest.mark.parametrize("steps", [3, *(pytest.param(steps, marks=pytest.mark.nightly) for steps in (1, 2, 5, 7))])
def test_windows_and_sinks(steps, model_dir, with_plugin):
    """gpt-oss, drafted for by a Llama: runs of every length, and answers longer than a window. Window layers have few
    slots, so chunks lose window KV that is computed again; and what is drafted takes slots there, too."""
    few = {"chunked_prefill_size": 64, "swa_full_tokens_ratio": 0.25}
    with with_plugin(remembered_drafts.load):
        served = Speculating("EAGLE3", "gpt-oss", model_dir, **chain(steps), **few)
    try:
        for names in GROUPS[:2]:
            assert any(hit for _, hit in reuse(served.play(names)))
            served.flush()
        dice = Dice("windows and sinks")
        prompts = [[dice.text(7), dice.chunk(40), dice.chunk(25), dice.text(5)] for _ in range(3)]
        served.num_tokens = 60
        for prompt in [*prompts, *prompts]:
            served.answer(prompt)
        assert served.accepted() == set(range(steps + 1))
        served.num_tokens = 14
        for length in range(2, 9, 2):
            stops_within_a_run(served, prompts[-1], length)
    finally:
        served.engine.shutdown()


@served_in("STANDALONE", "STANDALONE synchronous")  # drafts of heads make no runs
@pytest.mark.parametrize("length", range(1, 9))
def test_an_answer_that_stops_within_a_run(served, length):
    dice = Dice(f"stop {length}")
    stops_within_a_run(served, [dice.text(7), dice.chunk(40), dice.chunk(25), dice.text(5)], length)


def stops_within_a_run(served, prompt, length):
    """The answer is published up to the stop, so the next turn finds that, and nothing that was drafted beyond."""
    whole = served.answer(prompt)[0]["output_ids"]
    stop = whole[length]
    expected = whole[: whole.index(stop) + 1]
    served.flush()
    params = {"temperature": 0, "max_new_tokens": 20, "stop_token_ids": [stop]}
    output = served.engine.generate(segments=[segment.to_request() for segment in prompt], sampling_params=params)
    assert output["output_ids"] == expected and output["meta_info"]["finish_reason"]["matched"] == stop
    turn = [*prompt, text(expected), Dice("turn").text(4)]
    again = served.answer(turn)[0]
    assert again["meta_info"]["cached_tokens"] >= len(token_ids(prompt)) + len(expected) - 1
    served.flush()


@served_in("STANDALONE", "STANDALONE synchronous", "STANDALONE on two ranks", "EAGLE", "EAGLE3 of gpt-oss")
def test_policies(served):
    """Prompts of several policies in one batch: cold, warm, and in another order."""
    dice, oracle = Dice("policies"), PolicyOracle(served.path)
    head, docs, question = dice.text(7), dice.chunks(3, 20, 50), dice.text(6)
    for order in (docs, docs, docs[::-1]):
        prompt = [head, *order, question]
        given = [segment.to_request() for segment in prompt]
        links = ["block", "epic:tokens=4", "query:ratio=0.3", "copy", "full"]
        outputs = served.engine.generate(
            segments=[given] * len(links),
            link=links,
            sampling_params={"temperature": 0, "max_new_tokens": served.num_tokens, "ignore_eos": True},
            return_logprob=True,
        )
        kept = [
            keep_all_but(prompt, ()),
            epic(prompt, 4),
            oracle.query(prompt, 0.3, oracle.last_third, ()),
            keep_all_but(prompt, ()),
            None,
        ]
        for choice, output in zip(kept, outputs, strict=True):
            tokens = output["output_ids"]
            expected = (
                served.expected((text(token_ids(prompt)),), tuple(tokens[:-1]))
                if choice is None
                else oracle.logprobs(prompt, tokens[:-1], choice, ())
            )
            served.compare(expected, output)


@served_in("STANDALONE", "EAGLE", "EAGLE3 of gpt-oss")
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2))])
def test_drafts_depend_on_the_prompt_alone(served, seed):
    """Chunks read in place and copies read by SGLang's own attention, computed together, one by one, or after others
    with the same beginning, give the same drafts: as many are accepted in each step."""
    dice = Dice(f"drafts {seed}")
    docs = [dice.chunk(length) for length in (40, 25, 60)]
    prompt = [dice.text(6), *docs, dice.text(9)]

    def accepted(link="block"):
        given = [segment.to_request() for segment in prompt]
        params = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
        output = served.engine.generate(segments=given, link=link, sampling_params=params)
        return output["output_ids"], output["meta_info"]["spec_correct_drafts_histogram"]

    together = accepted()
    assert accepted("copy") == together
    served.flush()
    for doc in docs[::-1]:
        served.answer([dice.text(3), doc, dice.text(2)])
    assert accepted() == together
    served.flush()


@served_in("STANDALONE")
@pytest.mark.parametrize(
    "sampling",
    [
        {"frequency_penalty": 1.5},
        {"presence_penalty": 2.0, "min_p": 0.2},
        {"repetition_penalty": 1.5},
        {"frequency_penalty": 1.0, "custom_params": {"token_ids": [*range(1, VOCAB_SIZE, 2)]}},
        {"regex": "([a-z]{2} )*"},
    ],
    ids=["frequency", "presence and min_p", "repetition", "a processor", "a grammar"],
)
def test_penalties_as_for_prompts_without_chunks(served, sampling):
    """SGLang's penalties of what it speculates lag behind. A chunk that begins a prompt is what the same tokens without
    chunks are, which SGLang's own code answers. What follows the chunk begins like it, so its drafts are the same, too.
    """
    dice = Dice("penalties")
    beginning = dice.chunk(50)
    question = text([beginning.ids[0], *dice.ids(9)])
    processor = DisallowedTokensLogitsProcessor.to_str() if "custom_params" in sampling else None

    def answer(prompt, given):
        output = served.engine.generate(
            segments=[segment.to_request() for segment in prompt],
            sampling_params={"temperature": 0, "max_new_tokens": 30, "ignore_eos": True, **given},
            custom_logit_processor=processor if given else None,
        )
        return output["output_ids"], output["meta_info"]["spec_correct_drafts_histogram"]

    plain = answer([text(token_ids([beginning, question]))], sampling)
    assert answer([beginning, question], sampling) == answer([beginning, question], sampling) == plain
    assert answer([beginning, question], {})[0] != plain[0]


@served_in("STANDALONE")
def test_a_policy_whose_probe_ends_before_the_last_layer(served):
    with pytest.raises(ValueError, match="--speculative-algorithm"):
        served.engine.generate(
            segments=[chunk(Dice("blend").ids(20)).to_request(), text(Dice("blend").ids(4)).to_request()], link="blend"
        )
