"""Accuracy of a served model under full attention, and with chunks in every state of the cache.

Under every condition a real server answers the same questions over HTTP, greedily. Answers are scored (exact match, F1
or ROUGE-L, with 95% confidence intervals) and compared, token for token, with those of a Hugging Face model under the
same mask. The generated test set or files of questions, with any model:

    python -m research.quality.evaluate --model tiny-rag --count 1000 --out results/tiny-rag
    python -m research.quality.evaluate --model path/to/model --questions 2wiki.jsonl musique.jsonl --out results/model

`--out` gets `rows.jsonl` (a line with the environment, then one for each condition and group of questions),
`answers.jsonl` (one for each answer), `table.md`, and the servers' logs. Flags after `--` go to every server; the
Hugging Face model follows `--dtype` and `--enable-fp32-lm-head`.
"""

import argparse
import collections
import json
import signal
import sys
from pathlib import Path

import requests
import torch
from tqdm import tqdm

from benchmark.serving.arguments import positive, typed
from benchmark.serving.environment import describe_environment
from oracle.segments import token_ids
from research.quality.asking import Prompts, as_user_message
from research.quality.conditions import CONDITIONS, Condition, Served, serve, servers_of
from research.quality.questions import Question, generated, read_questions
from research.quality.reference import Claim, Reference
from sglang_lazy.testing import ServerError, device_flags, log_tail
from sglang_lazy.verify.scores import bootstrap, exact_match, wilson

COLUMNS = ("condition", "n", "exact match", "score", "= reference", "cached")


def numerics(server_flags: list[str]) -> dict:
    """Options for a `Reference` with the numerics of servers with these flags on this machine.

    Exits with a message if it cannot.
    """
    parser = argparse.ArgumentParser(prog="flags after `--`", allow_abbrev=False, add_help=False)
    on_gpu = torch.cuda.is_available()
    dtypes = ("bfloat16", "float16", "float32")
    parser.add_argument("--dtype", choices=dtypes, default="bfloat16" if on_gpu else "float32")
    parser.add_argument("--enable-fp32-lm-head", action="store_true")
    known, _ = parser.parse_known_args(server_flags)
    return {
        "dtype": getattr(torch, known.dtype),
        "device": "cuda" if on_gpu else "cpu",
        "fp32_lm_head": known.enable_fp32_lm_head,
    }


def compare(served: list[Served], reference: Reference) -> list[dict]:
    """For each answer, whether it is the reference's and, if not, the reference's own answer."""
    keys = [(tuple(one.segments), tuple(one.answered.output_ids), one.question.max_new_tokens) for one in served]
    # Most conditions give the same answer to the same prompt: judge it once.
    claims = [Claim(list(segments), list(output_ids), limit) for segments, output_ids, limit in dict.fromkeys(keys)]
    columns = []
    verdicts = tqdm(reference.judge(claims), total=len(claims), desc="reference", leave=False, disable=None)
    for claim, verdict in zip(claims, verdicts, strict=True):
        columns.append({"same_as_reference": verdict.same, "gap": round(verdict.gap, 5)})
        if not verdict.same:
            columns[-1]["reference_ids"] = reference.answer(claim.segments, claim.limit)
    found = dict(zip(dict.fromkeys(keys), columns, strict=True))
    return [found[key] for key in keys]


def answer_line(one: Served, tokenizer) -> dict:
    """The record of one answer. Only the first line is scored: models not trained to stop keep going."""
    question, output_ids = one.question, one.answered.output_ids
    answer = tokenizer.decode(output_ids, skip_special_tokens=True).strip().split("\n")[0]
    return {
        "condition": one.condition,
        "group": question.group,
        "id": question.id,
        "answer": answer,
        "output_ids": output_ids,
        "answers": question.answers,
        "exact_match": exact_match(answer, question.answers),
        "score": round(question.score(answer, question.answers), 4),
        "prompt_tokens": one.answered.prompt_tokens,
        "cached_tokens": one.answered.cached_tokens,
    }


def summarise(lines: list[dict]) -> dict:
    """The row of a condition and group: means with 95% intervals (Wilson for shares, bootstrap for scores)."""
    count = len(lines)
    right, scores = [line["exact_match"] == 1 for line in lines], [line["score"] for line in lines]
    row = {
        "condition": lines[0]["condition"],
        "group": lines[0]["group"],
        "n": count,
        "exact_match": sum(right) / count,
        "exact_match_interval": wilson(right),
        "score": sum(scores) / count,
        "score_interval": bootstrap(scores),
        "cached_share": sum(line["cached_tokens"] for line in lines) / sum(line["prompt_tokens"] for line in lines),
    }
    if "same_as_reference" in lines[0]:
        same = [line["same_as_reference"] for line in lines]
        row |= {"same_as_reference": sum(same) / count, "same_as_reference_interval": wilson(same)}
    return {
        name: [round(end, 4) for end in value]
        if isinstance(value, tuple)
        else round(value, 4)
        if isinstance(value, float)
        else value
        for name, value in row.items()
    }


def table(rows: list[dict]) -> str:
    """The rows as Markdown, one table per group, in percent."""

    def percent(row: dict, name: str) -> str:
        if name not in row:
            return ""
        if (interval := row[f"{name}_interval"]) is None:  # of a single answer
            return f"{100 * row[name]:.1f}"
        low, high = interval
        return f"{100 * row[name]:.1f} ({100 * low:.1f} to {100 * high:.1f})"

    text = []
    for group in dict.fromkeys(row["group"] for row in rows):
        text += [f"## {group}\n", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
        for row in rows:
            if row["group"] == group:
                shares = [percent(row, name) for name in ("exact_match", "score", "same_as_reference")]
                cells = [row["condition"], str(row["n"]), *shares, f"{100 * row['cached_share']:.0f}"]
                text.append(f"| {' | '.join(cells)} |")
        text.append("")
    return "\n".join(text)


def ask_servers(
    conditions: list[Condition], questions: list[Question], prompts: Prompts, args: argparse.Namespace
) -> list[Served]:
    """All answers under all conditions; starts each server once. Raises ServerError after printing the server's log."""
    served = []
    for server, its_conditions in servers_of(conditions):
        log = args.out / f"{its_conditions[0].name.replace(' ', '-')}.server.log"
        flags = ["--model-path", args.model, *device_flags(), *args.server_flags]
        try:
            served += serve(server, its_conditions, questions, prompts, flags, log, args.start_timeout)
        except (ServerError, requests.RequestException):
            print(log_tail(log, lines=60), file=sys.stderr)
            raise
    return served


def within_context(questions: list[Question], prompts: Prompts, context: int) -> list[Question]:
    """The questions that fit into `context` tokens; prints how many of each group do not."""
    fitting, left_out = [], collections.Counter()
    for question in questions:
        if len(token_ids(prompts.make(question))) + question.max_new_tokens <= context:
            fitting.append(question)
        else:
            left_out[question.group] += 1
    for group, count in left_out.items():
        print(f"{group}: {count} questions left out, longer than the model's {context} tokens", file=sys.stderr)
    return fitting


def write_answers(lines: list[dict], folder: Path) -> None:
    with open(folder / "answers.jsonl", "w", encoding="utf-8") as out:
        for line in lines:
            print(json.dumps(line, ensure_ascii=False), file=out)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="path or hub name")
    parser.add_argument("--questions", type=Path, nargs="+", help="JSON lines; default: the generated test set")
    parser.add_argument("--count", type=typed(positive), help="questions of each file or kind; generated: 1000")
    parser.add_argument("--conditions", nargs="+", choices=list(CONDITIONS), default=list(CONDITIONS), metavar="NAME")
    parser.add_argument("--chat", action="store_true", help="put prompts into the model's chat template")
    parser.add_argument("--no-reference", action="store_true", help="do not compare with a Hugging Face model")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="recorded in the results; required without git")
    parser.add_argument("--start-timeout", type=float, default=600, help="seconds to wait for a server")
    parser.add_argument("server_flags", nargs="*", help="flags for every server, after `--`")
    return parser.parse_args()


def main() -> None:
    from transformers import AutoConfig, AutoTokenizer

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stops the server on the way out
    args = parse_args()
    if not args.no_reference:
        reference_options = numerics(args.server_flags)  # an unknown type fails before anything is sent
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        if args.questions:
            questions = [question for path in args.questions for question in read_questions(path, args.count)]
        else:
            questions = [question for hops in (1, 2) for question in generated(args.count or 1000, hops, args.seed)]
    except ValueError as error:
        sys.exit(str(error))
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    if args.chat:
        questions = [as_user_message(question, tokenizer) for question in questions]
    prompts = Prompts(tokenizer)
    questions = within_context(questions, prompts, AutoConfig.from_pretrained(args.model).max_position_embeddings)
    if not questions:
        sys.exit("no questions left to ask")
    conditions = [CONDITIONS[name] for name in args.conditions]
    try:
        served = ask_servers(conditions, questions, prompts, args)
    except (ServerError, requests.RequestException) as error:
        sys.exit(f"failed: {error}")
    lines = [answer_line(one, tokenizer) for one in served]
    write_answers(lines, args.out)  # kept if the comparison is interrupted
    if not args.no_reference:
        reference = Reference(args.model, **reference_options)
        lines = [line | columns for line, columns in zip(lines, compare(served, reference), strict=True)]
        write_answers(lines, args.out)

    groups = collections.defaultdict(list)
    for line in lines:
        groups[line["condition"], line["group"]].append(line)
    rows = [summarise(lines) for lines in groups.values()]
    environment = describe_environment(commit=args.commit, seed=args.seed, server_flags=args.server_flags)
    with open(args.out / "rows.jsonl", "w", encoding="utf-8") as out:
        for line in ({"model": args.model, "environment": environment}, *rows):
            print(json.dumps(line), file=out)
    (args.out / "table.md").write_text(table(rows), encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
