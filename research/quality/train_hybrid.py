"""Trains a small hybrid under the full mask on leaning worlds, and measures what chunks cost it.

    python -m research.quality.train_hybrid --out leaning-hybrid --minutes 5

`--out` gets `log.jsonl`, `weights.pt` (fp16) and `results.json`: exact match by kind of question and condition, and the
mean KL of the answers' tokens to the full mask. Needs torch and numpy.
"""

import argparse
import dataclasses
import json
import multiprocessing
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from research.quality.hybrid import Hybrid, HybridShape
from research.quality.hybrid_chunks import Prompts, answer, compute_alone, most_attended
from research.quality.hybrid_worlds import PAD, Asked, Sizes, Words, kinds, questions_of, rows

RATIOS = (0.25, 0.5)
"""Shares of the chunks' tokens that whole-chunk `query` may recompute."""


def losses(model: Hybrid, batch: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean cross entropy of answers, and of documents.  batch: as `rows` gives it, int64."""
    ids, lens, branches, asked = batch
    text, branch = model(ids, lens, branches)
    branches, asked = branches.flatten(0, 1), asked.flatten()
    place = torch.arange(branches.shape[1], device=ids.device)
    is_answer = (place[1:] >= asked[:, None]) & (branches[:, 1:] != PAD)
    is_text = torch.arange(1, ids.shape[1], device=ids.device) < lens[:, None]

    def mean(logits: torch.Tensor, targets: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        each = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
        return (each * counted.flatten()).sum() / counted.sum()

    return mean(branch[:, :-1], branches[:, 1:], is_answer), mean(text[:, :-1], ids[:, 1:], is_text)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """minutes: of training.  batch: worlds in a step.  context: the weight of documents' loss, which falls to a tenth.
    warm_up: steps in which the learning rate rises; it falls with time to a twentieth. worlds: made before training,
    half of them small."""

    minutes: float
    batch: int = 256
    learning_rate: float = 1.5e-3
    context: float = 0.5
    warm_up: int = 200
    worlds: int = 400_000
    seed: int = 0


def make_data(words: Words, sizes: Sizes, recipe: Recipe, documents: tuple[int, int], workers: int) -> list[np.ndarray]:
    """Worlds of (least, most) documents, half of the recipe's number."""
    share = min(2000, recipe.worlds // 2)
    jobs = [(words, sizes, 1000 * documents[1] + i, share, documents) for i in range(recipe.worlds // 2 // share)]
    if workers == 1:
        made = [rows(*job) for job in jobs]
    else:
        with multiprocessing.get_context("fork").Pool(workers) as pool:
            made = pool.starmap(rows, jobs, chunksize=1)
    return [np.concatenate(each) for each in zip(*made, strict=True)]


def train(model: Hybrid, recipe: Recipe, data: list[list[np.ndarray]], out: Path) -> int:
    """Returns the number of steps.  data: small worlds first, then all."""
    device = model.rotary.device
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    others = [weight for weight in model.parameters() if weight.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=device.type == "cuda")
    on_device = [[torch.from_numpy(each).to(device) for each in one] for one in data]
    gen = torch.Generator().manual_seed(recipe.seed)
    start, step = time.monotonic(), 0
    with open(out / "log.jsonl", "w", encoding="utf-8") as log:
        while (spent := (time.monotonic() - start) / 60 / recipe.minutes) < 1:
            # Small worlds first: what a question asks for is learned there.
            worlds = on_device[0] if torch.rand((), generator=gen) > 5 * spent else on_device[1]
            chosen = torch.randint(len(worlds[0]), (recipe.batch,), generator=gen).to(device)
            batch = [each[chosen].long() for each in worlds]
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                answers, documents = losses(model, batch)
            rate = recipe.learning_rate * min(1, (step + 1) / recipe.warm_up) * max(0.05, 1 - spent)
            for group in optimizer.param_groups:
                group["lr"] = rate
            (answers + recipe.context * max(0.1, 1 - 2 * spent) * documents).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            if step == 1:  # has compiled the layers
                start = time.monotonic()
            if step % 100 == 0 or step == 1:
                line = dict(step=step, answer=round(answers.item(), 4), context=round(documents.item(), 4))
                line["minutes"] = round((time.monotonic() - start) / 60, 2)
                print(json.dumps(line), file=log, flush=True)
                print(json.dumps(line), flush=True)
    return step


def batched(questions: list[Asked], device: torch.device) -> tuple[Prompts, torch.Tensor]:
    """The prompts, with answers, and which tokens of the questions predict these, [B, Q - 1] bool."""
    length = max(len(text) for texts, _, _ in questions for text in texts)
    whole = [asked + answered for _, asked, answered in questions]
    padded = lambda ids, size: ids + [PAD] * (size - len(ids))  # noqa: E731
    ids = torch.tensor([[padded(text, length) for text in texts] for texts, _, _ in questions], device=device)
    lens = torch.tensor([[len(text) for text in texts] for texts, _, _ in questions], device=device)
    question = torch.tensor([padded(each, max(map(len, whole))) for each in whole], device=device)
    asked = torch.tensor([len(each) for _, each, _ in questions], device=device)
    place = torch.arange(question.shape[1] - 1, device=device)
    counts = (place >= asked[:, None] - 1) & (question[:, 1:] != PAD)
    return Prompts(ids, lens, question, asked), counts


@torch.inference_mode()
def evaluate(model: Hybrid, words: Words, count: int, documents: int) -> dict:
    """By kind of question and condition: exact match and mean KL to the full mask."""
    device = model.rotary.device
    neutral = torch.tensor(questions_of(words, "alone", 1, 1, 2)[0][0][1], device=device)
    results: dict = {}
    for name, family, hops in kinds():
        prompts, counts = batched(questions_of(words, family, hops, count, documents), device)
        alone, behind = compute_alone(model, prompts), compute_alone(model, prompts, neutral)
        nothing = torch.zeros_like(prompts.lens, dtype=torch.bool)
        full, _ = answer(model, prompts, alone, ~nothing)
        full = full.float().log_softmax(-1)
        _, scores = answer(model, prompts, alone, nothing)
        chances = torch.rand(scores.shape, generator=torch.Generator().manual_seed(0)).to(device)
        conditions = {"full": (alone, ~nothing, "all")}
        for prefix, kept in (("block", alone), ("base", behind)):
            conditions[prefix] = (kept, nothing, "all")
            conditions[f"{prefix}, no P"] = (kept, nothing, "none")
        conditions["block, states skipped"] = (alone, nothing, "skipped")
        for ratio in RATIOS:
            chosen = most_attended(scores, prompts.lens, ratio)
            conditions[f"query {ratio}"] = (alone, chosen, "all")
            conditions[f"query {ratio}, no P"] = (alone, chosen, "none")
            conditions[f"base+query {ratio}"] = (behind, chosen, "all")
            conditions[f"random {ratio}"] = (alone, most_attended(chances, prompts.lens, ratio), "all")
        for condition, (kept, recomputed, transitions) in conditions.items():
            logits, _ = answer(model, prompts, kept, recomputed, transitions)
            logprobs = logits.float().log_softmax(-1)
            right = (logprobs[:, :-1].argmax(-1) == prompts.question[:, 1:]) | ~counts
            kl = (full.exp() * (full - logprobs)).sum(-1)[:, :-1][counts].mean()
            line = dict(exact_match=float(right.all(1).float().mean()), kl=float(kl), n=count)
            line["recomputed"] = float((prompts.lens * recomputed).sum() / prompts.lens.sum())
            results.setdefault(name, {})[condition] = {key: round(value, 4) for key, value in line.items()}
    return results


@torch.inference_mode()
def norms(model: Hybrid, words: Words, count: int) -> list[list[float]]:
    """By layer with the delta rule and head: the mean norm of P over chunks, relative to the identity's."""
    prompts, _ = batched(questions_of(words, "alone", 1, count, 4), model.rotary.device)
    kept = compute_alone(model, prompts)
    found = [each.p.norm(dim=(-2, -1)).mean(0) / model.shape.head_dim**0.5 for each in kept if each.p is not None]
    return [[round(value, 4) for value in each.tolist()] for each in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--workers", type=int, default=1, help="processes that make worlds")
    parser.add_argument("--worlds", type=int, default=Recipe.worlds)
    parser.add_argument("--batch", type=int, default=Recipe.batch)
    parser.add_argument("--count", type=int, default=200, help="test questions of each kind")
    parser.add_argument("--documents", type=int, default=8, help="of a test question, and the most in training")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    recipe, sizes = Recipe(args.minutes, args.batch, worlds=args.worlds), Sizes()
    torch.manual_seed(recipe.seed)
    began = time.monotonic()
    words = Words.of_worlds()
    data = [make_data(words, sizes, recipe, (2, most), args.workers) for most in (4, args.documents)]
    model = Hybrid(HybridShape(len(words))).to(device)
    made = time.monotonic() - began
    print(f"{len(words)} words, {sum(len(each[0]) for each in data)} worlds in {made:.0f} s", flush=True)
    if device.type == "cuda":
        for layer in model.branching:
            layer.compile(dynamic=False)
    steps = train(model, recipe, data, args.out)
    torch.save({name: weight.half().cpu() for name, weight in model.state_dict().items()}, args.out / "weights.pt")
    torch.set_float32_matmul_precision("highest")
    results = {
        "recipe": dataclasses.asdict(recipe),
        "shape": dataclasses.asdict(model.shape),
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "steps": steps,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "documents": args.documents,
        "norms_of_p": norms(model, words, args.count),
        "results": evaluate(model, words, args.count, args.documents),
    }
    (args.out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for name, conditions in results["results"].items():
        print(name, {key: value["exact_match"] for key, value in conditions.items()})


if __name__ == "__main__":
    main()
