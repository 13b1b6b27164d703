"""Distillation from the model's own full attention: prompts, answers and the loss that all such training shares.

The target under a chunk mask is the next-token distribution under full attention, over the question and the model's
own greedy answer.
"""

import argparse
import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from tqdm import tqdm

from oracle.segments import Segment, token_ids
from research.quality.asking import Prompts, as_user_message
from research.quality.questions import read_questions

ANSWERED_TOGETHER = 16

Example = tuple[list[Segment], list[int]]
"""A prompt and its greedy answer under full attention."""


def examples(model, tokenizer, args: argparse.Namespace) -> Iterator[Example]:
    """The prompts of `args.questions` with at most `args.max_tokens`, in an order set by the seed, repeated forever.

    Exits if there are none.
    """
    prompts = Prompts(tokenizer)
    questions = [as_user_message(question, tokenizer) for path in args.questions for question in read_questions(path)]
    made = [segments for segments in map(prompts.make, questions) if len(token_ids(segments)) <= args.max_tokens]
    if not made:
        sys.exit(f"error: no prompt has at most {args.max_tokens} tokens")
    order = random.Random(args.seed)
    order.shuffle(made)
    made = made[: args.steps * args.batch]
    answered = list(zip(made, greedy(model, made, args.new_tokens), strict=True))
    while True:
        yield from order.sample(answered, len(answered))


@torch.inference_mode()
def greedy(model, prompts: list[list[Segment]], limit: int) -> list[list[int]]:
    """Answers under full attention, each of at most `limit` tokens, including the end of sequence if it comes."""
    by_length = sorted(range(len(prompts)), key=lambda i: len(token_ids(prompts[i])))
    answers: list[list[int]] = [[] for _ in prompts]
    ends = model.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    for start in tqdm(range(0, len(prompts), ANSWERED_TOGETHER), desc="answers", disable=None):
        chosen = by_length[start : start + ANSWERED_TOGETHER]
        ids = [token_ids(prompts[i]) for i in chosen]
        width = max(map(len, ids))
        padded = torch.tensor([[0] * (width - len(row)) + row for row in ids], device=model.device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids], device=model.device)
        output = model.generate(padded, attention_mask=mask, max_new_tokens=limit, do_sample=False, pad_token_id=0)
        for i, row in zip(chosen, output[:, width:].tolist(), strict=True):
            end = next((place + 1 for place, token in enumerate(row) if token in ends), len(row))
            answers[i] = row[:end]
    return answers


def num_scored(segments: list[Segment], answer: list[int]) -> int:
    """The number of tokens after which distributions are compared: those of question and answer except the last."""
    return (len(segments[-1].ids) if segments[-1].kind == "text" else 1) + len(answer) - 1


def log_probabilities(
    model, weights: Mapping[str, torch.Tensor], ids: list[int], visible: torch.Tensor, scored: int
) -> torch.Tensor:
    """Log-probabilities after each of the `scored` tokens before the last one, [scored, vocab_size] fp32.

    weights: parameters that replace the model's own, but not those tied to them. visible: which token sees which,
    [n, n] bool.
    """
    dtype, device = model.get_input_embeddings().weight.dtype, model.device
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)[None, None].to(device)
    options = {
        "attention_mask": mask,
        "position_ids": torch.arange(len(ids), device=device)[None],
        "use_cache": False,
        "logits_to_keep": scored + 1,
    }
    tokens = torch.tensor([ids], device=device)
    output = torch.func.functional_call(model, dict(weights), (tokens,), options, tie_weights=False)
    return output.logits[0, :-1].float().log_softmax(-1)


def add_arguments(parser: argparse.ArgumentParser, *, steps: int, learning_rate: float | None, meaning: str) -> None:
    """The arguments common to all training.  meaning: help text of the learning rate."""
    parser.add_argument("--model", type=Path, required=True, help="folder of a model in safetensors")
    parser.add_argument("--questions", type=Path, nargs="+", required=True, help="JSON lines")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--batch", type=int, default=4, help="prompts of each step")
    parser.add_argument("--learning-rate", type=float, default=learning_rate, help=meaning)
    parser.add_argument("--clip", type=float, default=1.0, help="maximum norm of the gradient")
    parser.add_argument("--new-tokens", type=int, default=24, help="maximum tokens of a greedy answer")
    parser.add_argument("--max-tokens", type=int, default=2000, help="longer prompts are left out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True, help="new folder")


def optimise(parameters: list[torch.nn.Parameter], rate: float, losses: Iterator[torch.Tensor], args) -> None:
    """Adam with linear decay; each step averages `args.batch` losses."""
    optimizer = torch.optim.Adam(parameters, lr=rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, args.steps)
    for step in range(args.steps):
        total = 0.0
        for _ in range(args.batch):
            loss = next(losses)
            (loss / args.batch).backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(parameters, args.clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        print(f"step {step + 1} of {args.steps}: KL {total / args.batch:.4f}", flush=True)
