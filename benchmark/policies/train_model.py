"""Trains all weights of a model for the block mask, by its own answers under full attention.

python -m benchmark.policies.train_model --model path/to/model --questions mine.jsonl --out trained

Block-Attention (arXiv 2409.15355) fine-tunes on questions over documents under the block mask and under the full one,
so that the model serves both. Here the model as it was is the teacher: its distributions under full attention are the
target under either mask.
"""

import argparse
import copy
import shutil
import sys
from collections.abc import Iterator

import torch
from transformers import AutoConfig, AutoTokenizer

from benchmark.policies import distill
from oracle.block_mask import load_model, visibility
from oracle.segments import text, token_ids


def losses(teacher, student, examples: Iterator[distill.Example]) -> Iterator[torch.Tensor]:
    """KL(teacher under full attention || student), under the block mask and under the full one in turn."""
    for number, (segments, answer) in enumerate(examples):
        ids, scored = [*token_ids(segments), *answer], distill.num_scored(segments, answer)
        causal = visibility([text(token_ids(segments))], len(answer))
        with torch.no_grad():
            target = distill.log_probabilities(teacher, {}, ids, causal, scored)
        visible = causal if number % 2 else visibility(segments, len(answer))
        yield distill.divergence(distill.log_probabilities(student, {}, ids, visible, scored), target)


def main() -> None:
    args = parse_args()
    if args.out.exists():
        sys.exit(f"error: {args.out} exists")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    teacher = load_model(str(args.model), getattr(torch, args.dtype), args.device)
    teacher.set_attn_implementation("sdpa")
    student = copy.deepcopy(teacher)
    teacher.requires_grad_(False)
    examples = distill.examples(teacher, tokenizer, args)
    distill.optimise(list(student.parameters()), args.learning_rate, losses(teacher, student, examples), args)
    shutil.copytree(args.model, args.out, ignore=shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json"))
    student.to(AutoConfig.from_pretrained(args.model).dtype).save_pretrained(args.out)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    distill.add_arguments(parser, steps=500, learning_rate=2e-5, meaning="of Adam")
    return parser.parse_args()


if __name__ == "__main__":
    main()
