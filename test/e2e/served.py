"""A model served by the engine, and the policies' oracle, which says what its answers must be."""

import math
from pathlib import Path

import torch

from oracle.policies import (
    PolicyOracle,
    epic,
    is_recomputed,
    keep_all_but,
    leading_text,
    without_best,
    without_best_of_each,
)
from oracle.segments import Segment
from sglang_lazy.testing import CPU_OPTIONS
from support.engine import EngineProcess

TOLERANCE = 1e-4  # of a log-probability
NUM_TOKENS = 4
PREAMBLE = "These lines stand alone."
ON_CPU = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "SGLANG_NCCL_SO_PATH": "none"}  # NCCL needs GPUs
TWO_RANKS = {} if torch.cuda.is_available() else ON_CPU
"""Environment variables of servers and engines with two ranks."""


class Served:
    """The model in a folder.  options: for the engine, beside those for a CPU."""

    def __init__(self, path: Path, **options):
        from transformers import AutoTokenizer

        self.oracle = PolicyOracle(path)
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.preamble = self.tokenizer.encode(PREAMBLE)
        options = {**CPU_OPTIONS, "log_level": "error", "lazy_preamble": PREAMBLE, **options}
        self.engine = EngineProcess(model_path=str(path), **options)

    def kept(self, prompt: list[Segment], link: str):
        """What the oracle keeps of each chunk under `link`, and the preamble after which it computes chunks.

        prompt: with the tokens that a model was trained to see around chunks.
        """
        base, _, policy = link.rpartition("+")
        preamble = {"": (), "base": self.preamble, "base:preamble=lead": leading_text(prompt)}[base]
        name, _, text = policy.partition(":")
        parameters = [parameter.partition("=")[2] for parameter in text.split(",")]
        value = parameters[0]
        if name in ("block", "kvlink", "packet"):
            return keep_all_but(prompt, ()), preamble
        if name == "epic":
            return epic(prompt, int(value)), preamble
        ratio = float(value)
        if name == "static":
            return without_best_of_each(prompt, -self.oracle.key_sizes(prompt, preamble), ratio), preamble
        scores = self.scores(prompt, name, preamble)
        if len(parameters) > 1:  # the part of the ratio that is chosen by key size
            small = without_best_of_each(prompt, -self.oracle.key_sizes(prompt, preamble), float(parameters[1]))
            scores = scores.masked_fill(is_recomputed(prompt, small), math.inf)
        best, edge = scores.sort(descending=True).values, math.ceil(ratio * len(scores))
        assert edge == len(best) or best[edge - 1] == 0 or best[edge - 1] - best[edge] > 1e-6, (
            "the choice is too close: draw another prompt"
        )
        return without_best(prompt, scores, ratio), preamble

    def scores(self, prompt: list[Segment], name: str, preamble) -> torch.Tensor:
        """The scores by which `query` or `blend` chooses."""
        if name == "blend":
            return self.oracle.blend_scores(prompt, preamble)
        assert name == "query"
        return self.oracle.query_scores(prompt, self.oracle.last_third, preamble)

    def ask(self, prompts: list[list[Segment]], links: list[str]) -> list[dict]:
        return self.engine.generate(
            segments=[[segment.to_request() for segment in prompt] for prompt in prompts],
            link=links,
            sampling_params={"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True},
            return_logprob=True,
        )

    def check(self, prompt: list[Segment], output: dict, kept, preamble) -> None:
        """Each token is the oracle's best after the preceding ones, and the log-probabilities are equal."""
        tokens = output["output_ids"]
        expected = self.oracle.logprobs(prompt, tokens[:-1], kept, preamble)
        chosen = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        reported = torch.tensor([entry[0] for entry in output["meta_info"]["output_token_logprobs"]])
        assert (chosen - reported).abs().max() <= TOLERANCE
        assert (expected.amax(-1) - chosen).max() <= TOLERANCE

    def answer(self, prompts: list[list[Segment]], links: list[str]) -> list[dict]:
        """Serve the prompts as one batch and compare every answer with the oracle's."""
        outputs = self.ask(prompts, links)
        for prompt, link, output in zip(prompts, links, outputs, strict=True):
            self.check(prompt, output, *self.kept(prompt, link))
        return outputs
