"""`Errors` accepts rounding and nothing else: on made-up errors, and on the oracle's own answers in bf16."""

import contextlib
import functools

import pytest
import torch
from rounding import Errors, OfTokens

from oracle.block_mask import Oracle
from oracle.models.build import build
from oracle.scenarios import Dice
from oracle.segments import text, token_ids

NUM_ANSWERS, NUM_TOKENS = 8, 12
HEAD, CHUNK, QUESTION = 4, 50, 9  # tokens of a prompt


def check(ours: torch.Tensor) -> None:
    """ours: [NUM_ANSWERS, NUM_TOKENS]; plain PyTorch's errors are all 0.05."""
    errors = Errors()
    for answer in ours.tolist():
        reported = {"output_token_logprobs": [(-error, 0, None) for error in answer]}
        output = {"output_ids": [0] * NUM_TOKENS, "meta_info": reported}
        errors.add(output, lambda _: torch.zeros(NUM_TOKENS, 1), lambda _: torch.full((NUM_TOKENS, 1), 0.05))
    errors.check()


def test_one_wrong_token_is_accepted():
    ours = torch.full((NUM_ANSWERS, NUM_TOKENS), 0.05)
    ours[3, 5] = 1
    check(ours)


def test_one_wrong_answer_is_refused():
    ours = torch.full((NUM_ANSWERS, NUM_TOKENS), 0.05)
    ours[3] = 0.2
    with pytest.raises(AssertionError):
        check(ours)


@pytest.mark.parametrize("error", [0.11, float("nan")])
def test_all_wrong_answers_are_refused(error):
    with pytest.raises(AssertionError):
        check(torch.full((NUM_ANSWERS, NUM_TOKENS), error))


@pytest.mark.parametrize(("below", "accepted"), [(0.09, True), (0.11, False), (float("nan"), False)])
def test_tokens_below_the_best(below, accepted):
    """Plain PyTorch errs by 0.05 at most, so a token and the best may have changed places over 0.1."""
    errors, exact = Errors(), torch.tensor([[0.0, -below]]).expand(NUM_TOKENS, 2)
    chosen = [0] * (NUM_TOKENS - 1) + [1]
    reported = {"output_token_logprobs": [(exact[0, token].item(), token, None) for token in chosen]}
    errors.add({"output_ids": chosen, "meta_info": reported}, lambda _: exact, lambda _: exact - 0.05)
    with contextlib.nullcontext() if accepted else pytest.raises(AssertionError, match="below fp32's best"):
        errors.check_greedy()


class Served(Oracle):
    """Answers in bf16 that are wrong in one way: a causal mask, windows one token short, or the first chunk one
    position late."""

    def __init__(self, path: str, way: str):
        super().__init__(path, torch.bfloat16)
        self.way = way
        self.model.config.sliding_window -= way == "window"
        for weight in self.model.parameters():
            if weight.dim() == 3:  # experts, whose products in bf16 take half the time in this order in memory
                weight.data = weight.data.mT.contiguous().mT
        if way == "positions":
            self.model.register_forward_pre_hook(self._shift, with_kwargs=True)

    @staticmethod
    def _shift(_model, args, kwargs):
        kwargs["position_ids"][:, HEAD : HEAD + CHUNK] += 1
        return args, kwargs

    def logprobs(self, segments, generated=()):
        return super().logprobs([text(token_ids(segments))] if self.way == "mask" else segments, generated)

    def answer(self, segments, tokens=None) -> dict:
        """tokens: those of another's answer, for which this one's log-probabilities are reported."""
        if tokens is None:
            tokens, logprobs = self.generate(segments, NUM_TOKENS)
        else:
            logprobs = self.logprobs(segments, tokens[:-1])[range(len(tokens)), tokens].tolist()
        entries = [(logprob, token, None) for logprob, token in zip(logprobs, tokens, strict=True)]
        return {"output_ids": tokens, "meta_info": {"output_token_logprobs": entries}}


class Asked:
    """The prompts, their right answers, and what `Errors` compares answers with: the same for every way of being
    wrong."""

    def __init__(self, path: str):
        dice = Dice("rounding")
        self.path, self.exact, self.right = path, Oracle(path), Served(path, "")
        self.prompts = [
            [dice.text(HEAD), *dice.chunks(2, CHUNK, CHUNK), dice.text(QUESTION)] for _ in range(NUM_ANSWERS)
        ]
        self.logprobs = functools.cache(self._logprobs)
        self.answers = [self.right.answer(prompt) for prompt in self.prompts]

    def _logprobs(self, index: int, kind: str, tokens: tuple[int, ...]) -> torch.Tensor:
        prompt = self.prompts[index]
        oracle = self.right if kind == "rough" else self.exact
        return oracle.logprobs([text(token_ids(prompt))] if kind == "full" else prompt, tokens)

    def add(self, errors: Errors, index: int, output: dict) -> None:
        def of(kind: str) -> OfTokens:
            return lambda tokens: self.logprobs(index, kind, tuple(tokens))

        errors.add(output, of("exact"), of("rough"), of("full"))


@pytest.fixture(scope="module")
def asked(model_dir):
    """Of a model with windows and experts."""
    return Asked(build("gpt-oss", model_dir))


@pytest.mark.slow  # most of the time goes into the right answers; made-up errors have the limits
@pytest.mark.parametrize("way", ["", "mask", "window", "positions"])
def test_answers(asked, way):
    """All answers are right, or two of eight wrong. The same tokens in all show how little is noticed: a server that is
    wrong would also choose others."""
    errors, wrong = Errors(), Served(asked.path, way) if way else None
    for index, answer in enumerate(asked.answers):
        if wrong and index < 2:
            answer = wrong.answer(asked.prompts[index], answer["output_ids"])
        asked.add(errors, index, answer)
    with contextlib.nullcontext() if not way else pytest.raises(AssertionError):
        errors.check()
