"""Confidence in a difference: two contenders that took turns in a run of bench.py, stage by stage.

With `--together` the same stage was sent to both within seconds, so other changes on the machine affected both. For
each case and phase this prints the mean of both, of a stage's mean TTFT or of the seconds that it took (`--of`), the
mean of the differences between the two of a pair, relative to the second contender's mean, half the width of its 95%
interval by Student's t, and the median of the differences, which is robust to a stall. Folders are pooled: a case may
have more or fewer stages in each, but of the same size. A stage is one of a case's `--rounds`, or one
request of `latency`.

    python -m benchmark.serving.paired results/chat --contenders lazy,stock
"""

import argparse
import collections
import json
import math
import statistics
from pathlib import Path

from scipy.stats import t

TABLE = "{:10} {:>6} {:>7} {:10} {:>6} {:>10} {:>10} {:>10} {:>8} {:>9}"
SAME = ("model", "kv_pool_gb", "workload", "request_rate", "max_concurrency", "phase")
COUNTS = ("num_prompts", "rounds")
CONFIDENCE = 0.95
MEASURES = ("ttft_ms", "duration_s")
"""The mean TTFT of a stage, and the time from its first send to its last token: the inverse of its throughput."""


def paired_stages(
    folders: list[Path], first: str, second: str, measure: str = MEASURES[0]
) -> dict[str, list[tuple[float, float]]]:
    """For each case and phase, `measure` of both contenders in each stage.

    Repeated measurements of a case are matched in order; a case with only one contender is left out. Raises ValueError
    if the contenders did not take turns, if their stages of a case differ, or if there is nothing to pair.
    """
    pairs = collections.defaultdict(list)
    for folder in folders:
        environment = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
        if "--together" not in environment["command"]:
            raise ValueError(f"{folder}: the contenders did not take turns (--together)")
        found = collections.defaultdict(lambda: {first: [], second: []})
        for line in (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row["contender"] in (first, second):
                case = {column: row[column] for column in SAME}
                case["parameters"] = {name: row["parameters"][name] for name in row["parameters"].keys() - {*COUNTS}}
                values = row[f"{measure}_stages"]
                case["requests"] = round(row["requests"] / len(values))  # per stage
                found[json.dumps(case, sort_keys=True)][row["contender"]] += values
        for key, stages in found.items():
            if not all(stages.values()):
                continue
            if len(stages[first]) != len(stages[second]):
                raise ValueError(f"{folder}: {first} and {second} have different stages of {key}")
            pairs[key] += zip(stages[first], stages[second], strict=True)
    if not pairs:
        raise ValueError(f"no case was sent to both {first} and {second}")
    return pairs


def compare(pairs: list[tuple[float, float]]) -> dict[str, float]:
    """Means of both; the mean and median difference and the half width of the mean's interval, in percent.

    The interval of a single pair is infinite.
    """
    first, second = (statistics.fmean(values) for values in zip(*pairs, strict=True))
    differences = [100 * (a - b) / second for a, b in pairs]
    half_width = math.inf
    if len(pairs) > 1:
        quantile = t.ppf((1 + CONFIDENCE) / 2, len(pairs) - 1)
        half_width = quantile * statistics.stdev(differences) / math.sqrt(len(pairs))
    return {
        "first": first,
        "second": second,
        "mean": statistics.fmean(differences),
        "half_width": half_width,
        "median": statistics.median(differences),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="results folders of bench.py --together")
    parser.add_argument("--contenders", default="lazy,stock", help="two; default: %(default)s")
    parser.add_argument("--of", choices=MEASURES, default=MEASURES[0], help="default: %(default)s")
    args = parser.parse_args()
    try:
        first, second = args.contenders.split(",")
        found = paired_stages(args.results, first, second, args.of)
    except (OSError, KeyError, ValueError) as error:
        parser.error(f"cannot pair: {error}")
    print(TABLE.format("workload", "chunks", "rate", "phase", "pairs", first, second, "mean %", "+-", "median %"))
    for key, pairs in found.items():
        case, result = json.loads(key), compare(pairs)
        chunks, length = (case["parameters"].get(name, "") for name in ("chunks", "chunk_len"))
        print(
            TABLE.format(
                case["workload"],
                f"{chunks}x{length}" if chunks else "",
                "inf" if case["request_rate"] is None else f"{case['request_rate']:g}",
                case["phase"],
                len(pairs),
                f"{result['first']:.2f}",
                f"{result['second']:.2f}",
                *(f"{result[name]:+.2f}" for name in ("mean", "half_width", "median")),
            )
        )


if __name__ == "__main__":
    main()
