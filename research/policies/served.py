"""Compares a server's answers under each policy with the oracle's, token by token.

python -m research.policies.served --model path/to/model --questions questions.jsonl --out served.jsonl

Every prompt is served cold and then warm, in batches of all policies. Writes a line for each answer. At each step the
oracle, a Hugging Face model in fp32, gets the tokens served so far. Differences in log-probability, one per step:
`margins` from the oracle's best token to its second, `deficits` from its best to the served one (0: the same token),
`plain_deficits` from its best to that of plain PyTorch in the server's dtype, which shows what rounding alone costs.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer

from oracle.segments import Segment
from research.policies.evaluate import draw
from research.policies.prototype import Prototype
from research.policies.specs import SERVER, parse
from research.quality.asking import Prompts
from sglang_lazy import Engine
from sglang_lazy.core.config import PREAMBLE
from sglang_lazy.testing import device_options

KINDS = ["block", "epic:tokens=16", "query:ratio=0.15", "blend:ratio=0.15", "static:ratio=0.15"]
POLICIES = ["full", "base:preamble=lead", *(base + kind for base in ("", "base+") for kind in KINDS)]


def main() -> None:
    args = parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    preambles = {SERVER: tokenizer.encode(PREAMBLE)}
    drawn = list(draw(args, Prompts(tokenizer), tokenizer))
    asked = [(question, segments, link) for question, segments in drawn for link in args.policies]
    options = device_options() | {"dtype": args.dtype, "log_level": "error"} | json.loads(args.engine)
    engine = Engine(model_path=args.model, **options)
    try:
        outputs = [answers(engine, [ask[1:] for ask in asked], args) for _ in ("cold", "warm")]
    finally:
        engine.shutdown()
    exact = Prototype(args.model, torch.float32, args.device)
    plain = Prototype(args.model, getattr(torch, args.dtype), args.device)
    with open(args.out, "a", encoding="utf-8") as out:
        for phase, answered in zip(("cold", "warm"), outputs, strict=True):
            for (question, segments, link), output in zip(asked, answered, strict=True):
                line = {"group": question.group, "id": question.id, "policy": link, "phase": phase}
                print(json.dumps(line | compare(exact, plain, segments, link, preambles, output)), file=out, flush=True)


def answers(engine: Engine, asked: list[tuple[list[Segment], str]], args: argparse.Namespace) -> list[dict]:
    """The engine's answers to (prompt, link) pairs; pairs of one prompt form a batch."""
    params = {"temperature": 0, "max_new_tokens": args.new_tokens, "ignore_eos": True}
    outputs, size = [], len(args.policies)
    for batch in (asked[start : start + size] for start in range(0, len(asked), size)):
        prompts = [[segment.to_request() for segment in segments] for segments, _ in batch]
        links = [link for _, link in batch]
        outputs += engine.generate(segments=prompts, link=links, sampling_params=params, return_logprob=True)
    return outputs


def compare(exact: Prototype, plain: Prototype, segments: list[Segment], link: str, preambles, output: dict) -> dict:
    """The margins and deficits of an answer's steps, to three digits, and how far off its log-probabilities are."""
    spec, tokens = parse(link), torch.tensor(output["output_ids"])
    preamble = spec.preamble(segments, preambles)

    def score(oracle: Prototype) -> torch.Tensor:
        return oracle.start(segments, spec.kept(oracle, segments, preambles), preamble).score(tokens.tolist()).cpu()

    scores, its_best = score(exact), score(plain).argmax(-1)
    best, second = scores.topk(2).values.T

    def below(chosen: torch.Tensor) -> torch.Tensor:
        return best - scores.gather(1, chosen[:, None])[:, 0]

    reported = torch.tensor([entry[0] for entry in output["meta_info"]["output_token_logprobs"]])
    return {
        "margins": digits(best - second),
        "deficits": digits(below(tokens)),
        "plain_deficits": digits(below(its_best)),
        "logprob_error": (reported - best + below(tokens)).abs().mean().item(),
        "cached_tokens": output["meta_info"]["cached_tokens"],
    }


def digits(values: torch.Tensor) -> list[float]:
    return [float(f"{value:.3g}") for value in values.tolist()]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="path or hub name")
    parser.add_argument("--questions", type=Path, nargs="+", required=True, help="JSON lines")
    parser.add_argument("--policies", nargs="+", default=POLICIES, metavar="LINK")
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--count", type=int, default=10, help="prompts of each file")
    parser.add_argument("--skip", type=int, default=0, help="prompts of each file to leave out first")
    parser.add_argument("--max-tokens", type=int, default=1500, help="longer prompts are left out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default=device_options()["dtype"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--engine", default="{}", help="keywords of the engine, as JSON")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are appended to this file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
