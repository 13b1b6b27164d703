"""Trains a model, or a LoRA adapter for it, for the block mask, on its own answers under full attention.

python -m research.policies.train_model --model path/to/model --questions mine.jsonl --out trained
python -m research.policies.train_model --model path/to/model --questions mine.jsonl --lora 16 --out adapter

Block-Attention (arXiv 2409.15355) fine-tunes on questions over documents under the block mask and the full mask, so
that the model serves both. Here the original model is the teacher: its distributions under full attention are the
target under either mask. An adapter is written in PEFT's format.
"""

import argparse
import copy
import shutil
import sys
from collections.abc import Iterator

import torch
from transformers import AutoConfig, AutoTokenizer

from oracle.block_mask import load_model, visibility
from oracle.segments import text, token_ids
from research.policies import distill
from research.quality.adapter import add_adapter, save_adapter
from research.quality.divergence import kl_divergence

FULL_RATE, LORA_RATE = 2e-5, 1e-3


def losses(teacher, student, examples: Iterator[distill.Example]) -> Iterator[torch.Tensor]:
    """KL(teacher under full attention || student), alternating between the block mask and the full one."""
    for number, (segments, answer) in enumerate(examples):
        ids, scored = [*token_ids(segments), *answer], distill.num_scored(segments, answer)
        causal = visibility([text(token_ids(segments))], len(answer))
        with torch.no_grad():
            target = distill.log_probabilities(teacher, {}, ids, causal, scored)
        visible = causal if number % 2 else visibility(segments, len(answer))
        yield kl_divergence(distill.log_probabilities(student, {}, ids, visible, scored), target).mean()


def main() -> None:
    args = parse_args()
    if args.out.exists():
        sys.exit(f"error: {args.out} exists")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    teacher = load_model(str(args.model), getattr(torch, args.dtype), args.device)
    teacher.set_attn_implementation("sdpa")
    student = copy.deepcopy(teacher)
    teacher.requires_grad_(False)
    try:
        trained = list(student.parameters()) if args.lora is None else add_adapter(student, args.lora)
    except ValueError as error:
        sys.exit(f"error: {error}")
    rate = args.learning_rate or (FULL_RATE if args.lora is None else LORA_RATE)
    distill.optimise(trained, rate, losses(teacher, student, distill.examples(teacher, tokenizer, args)), args)
    if args.lora is not None:
        return save_adapter(student, args.out)
    shutil.copytree(args.model, args.out, ignore=shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json"))
    student.to(AutoConfig.from_pretrained(args.model).dtype).save_pretrained(args.out)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lora", type=int, metavar="RANK", help="train an adapter of this rank instead of the weights")
    meaning = f"of Adam; default: {FULL_RATE}, with --lora {LORA_RATE}"
    distill.add_arguments(parser, steps=500, learning_rate=None, meaning=meaning)
    return parser.parse_args()


if __name__ == "__main__":
    main()
