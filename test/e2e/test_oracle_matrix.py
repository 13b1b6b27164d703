"""The whole path on a CPU against the oracle: every model, every way of reusing chunks, in fp32.

LAZY_ALL_MODELS=1 adds the models whose attention is that of another one.
"""

import gc
import os

import pytest
import torch
from oracle.block_mask import Oracle
from oracle.models import MODELS, build
from oracle.scenarios import SCENARIOS, Dice, build_scenario, resolve
from oracle.segments import Segment, chunk, text, token_ids
from oracle.tokenizer import BOS, CORPUS

TOLERANCE = 1e-4  # of a log-probability
NUM_TOKENS = 6
NAMES = [name for name, spec in MODELS.items() if spec.core or os.environ.get("LAZY_ALL_MODELS")]

SERVER = dict(
    device="cpu",
    attention_backend="torch_native",
    grammar_backend="none",
    sampling_backend="pytorch",
    dtype="float32",
    mem_fraction_static=0.5,
    max_total_tokens=16384,
    log_level="error",
)
# Ways of running that every model must not try, but some model should.
VARIANTS = {
    "llama-yarn": {"disable_overlap_schedule": True, "chunked_prefill_size": 64},
    "qwen2": {"chunked_prefill_size": 64},
    "qwen3": {"chunked_prefill_size": 128, "enable_mixed_chunk": True},
    "stablelm": {"schedule_policy": "fcfs", "max_running_requests": 4},
}


class Served:
    """One model, served by the engine and known to the oracle."""

    def __init__(self, name: str, folder, **options):
        from sglang_lazy import Engine

        self.path = build(name, folder)
        self.oracle = Oracle(self.path)
        self.engine = Engine(model_path=self.path, **{**SERVER, **options})

    def answer(self, *prompts: list[Segment]) -> list[dict]:
        """Serve the prompts as one batch and hold every answer against the oracle."""
        segments = [[segment.to_request() for segment in prompt] for prompt in prompts]
        outputs = self.engine.generate(
            segments=segments if len(prompts) > 1 else segments[0],
            sampling_params={"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True},
            return_logprob=True,
        )
        outputs = outputs if len(prompts) > 1 else [outputs]
        for prompt, output in zip(prompts, outputs, strict=True):
            self.check(prompt, output)
        return outputs

    def check(self, prompt: list[Segment], output: dict) -> None:
        """The answer is greedy, its log-probabilities and the report about the prompt are right.

        Every token is judged after the tokens really answered before it. It must be the oracle's choice; where two
        tokens are closer than the tolerance tells apart, either is.
        """
        tokens, meta = output["output_ids"], output["meta_info"]
        assert len(tokens) == NUM_TOKENS
        expected = self.oracle.logprobs(prompt, tokens[:-1])
        chosen = expected[torch.arange(NUM_TOKENS), tokens]
        reported = torch.tensor([entry[0] for entry in meta["output_token_logprobs"]])
        assert (chosen - reported).abs().max() <= TOLERANCE, f"{chosen.tolist()} != {reported.tolist()}"
        assert (expected.amax(-1) - chosen).max() <= 2 * TOLERANCE, f"{expected.argmax(-1).tolist()} != {tokens}"
        assert meta["prompt_tokens"] == len(token_ids(prompt))
        assert [(entry["offset"], entry["tokens"]) for entry in meta.get("chunks", [])] == chunk_places(prompt)

    def play(self, names: list[str], seed: int = 0) -> None:
        """Answer the scenarios, each in order: the first steps of all as one batch, then the second steps, ..."""
        scenarios = [build_scenario(name, seed) for name in names]
        prompts, answers = [[] for _ in names], [[] for _ in names]
        for wave in range(max(map(len, scenarios))):
            playing = [index for index, steps in enumerate(scenarios) if wave < len(steps)]
            for index in playing:
                prompts[index].append(resolve(scenarios[index][wave], prompts[index], answers[index]))
            outputs = self.answer(*(prompts[index][wave] for index in playing))
            for index, output in zip(playing, outputs, strict=True):
                answers[index].append(output["output_ids"])


def chunk_places(prompt: list[Segment]) -> list[tuple[int, int]]:
    """(offset, tokens) of every chunk."""
    places, position = [], 0
    for segment in prompt:
        if segment.kind == "chunk":
            places.append((position, len(segment.ids)))
        position += len(segment.ids)
    return places


def hits(output: dict) -> list[bool]:
    return [entry["hit"] for entry in output["meta_info"]["chunks"]]


def chunk_tokens_reused(output: dict) -> int:
    return (output["meta_info"].get("cached_tokens_details") or {}).get("chunk", 0)


@pytest.fixture(scope="module", params=NAMES)
def served(request, model_dir):
    """One engine for all tests of a model; pytest runs them together and stops it before the next."""
    served = Served(request.param, model_dir, **VARIANTS.get(request.param, {}))
    yield served
    served.engine.shutdown()
    gc.collect()


def test_scenarios_in_batches(served):
    """All scenarios side by side: cold, warm, shuffled, second turns, plain requests among chunked ones."""
    served.play(list(SCENARIOS))


def test_after_a_flush(served):
    """A flushed cache reports no hit, computes the chunks again and gives the same answers."""
    steps = build_scenario("retrieval", seed=1)
    before = served.answer(steps[0].segments)[0]
    assert served.engine.flush_cache().success
    after = served.answer(steps[0].segments)[0]
    assert after["output_ids"] == before["output_ids"]
    assert not any(hits(after)) and after["meta_info"]["cached_tokens"] == 0


def test_honest_counts(served):
    """A cold prompt reports no reuse; a warm one, in any order, every chunk."""
    cold, warm, shuffled = (step.segments for step in build_scenario("retrieval", seed=2)[:3])
    total = sum(tokens for _, tokens in chunk_places(cold))
    for prompt, expected in ((cold, False), (warm, True), (shuffled, True)):
        output = served.answer(prompt)[0]
        assert hits(output) == [expected] * 5
        assert chunk_tokens_reused(output) == total * expected


def test_cold_batch_that_shares_chunks(served):
    """Requests that arrive together and need the same missing chunks, in different orders, beside plain ones."""
    dice = Dice("shared")
    docs = dice.chunks(4, 10, 30)
    prompts = [[dice.text(5), *dice.shuffled(docs), dice.text(4)] for _ in range(5)]
    served.answer(prompts[0], [dice.text(30)], *prompts[1:], [dice.text(3)], [docs[2]], [docs[2], docs[0]])


def test_prompts_given_as_text(served):
    """Each segment is tokenized by itself; BOS, where the tokenizer adds it, comes once and belongs to no chunk."""
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


@pytest.mark.parametrize("served", ["llama"], indirect=True)
@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario_alone(served, name):
    """One request at a time, so that a failure names the scenario and the step."""
    served.play([name], seed=3)


@pytest.fixture(scope="module")
def small_pool(model_dir):
    """A pool that holds two or three prompts of the test below, and half of the documents they draw from."""
    served = Served("llama-llama3", model_dir, max_total_tokens=600)
    yield served
    served.engine.shutdown()


def test_eviction(small_pool):
    """Answers stay right while documents are evicted and computed again, one request at a time and in batches."""
    dice = Dice("eviction")
    docs, seen, evicted, reused = dice.chunks(16, 50, 80), set(), 0, 0

    def prompt():
        return [dice.text(4), *dice.rng.sample(docs, 3), dice.text(6)]

    for size in [1] * 12 + [4] * 4:
        prompts = [prompt() for _ in range(size)]
        outputs = small_pool.answer(*prompts)
        for segments, output in zip(prompts, outputs, strict=True):
            used = [segment for segment in segments if segment.kind == "chunk"]
            evicted += sum(doc in seen and not hit for doc, hit in zip(used, hits(output), strict=True))
            reused += sum(hits(output))
        seen.update(segment for segments in prompts for segment in segments)
    assert evicted > 5 and reused > 5
