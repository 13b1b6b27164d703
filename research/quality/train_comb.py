"""Trains a Comb model: a chunk encoder, and cross layers that read its output, for a frozen Llama.

    python -m research.quality.train_comb --model leaning-stock --out leaning-comb
    python -m research.quality.train_comb --model smollm2 --data 2wiki.jsonl musique.jsonl --out smollm2-comb \
        --steps 2500 --rows 4 --length 8192 --chunk-length 7168 --text-length 1024 --learning-rate 3e-4

The target is the model's own distribution under full attention. The data are worlds or, with --data, questions (see
`read_questions`) with the model's own greedy answers. Training stops after `--minutes` and resumes when the
command is repeated. `--out` holds the model under the names of the public Comb models, `README.md`, `checkpoint.pt`,
`log.jsonl` and, with --data, `answers.jsonl`. Needs torch, numpy, tokenizers, safetensors; for --data, transformers.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import torch

from research.quality.comb_rows import CombRecipe, Example, example_of
from research.quality.comb_training import CombTrainer
from research.quality.leaning import FAMILIES, LEANING
from research.quality.llama import shape_of
from research.quality.training import train

NEW_TOKENS = 24


def read_examples(model: Path, data: list[Path], answers: Path, longest: tuple[int, int], device: str) -> list[Example]:
    """Questions as chat messages, with the model's greedy answers. The file `answers` keeps these across restarts.

    longest: the most chunk tokens and the most other tokens; longer prompts are left out.
    """
    from transformers import AutoTokenizer

    from oracle.block_mask import load_model
    from research.policies.distill import greedy
    from research.quality.asking import Prompts, as_user_message
    from research.quality.questions import read_questions

    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = Prompts(tokenizer)
    made = [prompts.make(as_user_message(q, tokenizer)) for path in data for q in read_questions(path)]
    made = [prompt for prompt in made if fits(prompt, longest)]
    if not answers.exists():
        teacher = load_model(str(model), torch.bfloat16 if device == "cuda" else torch.float32, device)
        teacher.set_attn_implementation("sdpa")
        lines = "".join(f"{json.dumps(answer)}\n" for answer in greedy(teacher, made, NEW_TOKENS))
        answers.parent.mkdir(parents=True, exist_ok=True)
        answers.write_text(lines, encoding="utf-8")
    known = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
    if len(known) != len(made):
        sys.exit(f"error: {answers} has {len(known)} answers for {len(made)} prompts")
    return [example_of(prompt, answer) for prompt, answer in zip(made, known, strict=True)]


def fits(prompt, longest: tuple[int, int]) -> bool:
    chunks = sum(len(segment.ids) for segment in prompt if segment.kind == "chunk")
    text = sum(len(segment.ids) for segment in prompt) - chunks
    return prompt[-1].kind == "text" and 0 < chunks <= longest[0] and text + NEW_TOKENS <= longest[1]


def write_card(trainer: CombTrainer, command: str) -> None:
    """Write README.md from the recipe and the log's last line."""
    recipe, comb = trainer.recipe, trainer.model
    *_, last = (json.loads(line) for line in (trainer.directory / "log.jsonl").read_text().splitlines())
    gates = [f"{cross.cross_attn_attn_gate.item():.3f}" for cross in comb.cross_layers]
    own = sum(weight.numel() for weight in comb.parameters())
    body = "\n".join(f"| {name} | {value} |" for name, value in last.items() if name not in ("step", "done"))
    data = f"questions of {', '.join(Path(path).name for path in recipe.data)}" if recipe.data else "worlds"
    text = f"""# {trainer.directory.resolve().name}

{Path(recipe.start).name}, its weights unchanged, with an encoder of {len(comb.places)} layers for chunks and as many
cross layers, before layers {", ".join(map(str, comb.places))}: {own / 1e6:.1f} M parameters were trained. A document's
token keeps {comb.bytes_per_token} bytes of KV in 16 bits. Without chunks it is {Path(recipe.start).name}.

    {command}

{trainer.step} steps of {recipe.rows} rows of {recipe.length} tokens of {data}, learning rate {recipe.learning_rate},
seed {recipe.seed}; `log.jsonl` has every setting. Targets are the model's own distributions under full attention.
Attention gates at the end, before tanh: {", ".join(gates)}.

| at the end of training | |
|---|---|
{body}

What a sentence means through the order of documents cannot be known: chunks have none.
"""
    (trainer.directory / "README.md").write_text(text, encoding="utf-8")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = CombRecipe()
    parser.add_argument("--model", type=Path, required=True, help="folder of the decoder, a Llama")
    parser.add_argument("--out", type=Path, required=True, help="folder of the model, its checkpoint and the log")
    parser.add_argument("--data", type=Path, nargs="+", default=[], help="questions as JSON lines, instead of worlds")
    parser.add_argument(
        "--families", nargs="+", choices=list(FAMILIES), default=list(LEANING), help="families of worlds"
    )
    parser.add_argument("--grouped", type=float, default=default.grouped, help="share of worlds with shared chunks")
    parser.add_argument("--cross-layers", type=int, nargs="+", help="default: the last of every two or four layers")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="stop after this many; the same command resumes"
    )
    parser.add_argument("--steps", type=int, default=6000, help="training steps; default: %(default)s")
    parser.add_argument("--rows", type=int, default=default.rows, help="rows per step; default: %(default)s")
    parser.add_argument("--length", type=int, default=default.length, help="tokens per row; default: %(default)s")
    parser.add_argument(
        "--chunk-length", type=int, default=default.chunk_length, help="of chunks per row; default: %(default)s"
    )
    parser.add_argument(
        "--text-length", type=int, default=default.text_length, help="of text per row; default: %(default)s"
    )
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="default: %(default)s")
    parser.add_argument("--warm-up", type=int, default=default.warm_up, help="in steps; default: %(default)s")
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--evaluate-every", type=int, default=2000, help="in steps; default: %(default)s")
    parser.add_argument(
        "--evaluate-rows", type=int, default=16, help="rows of each kind at the end; default: %(default)s"
    )
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="data processes")
    parser.add_argument("--attention", choices=("flex", "sdpa"), help="default: flex on a GPU, else sdpa")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    shape = shape_of(json.loads((args.model / "config.json").read_text(encoding="utf-8")))
    every = 4 if shape.num_hidden_layers > 8 else 2
    recipe = CombRecipe(
        shape=shape,
        families=tuple(args.families),
        steps=args.steps,
        rows=args.rows,
        length=args.length,
        learning_rate=args.learning_rate,
        warm_up=args.warm_up,
        start=str(args.model),
        seed=args.seed,
        cross_layers=tuple(args.cross_layers or range(every - 1, shape.num_hidden_layers, every)),
        chunk_length=args.chunk_length,
        text_length=args.text_length,
        grouped=args.grouped,
        data=tuple(map(str, args.data)),
    )
    examples = []
    if args.data:
        longest = (args.chunk_length, min(args.text_length, args.length - args.chunk_length))
        examples = read_examples(args.model, args.data, args.out / "answers.jsonl", longest, device.type)
    flex = (args.attention or ("flex" if device.type == "cuda" else "sdpa")) == "flex"
    trainer = CombTrainer(recipe, args.out, device, flex, examples)
    trainer.resume()
    train(
        trainer,
        args.minutes,
        args.workers,
        evaluate_every=args.evaluate_every,
        evaluate_rows=args.evaluate_rows,
    )
    write_card(trainer, " ".join(["python -m research.quality.train_comb", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
