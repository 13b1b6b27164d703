"""Models with recurrent layers, on a CPU with PyTorch for their kernels: all ways of reusing chunks against the oracle,
whose recurrence goes token by token. Models that are not core, and most on two ranks, are for the night."""

import contextlib
import functools
import json
import shutil
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import transformers
from served import TWO_RANKS
from test_served_policies import TRAINED, TRAINED_LINKS, with_tokens

from fakes import hybrids_on_cpu
from oracle.hybrids import HybridOracle
from oracle.models.build import build_model
from oracle.models.hybrids import HYBRIDS
from oracle.scenarios import SCENARIOS, Dice, build_scenario, resolve
from oracle.segments import Segment, text, token_ids
from sglang_lazy.core.config import PREAMBLE
from sglang_lazy.testing import CPU_OPTIONS
from support.engine import EngineProcess

pytestmark = [
    pytest.mark.slow,  # starts servers
    pytest.mark.skipif(torch.cuda.is_available(), reason="replaces kernels that a GPU has"),
]

TOLERANCE = 1e-4  # of a log-probability: both compute in fp32, and in another order
NUM_TOKENS = 4
OPTIONS = dict(
    **CPU_OPTIONS,
    max_total_tokens=2048,
    max_running_requests=8,
    context_length=2048,
    disable_cuda_graph=True,
    mamba_track_interval=64,  # how often SGLang keeps a state in decode: short answers come to it
    log_level="error",
)
IN_PARTS = ("qwen3.5", "falcon-h1")
"""Models whose chunks and prompts are computed in parts."""
WAYS = {name: {"chunked_prefill_size": 64} if name in IN_PARTS else {} for name in HYBRIDS}
WAYS["kimi-linear"] = {"max_running_requests": 24}  # as many pieces in a pass
WAYS |= {f"{name} on two ranks": {**WAYS[name], "tp_size": 2} for name in HYBRIDS}
"""How models are served."""
BY_DAY = {*(name for name, spec in HYBRIDS.items() if spec.core), "qwen3.5 on two ranks"}


class Served:
    """A model, served by the engine and known to the oracle."""

    num_tokens, tolerance = NUM_TOKENS, TOLERANCE

    def __init__(self, name: str, folder, **options):
        self.name, path = name, build_model(HYBRIDS[name], folder)
        oracle = HybridOracle(path)
        self.expected = functools.cache(lambda prompt, tokens, *more: oracle.logprobs(list(prompt), tokens, *more))
        self.neutral = tuple(transformers.AutoTokenizer.from_pretrained(path).encode(PREAMBLE))
        self.min_chunk = 2 if name.startswith("lfm2") else 3  # the width of convolutions, less one: others are text
        self.in_parts = "chunked_prefill_size" in options
        options = {**OPTIONS, **HYBRIDS[name].cpu_options, **options}
        self.engine = EngineProcess(**{"model_path": path, **options})

    def computed(self, prompt: list[Segment]) -> list[Segment]:
        """The prompt as a server computes it: short chunks, and one at the end, are text."""
        last = len(prompt) - 1
        is_text = [len(segment.ids) < self.min_chunk or i == last for i, segment in enumerate(prompt)]
        return [text(segment.ids) if be else segment for segment, be in zip(prompt, is_text, strict=True)]

    def preamble(self, link: str, prompt: list[Segment]) -> tuple[int, ...]:
        """What the policy `link` computes a prompt's chunks after."""
        name = link.partition("+")[0]
        return {"base": self.neutral, "base:preamble=lead": prompt[0].ids}.get(name, ())

    def answer(self, *prompts: list[Segment], link: str = "block") -> list[dict]:
        """Serve the prompts as one batch and compare every answer with the oracle's."""
        outputs = self.ask(*prompts, link=link)
        for prompt, output in zip(prompts, outputs, strict=True):
            self.compare(prompt, output, self.expected, self.preamble(link, prompt))
        return outputs

    def ask(self, *prompts: list[Segment], link: str = "block", **fields) -> list[dict]:
        """Serve the prompts as one batch.  fields: others of the requests."""
        return self.engine.generate(
            segments=[[segment.to_request() for segment in prompt] for prompt in prompts],
            link=[link] * len(prompts),
            sampling_params={"temperature": 0, "max_new_tokens": self.num_tokens, "ignore_eos": True},
            return_logprob=True,
            **fields,
        )

    def compare(self, prompt: list[Segment], output: dict, expected: Callable, preamble: Sequence[int] = ()) -> None:
        """expected: the oracle's log-probabilities of a prompt and the tokens of its answer."""
        tokens = output["output_ids"]
        logprobs = expected(tuple(self.computed(prompt)), tuple(tokens), preamble)[len(token_ids(prompt)) - 1 : -1]
        reported = torch.tensor([entry[0] for entry in output["meta_info"]["output_token_logprobs"]])
        chosen = logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert (chosen - reported).abs().max() <= self.tolerance
        assert (logprobs.amax(-1) - chosen).max() <= self.tolerance

    def play(self, names: list[str]) -> list[list[tuple[list[Segment], dict]]]:
        """Run scenarios in lockstep, as one batch per step; returns, by batch, the prompts and outputs."""
        scenarios = [build_scenario(name) for name in names]
        prompts, answers, waves = [[] for _ in names], [[] for _ in names], []
        for step in range(max(map(len, scenarios))):
            playing = [index for index, steps in enumerate(scenarios) if step < len(steps)]
            for index in playing:
                prompts[index].append(resolve(scenarios[index][step], prompts[index], answers[index]))
            batch = [prompts[index][step] for index in playing]
            outputs = self.answer(*batch)
            for index, output in zip(playing, outputs, strict=True):
                answers[index].append(output["output_ids"])
            waves.append([*zip(batch, outputs, strict=True)])
        return waves


def hits(output: dict) -> list[bool]:
    return [entry["hit"] for entry in output["meta_info"].get("chunks", [])]


def on_one_worker(name: str):
    marks = [] if name in BY_DAY else [pytest.mark.nightly]
    return pytest.param(name, marks=[pytest.mark.xdist_group(f"{name} chunks"), *marks])


@contextlib.contextmanager
def serving(name: str, model_dir, with_plugin, kind: Callable[..., Served] = Served, **options) -> Iterator[Served]:
    ranks = TWO_RANKS if options.get("tp_size") == 2 else {}
    with with_plugin(hybrids_on_cpu.load), pytest.MonkeyPatch.context() as environment:
        for variable, value in {**hybrids_on_cpu.ENVIRONMENT, **ranks}.items():
            environment.setenv(variable, value)
        served = kind(name, model_dir, **options)
    yield served
    served.engine.shutdown()


@pytest.fixture(scope="module", params=map(on_one_worker, WAYS))
def served(request, model_dir, with_plugin):
    with serving(request.param.partition(" ")[0], model_dir, with_plugin, **WAYS[request.param]) as served:
        yield served


def test_cold_warm_reordered_and_between_text(served):
    dice = Dice("recurrent")
    a, b, c = dice.chunks(3, 20, 60)
    start, between, question = dice.text(9), dice.text(5), dice.text(12)
    cold = [start, a, between, b, question]
    assert hits(*served.answer(cold)) == [False, False]
    assert hits(*served.answer(cold)) == [True, True]
    for prompt in ([b, a, question], [a, between, a, question], [start, c, b, a, b, dice.text(1)]):
        new = [segment is c for segment in prompt if segment.kind == "chunk"]
        assert hits(*served.answer(prompt)) == [not each for each in new]


def test_second_turns_compute_only_what_is_new(served):
    """After an answer, also with more chunks; and from the beginning once the states are gone."""
    dice = Dice("turns")
    a, b, c = dice.chunks(3, 20, 40)
    turns = [dice.text(9), a, dice.text(5), b]
    turns.append(dice.text(-2 - len(token_ids(turns)) & 63))  # the answer goes beyond a multiple of 64
    for segments in ([dice.text(3)], [dice.text(4), c, dice.text(2)], [dice.text(6)]):
        (output,) = served.answer(turns)
        num_known, turns = len(token_ids(turns)) + NUM_TOKENS - 1, [*turns, text(output["output_ids"]), *segments]
        (output,) = served.answer(turns)
        assert output["meta_info"]["cached_tokens"] >= num_known
    served.engine.flush_cache()
    (output,) = served.answer(turns)
    assert hits(output) == [False] * 3 and output["meta_info"]["cached_tokens"] == 0


def test_second_turns_after_a_stop(served):
    """With overlap, the pass after the last token runs before that is known."""
    dice = Dice("stop")
    a, b = dice.chunks(2, 20, 40)
    prompt = [dice.text(9), a, dice.text(5), b, dice.text(12)]
    (whole,) = served.answer(prompt)
    stop = whole["output_ids"][2]
    served.engine.flush_cache()
    output = served.engine.generate(
        segments=[segment.to_request() for segment in prompt],
        link="block",
        sampling_params={"temperature": 0, "max_new_tokens": 2 * NUM_TOKENS, "stop_token_ids": [stop]},
    )
    tokens = output["output_ids"]
    assert output["meta_info"]["finish_reason"]["type"] == "stop" and tokens == whole["output_ids"][: len(tokens)]
    (output,) = served.answer([*prompt, text(tokens), dice.text(6)])
    assert output["meta_info"]["cached_tokens"] >= len(token_ids(prompt)) + len(tokens) - 1


def test_scenarios(served):
    """All ways of reusing chunks, side by side, in a pool that holds less than half of their tokens."""
    served.play(list(SCENARIOS))


def test_prompts_without_chunks_beside_others(served):
    """In passes with chunks, SGLang keeps states of prompts without: with overlap, at their last multiple of 64. Second
    turns go on from there. It keeps no state of a prompt with chunks."""
    dice = Dice("beside")
    a, b = dice.chunks(2, 20, 60)
    between, question = dice.text(5), dice.text(12)
    linked = [[a, between, b, question], [b, dice.text(90)], [dice.text(80), a, question]]
    linked.append([a, dice.text(126 - len(a.ids))])  # the answers of the last pair go beyond 128 tokens
    for _ in range(2):  # beside chunks that are computed, and between those that are read
        plain = [dice.text(150), dice.text(128), dice.text(70), dice.text(126)]
        first = served.answer(*[each for pair in zip(linked, ([text] for text in plain), strict=True) for each in pair])
        answers = first[1::2]
        turns = [
            [text(prompt.ids + tuple(answer["output_ids"]) + dice.text(9).ids)]
            for prompt, answer in zip(plain, answers, strict=True)
        ]
        second = served.answer(*[each for pair in zip(turns, linked, strict=True) for each in pair])[::2]
        cached = [output["meta_info"]["cached_tokens"] for output in second]
        if served.min_chunk == 2:  # LFM2 is served without overlap
            assert cached == [len(prompt.ids) + NUM_TOKENS - 1 for prompt in plain]
        elif not served.in_parts:  # which end elsewhere
            assert cached == [(len(prompt.ids) + NUM_TOKENS - 1) // 64 * 64 for prompt in plain]
    for prompt in linked:  # as tokens, they begin like nothing that SGLang has cached
        (output,) = served.answer([text(token_ids(prompt) + list(dice.ids(1)))])
        assert output["meta_info"]["cached_tokens"] == 0


HOST_WAYS = {"": {}, "without overlap": hybrids_on_cpu.WITHOUT_OVERLAP, "on two ranks": {"tp_size": 2}}


@pytest.fixture(
    scope="module",
    params=[
        "qwen3.5",
        "kimi-linear",
        "falcon-h1 without overlap",
        pytest.param("qwen3.5 on two ranks", marks=pytest.mark.nightly),
    ],
)
def with_host(request, model_dir, with_plugin):
    name, _, way = request.param.partition(" ")
    tiers = {"enable_hierarchical_cache": True, "hicache_ratio": 2.0, "max_total_tokens": 400}
    with serving(name, model_dir, with_plugin, **HOST_WAYS[way], **tiers) as served:
        yield served


def test_states_come_back_from_the_host(with_host):
    """Chunks that others have pushed out of the device, in another order: nothing of them is computed again."""
    dice = Dice("host")
    a, b, *others = dice.chunks(10, 55, 65)
    start, between, question = dice.text(9), dice.text(5), dice.text(12)
    with_host.answer([start, a, between, b, question])
    for first, second in zip(others[::2], others[1::2], strict=True):
        with_host.answer([first, second, question])
    (output,) = with_host.answer([start, b, between, a, question])
    assert hits(output) == [True, True]
    assert output["meta_info"]["cached_tokens_details"]["host"] == len(a.ids) + len(b.ids)


@pytest.mark.parametrize("link", ["base", "base:preamble=lead"])
def test_chunks_after_a_preamble(served, link):
    """Which no prompt contains, or that begins it; of prompts that are computed in parts it is a part of its own."""
    dice = Dice(link)
    a, b, c = dice.chunks(3, 20, 60)
    start, between, question = dice.text(9), dice.text(5), dice.text(12)
    if served.min_chunk == 2:  # the inputs of LFM2's convolutions cannot be seen
        with pytest.raises(ValueError, match="convolutions"):
            served.answer([start, a, question], link=link)
        return
    served.answer([start, a, between, b, question])
    cold = [start, a, between, b, question]
    assert hits(*served.answer(cold, link=link)) == [False, False], "computed after nothing, they are others"
    assert hits(*served.answer(cold, link=link)) == [True, True]
    assert hits(*served.answer([start, c, b, a, b, dice.text(1)], link=link)) == [False, True, True, True]


@pytest.mark.parametrize("link", ["whole:ratio=0.5", "base+whole:ratio=0.5"])
def test_the_chunk_that_the_question_attends_to_most_is_text(served, link):
    """The answer is that of a prompt with one of two chunks as text, whichever it is."""
    if served.min_chunk == 2 and "base" in link:
        return  # refused, see above
    dice = Dice("whole")
    a, b = dice.chunks(2, 40, 40)
    start, between, question = dice.text(9), dice.text(5), dice.text(12)
    if served.name == "kimi-linear":
        with pytest.raises(ValueError, match="SGLang's own attention"):
            served.answer([start, a, question], link=link)
        return
    sampling = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    segments = [segment.to_request() for segment in (start, a, between, b, question)]
    output = served.engine.generate(segments=segments, link=link, sampling_params=sampling, return_logprob=True)
    assert sorted(entry["reused_tokens"] for entry in output["meta_info"]["chunks"]) in ([0, 0], [0, 40])
    reported = torch.tensor([entry[0] for entry in output["meta_info"]["output_token_logprobs"]])
    tokens, off = output["output_ids"], []
    for first, second in ((text(a.ids), b), (a, text(b.ids)), (a, b)):
        prompt = (start, first, between, second, question)
        expected = served.expected(prompt, tuple(tokens), served.preamble(link, prompt))[
            len(token_ids(prompt)) - 1 : -1
        ]
        off.append(float((expected.gather(1, torch.tensor(tokens)[:, None])[:, 0] - reported).abs().max()))
    assert min(off[:2]) <= TOLERANCE < max(off[:2]) and off[2] > TOLERANCE


def test_nothing_is_held(served):
    """After all of the above. An idle server checks its accounting, and a leaked slot or lock ends it."""
    served.engine.flush_cache()


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["qwen3.5", "lfm2"])
def test_trained_tokens_around_chunks(name, model_dir, with_plugin, tmp_path):
    """Of `kvlink`, which are text between chunks, and of `packet`, which are parts of them."""
    folder, dice = tmp_path / "model", Dice("trained")
    shutil.copytree(build_model(HYBRIDS[name], model_dir), folder)
    (folder / "lazy_tokens.json").write_text(json.dumps(TRAINED))
    a, b, c = dice.chunks(3, 20, 60)
    start, question = dice.text(9), dice.text(12)
    with serving(name, model_dir, with_plugin, model_path=str(folder)) as served:
        for link in TRAINED_LINKS:
            for prompt, hit in (([start, a, b, question], False), ([b, start, c, a, question], True)):
                (output,) = served.ask(prompt, link=link)
                assert hits(output) == [hit and segment is not c for segment in prompt if segment.kind == "chunk"]
                served.compare(with_tokens(prompt, link), output, served.expected)
        served.engine.flush_cache()
