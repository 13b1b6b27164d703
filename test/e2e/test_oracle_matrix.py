"""The whole path on a CPU against the oracle: every model, every way of reusing chunks, in fp32.

Core models run everything, the others each scenario once, and everything at night.
"""

import contextlib
import functools
import gc

import pytest
import torch

from fakes import shared_gate
from oracle.block_mask import Oracle, greedy
from oracle.models import MODELS
from oracle.models.build import build
from oracle.scenarios import SCENARIOS, Dice, build_scenario, resolve
from oracle.segments import Segment, chunk, text, token_ids
from oracle.tokenizer import BOS, CORPUS
from sglang_lazy.testing import CPU_OPTIONS
from support.engine import EngineProcess

TOLERANCE = 1e-4  # of a log-probability
NUM_TOKENS = 4
SERVABLE = [name for name, spec in MODELS.items() if spec.needs is None]
OTHERS = [name for name in SERVABLE if not MODELS[name].core]

# Window layers have as many slots as the others.
SERVER = dict(CPU_OPTIONS, mem_fraction_static=0.5, max_total_tokens=2048, swa_full_tokens_ratio=1.0, log_level="error")
# The pool holds the prompts of one group, but not those of two.
LONG = ["far_offset"]
SHORT = [name for name in SCENARIOS if name not in LONG]
GROUPS = [SHORT[::2], SHORT[1::2], LONG]
# Ways of running that at least one model should try.
VARIANTS = {
    "llama-yarn": {"disable_overlap_schedule": True, "chunked_prefill_size": 64},
    "qwen2": {"chunked_prefill_size": 64, "schedule_policy": "dfs-weight"},
    "qwen3": {"chunked_prefill_size": 128, "enable_mixed_chunk": True},
    "gpt-oss": {"chunked_prefill_size": 64},
    "stablelm": {"schedule_policy": "lpm", "max_running_requests": 4},
    # The pool has room for a prompt and the originals of its copied chunks.
    "glm4 copies": {"lazy_default_link": "copy", "max_total_tokens": 3072},
    "gpt-oss copies": {"lazy_default_link": "copy", "max_total_tokens": 3072, "disable_hybrid_swa_memory": True},
}

Waves = list[list[tuple[list[Segment], dict]]]  # by batch: the prompts and their outputs


class Served:
    """One model, served by the engine and known to the oracle."""

    num_tokens = NUM_TOKENS

    def __init__(self, name: str, folder, **options):
        self.path = build(name, folder)
        oracle = Oracle(self.path)
        self.expected = functools.cache(lambda prompt, tokens: oracle.logprobs(list(prompt), list(tokens)))
        self.engine = EngineProcess(**{"model_path": self.path, **SERVER, **MODELS[name].cpu_options, **options})

    def flush(self) -> None:
        self.engine.flush_cache()

    def answer(self, *prompts: list[Segment]) -> list[dict]:
        """Serve the prompts as one batch and compare every answer with the oracle's."""
        segments = [[segment.to_request() for segment in prompt] for prompt in prompts]
        outputs = self.engine.generate(
            segments=segments if len(prompts) > 1 else segments[0],
            sampling_params={"temperature": 0, "max_new_tokens": self.num_tokens, "ignore_eos": True},
            return_logprob=True,
        )
        outputs = outputs if len(prompts) > 1 else [outputs]
        for prompt, output in zip(prompts, outputs, strict=True):
            self.check(prompt, output)
        return outputs

    def check(self, prompt: list[Segment], output: dict) -> None:
        """The answer is the oracle's, and its log-probabilities and the report on the prompt are right."""
        tokens, meta = output["output_ids"], output["meta_info"]
        assert len(tokens) == self.num_tokens
        # Each token must be the oracle's choice after the tokens answered before it; by induction, all are.
        expected = self.expected(tuple(prompt), tuple(tokens[:-1]))
        assert greedy(expected) == tokens
        chosen = expected.amax(-1)
        reported = torch.tensor([entry[0] for entry in meta["output_token_logprobs"]])
        assert (chosen - reported).abs().max() <= TOLERANCE, f"{chosen.tolist()} != {reported.tolist()}"
        assert meta["prompt_tokens"] == len(token_ids(prompt))
        assert [(entry["offset"], entry["tokens"]) for entry in meta.get("chunks", [])] == chunk_places(prompt)

    def play(self, names: list[str]) -> Waves:
        """Run the scenarios in lockstep: the first steps of all as one batch, then the second steps, ..."""
        scenarios = [build_scenario(name) for name in names]
        prompts, answers, waves = [[] for _ in names], [[] for _ in names], []
        for step in range(max(map(len, scenarios))):
            playing = [index for index, steps in enumerate(scenarios) if step < len(steps)]
            for index in playing:
                prompts[index].append(resolve(scenarios[index][step], prompts[index], answers[index]))
            outputs = self.answer(*(prompts[index][step] for index in playing))
            for index, output in zip(playing, outputs, strict=True):
                answers[index].append(output["output_ids"])
            waves.append([(prompts[index][step], output) for index, output in zip(playing, outputs, strict=True)])
        return waves


def chunk_places(prompt: list[Segment]) -> list[tuple[int, int]]:
    """(offset, tokens) of every chunk."""
    places, position = [], 0
    for segment in prompt:
        if segment.kind == "chunk":
            places.append((position, len(segment.ids)))
        position += len(segment.ids)
    return places


def hits(output: dict) -> list[bool]:
    return [entry["hit"] for entry in output["meta_info"].get("chunks", [])]


def chunk_tokens_reused(output: dict) -> int:
    return (output["meta_info"].get("cached_tokens_details") or {}).get("chunk", 0)


def cacheable_chunks(prompt: list[Segment]) -> list[tuple[int, ...]]:
    """The chunks without the prompt's last token, which is text."""
    chunks = [segment.ids for segment in prompt if segment.kind == "chunk"]
    return [*chunks[:-1], chunks[-1][:-1]] if prompt[-1].kind == "chunk" else chunks


def reuse(waves: Waves) -> list[tuple[bool, bool]]:
    """For every chunk: whether an earlier wave had it, alone or as the prefix of a longer one, and whether it was a
    hit. Chunks of one token are left out, since another prompt may begin with that token by chance."""
    brought, pairs = set(), []
    for wave in waves:
        for prompt, output in wave:
            asked = zip(cacheable_chunks(prompt), hits(output), strict=True)
            pairs += [(ids in brought, hit) for ids, hit in asked if len(ids) > 1]
        for prompt, _ in wave:
            brought |= {ids[:end] for kind, ids in prompt if kind == "chunk" for end in range(1, len(ids) + 1)}
    return pairs


def check_counts(waves: Waves) -> None:
    """Nothing is cached at first, everything later, and the counts say so."""
    assert all(hit == brought for brought, hit in reuse(waves))
    seen = []
    for wave in waves:
        for prompt, output in wave:
            cached = output["meta_info"]["cached_tokens"]
            in_chunks = sum(len(ids) for ids, hit in zip(cacheable_chunks(prompt), hits(output), strict=True) if hit)
            assert chunk_tokens_reused(output) == in_chunks
            if prompt in seen:
                assert cached == len(token_ids(prompt)) - 1
            elif not seen:
                assert cached - in_chunks <= 1  # another prompt may begin with the same token by chance
        seen += [prompt for prompt, _ in wave]


# An engine takes half a minute to start: other rotations, pairings and copies wait for `make test-all`; in `make test`
# only the kernel tests have them.
FAST = ("llama",)


def on_one_worker(name: str, *more):
    """The parameter `name`; all tests with the same name run in the process that has its engine."""
    marks = [pytest.mark.xdist_group(name), *([] if name in FAST else [pytest.mark.slow]), *more]
    return pytest.param(name, marks=marks)


@pytest.fixture(
    scope="module",
    params=[
        on_one_worker(name, *([pytest.mark.nightly] if name in (*OTHERS, "gpt-oss copies") else []))
        for name in (*SERVABLE, "glm4 copies", "gpt-oss copies")
    ],
)
def served(request, model_dir):
    """One engine for all tests of a model; pytest groups them and stops the engine before the next."""
    name, _, _ = request.param.partition(" ")
    served = Served(name, model_dir, **VARIANTS.get(request.param, {}))
    yield served
    served.engine.shutdown()
    gc.collect()


def test_cold_warm_and_evicted(served):
    """Each group twice: cold, warm, shuffled, second turns; then cold again, since the other groups have evicted it."""
    for names in GROUPS * 2:
        check_counts(served.play(names))


def test_eviction_within_batches(served):
    """All scenarios side by side, with plain requests, in a pool that holds less than half of them."""
    asked_again = [hit for brought, hit in reuse(served.play(list(SCENARIOS))) if brought]
    assert asked_again.count(False) > 5 and asked_again.count(True) > 5


def test_after_a_flush(served):
    """After a flush no chunk is a hit; chunks are computed again with the same answers."""
    prompt = build_scenario("retrieval")[0].segments
    served.answer(prompt)
    served.flush()
    output = served.answer(prompt)[0]
    assert not any(hits(output)) and output["meta_info"]["cached_tokens"] == 0


def test_cold_batch_that_shares_chunks(served):
    """Requests that arrive together and miss the same chunks, in different orders, beside plain ones."""
    dice = Dice("shared docs")
    docs = dice.chunks(4, 10, 30)
    prompts = [[dice.text(5), *dice.shuffled(docs), dice.text(4)] for _ in range(5)]
    served.answer(prompts[0], [dice.text(30)], *prompts[1:], [dice.text(3)], [docs[2]], [docs[2], docs[0]])


def test_prompts_given_as_text(served):
    """Each segment is tokenized by itself; the tokenizer's BOS is added once and belongs to no chunk."""
    from transformers import AutoTokenizer

    from sglang_lazy import chunk as text_chunk

    tokenizer = AutoTokenizer.from_pretrained(served.path)
    bos = [BOS] if tokenizer("a")["input_ids"][0] == BOS else []
    one, two = CORPUS.strip().splitlines()[:2]

    def ids(piece):
        return tokenizer.encode(piece, add_special_tokens=False)

    for given, expected in (
        (["Documents: ", text_chunk(one), " ", text_chunk(two), " Who built the bridge?"],
         [text(bos + ids("Documents: ")), chunk(ids(one)), text(ids(" ")), chunk(ids(two)),
          text(ids(" Who built the bridge?"))]),
        ([text_chunk(two), text_chunk(one)], [*([text(bos)] if bos else []), chunk(ids(two)), chunk(ids(one))]),
    ):  # fmt: skip
        params = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
        served.check(expected, served.engine.generate(segments=given, sampling_params=params, return_logprob=True))


@pytest.mark.parametrize("name", [on_one_worker(name) for name in OTHERS])
def test_other_models(name, model_dir, with_plugin):
    """Each scenario once: cold, and warm where it repeats itself."""
    with with_plugin(shared_gate.load) if name == "qwen2-moe" else contextlib.nullcontext():
        served = Served(name, model_dir)
    try:
        for names in GROUPS:
            check_counts(served.play(names))
    finally:
        served.engine.shutdown()


@pytest.mark.parametrize("name", [on_one_worker("gpt-oss"), on_one_worker("gemma4", pytest.mark.nightly)])
def test_few_slots_for_windows(name, model_dir):
    """Window layers have a fifth of the others' slots: chunks lose the window KV that no prompt reads, and some of the
    rest."""
    served = Served(name, model_dir, chunked_prefill_size=64, swa_full_tokens_ratio=0.2)
    try:
        asked_again = [hit for names in GROUPS[:2] * 2 for brought, hit in reuse(served.play(names)) if brought]
        assert asked_again.count(True) > 20 and asked_again.count(False) > 5
    finally:
        served.engine.shutdown()


@pytest.mark.parametrize("served", [on_one_worker("llama")], indirect=True)
@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario_alone(served, name):
    """One request at a time, so that a failure names the scenario and the step."""
    served.flush()
    check_counts(served.play([name]))
