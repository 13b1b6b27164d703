"""Tables of bench.py and decode_speed.py."""

import collections
import json
import math
from collections.abc import Callable
from pathlib import Path

from benchmark.report.cells import folders, in_order, lines, number, only, table
from benchmark.serving.contenders import POLICY
from benchmark.serving.paired import compare, paired_stages

OLD_NAMES = {"materialize": "copy"}
"""Contenders that have another name in older data."""
PAIR = ("lazy", "stock")
PHASES = {"new": "cold", "same order": "same order", "new order": "reordered"}
Columns = dict[str, Callable[[dict], str]]


def serving_rows(sources: list[Path]) -> list[dict]:
    """Rows of bench.py, each with its folder."""
    found = [{**row, "folder": folder} for folder in folders(sources) for row in lines(folder / "rows.jsonl")]
    return [{**row, "contender": OLD_NAMES.get(row["contender"], row["contender"])} for row in found]


def differing(rows: list[dict], columns: Columns) -> Columns:
    """The columns in which rows differ."""
    return {name: value for name, value in columns.items() if len({value(row) for row in rows}) > 1}


def model(row: dict) -> str:
    return row["model"]


def pool(row: dict) -> str:
    return f"{row['kv_pool_gb']:g}"


def rate(row: dict) -> str:
    return "all at once" if row["request_rate"] is None else f"{row['request_rate']:g}"


def run_name(row: dict) -> str:
    return f"{row['folder'].parent.name}/{row['folder'].name}"


def difference(pairs: list[tuple[float, float]]) -> str:
    """The mean difference with its interval; blank if there are no pairs."""
    if not pairs:
        return ""
    found = compare(pairs)
    return f"{found['mean']:+.1f} ± {found['half_width']:.1f}%"


def pairs_of(found: list[Path], first: str, second: str, fits: Callable[[dict], bool], measure: str = "ttft_ms"):
    """Pairs of all stages of the matching cases; None if the data predate the measure."""
    try:
        by_case = paired_stages(found, first, second, measure)
    except KeyError:
        return []
    return [pair for case, pairs in by_case.items() if fits(json.loads(case)) for pair in pairs]


def took_turns(folder: Path) -> bool:
    return "--together" in json.loads((folder / "environment.json").read_text(encoding="utf-8"))["command"]


def latency(sources: list[Path]) -> str:
    """One request at a time: median milliseconds to the first token."""
    rows = [row for row in serving_rows(sources) if row["workload"] == "latency" and row["contender"] in PAIR]
    cases = collections.defaultdict(lambda: collections.defaultdict(list))
    for row in rows:
        chunks, chunk_len = row["parameters"]["chunks"], row["parameters"]["chunk_len"]
        cases[chunks * chunk_len, chunks, row["model"], row["folder"]][row["contender"], row["phase"]].append(row)
    extra = differing(rows, {"model": model, "run": run_name})
    body = []
    for (tokens, chunks, name, folder), found in sorted(cases.items()):
        of = {key: only(each) for key, each in found.items()}
        first = next(iter(of.values()))
        parameters = first["parameters"]

        def is_cold(case: dict, name=name, parameters=parameters) -> bool:
            same = all(case["parameters"].get(key) == parameters[key] for key in ("chunks", "chunk_len"))
            return same and (case["workload"], case["phase"], case["model"]) == ("latency", "cold", name)

        def time(contender: str, phase: str, of=of) -> str:
            return number(of[contender, phase]["ttft_ms_p50"]) if (contender, phase) in of else ""

        body.append(
            [
                *(value(first) for value in extra.values()),
                f"{chunks} x {tokens // chunks:,}",
                str(first["requests"]),
                time("lazy", "cold"),
                time("stock", "cold"),
                difference(pairs_of([folder], *PAIR, is_cold) if took_turns(folder) else []),
                time("lazy", "reordered"),
                time("stock", "reordered"),
                time("stock", "same order"),
            ]
        )
    header = ["chunks", "requests", "new: lazy", "new: stock", "in pairs", "new order: lazy", "new order: stock"]
    return table([*extra, *header, "same prefix: stock"], body)


def traffic(row: dict) -> str:
    """A short description of what is sent."""
    given = row["parameters"]
    if row["workload"] == "synthetic":
        text = f"{given['chunks']} of {given['pool']:,} x {given['chunk_len']:,}, Zipf {given['alpha']:g}"
    elif row["workload"] == "retrieval":
        text = Path(given["data"]).stem
    elif row["workload"] == "trace":
        text = f"trace of {given['dataset']}"
    else:
        return row["workload"]
    return text if given["output_len"] == 16 else f"{text}, {given['output_len']} out"


def load(sources: list[Path]) -> str:
    """Synthetic prompts: time to first token and throughput by skew and rate."""
    return steady(sources, ("synthetic",), "done/s", lambda row: number(row["request_throughput"]))


def traces(sources: list[Path]) -> str:
    """Retriever traces: time to first token and throughput by rate."""
    return steady(sources, ("trace",), "done/s", lambda row: number(row["request_throughput"]))


def phases(sources: list[Path]) -> str:
    """One request at a time: median milliseconds to the first token, and the cached share of the prompt."""
    rows = [row for row in serving_rows(sources) if row["workload"] == "latency"]
    extra = differing(rows, {"run": run_name})
    cases = collections.defaultdict(lambda: collections.defaultdict(list))
    for row in rows:
        given = row["parameters"]
        cases[row["folder"], given["chunks"], given["chunk_len"]][row["contender"], row["phase"]].append(row)
    body = []
    for (_, chunks, chunk_len), found in sorted(cases.items(), key=lambda case: (case[0][2], case[0][1], case[0][0])):
        for name in in_order(name for name, _ in found):
            of = {title: only(found[name, phase]) for title, phase in PHASES.items()}
            first = of["new"]
            times = [f"{number(row['ttft_ms_p50'])} ({row['hit_rate']:.0%})" for row in of.values()]
            shape = f"{chunks} x {chunk_len:,}"
            body.append([*(value(first) for value in extra.values()), shape, str(first["requests"]), name, *times])
    return table([*extra, "chunks", "requests", "contender", *PHASES], body)


def policy_costs(sources: list[Path]) -> str:
    """One warm request at a time, with its chunks in a new order, under every policy measured on the same prompts."""
    found = [row for row in serving_rows(sources) if (row["workload"], row["phase"]) == ("latency", "reordered")]
    shape = next(row["parameters"] for row in found if row["contender"].startswith(POLICY))
    same = [row for row in found if row["parameters"] == shape and row["contender"] != "stock"]
    times = {row["contender"].removeprefix(POLICY).replace("lazy", "block"): row["ttft_ms_p50"] for row in same}
    bases = [name for name in ("block", "full") if name in times]
    body = [
        [f"`{name}`", number(time), *(f"{time / times[base]:.2f}" for base in bases)]
        for name, time in sorted(times.items(), key=lambda pair: pair[1])
    ]
    return table(["policy", "TTFT", *(f"over `{base}`" for base in bases)], body)


def documents(sources: list[Path]) -> str:
    """Real documents, retriever traces and agents: time to first and to last token."""
    return steady(sources, ("retrieval", "trace", "agent"), "answer", lambda row: number(row["e2e_ms_mean"]))


def steady(sources: list[Path], workloads: tuple[str, ...], second: str, measure: Callable[[dict], str]) -> str:
    """TTFT (p50, ms) and a second measure for each contender; a star marks contenders that fell behind the rate."""
    rows = [row for row in serving_rows(sources) if row["workload"] in workloads and row["phase"] == "steady"]
    extra = differing(rows, {"model": model, "KV pool, GB": pool})
    cases = collections.defaultdict(lambda: collections.defaultdict(list))
    for row in rows:
        place = (row["workload"], row["parameters"].get("alpha", 0), traffic(row), row["request_rate"] or math.inf)
        cases[(*place, row["kv_pool_gb"], row["model"])][row["contender"]].append(row)
    names = in_order(row["contender"] for row in rows)

    def ttft(row: dict) -> str:
        return number(row["ttft_ms_p50"]) + ("*" if row["saturated"] and row["request_rate"] else "")

    body = []
    for (_, _, what, *_), found in sorted(cases.items()):
        of = {name: only(each) for name, each in found.items()}
        first = next(iter(of.values()))
        cells = [value(of[name]) if name in of else "" for value in (ttft, measure) for name in names]
        hits = " / ".join(f"{of[name]['hit_rate']:.0%}" for name in names if name in of)
        body.append([*(value(first) for value in extra.values()), what, rate(first), *cells, hits])
    header = [f"{what}: {name}" for what in ("TTFT", second) for name in names]
    return table([*extra, "traffic", "sent/s", *header, "hit rate"], body)


def chat(sources: list[Path]) -> str:
    """Prompts without chunks: each contender against stock, by folder and, if there are several, overall."""
    rows = [row for row in serving_rows(sources) if row["workload"] == "chat"]
    extra = differing(rows, {"run": run_name})
    names = [name for name in in_order(row["contender"] for row in rows) if name != "stock"]
    body = []
    for name, at in ((name, at) for name in names for at in sorted({rate(row) for row in rows})):
        found = list(dict.fromkeys(row["folder"] for row in rows if (row["contender"], rate(row)) == (name, at)))
        for group in [[folder] for folder in found] + ([found] if len(found) > 1 else []):

            def fits(case: dict, at=at) -> bool:
                return case["workload"] == "chat" and rate(case) == at

            pairs = pairs_of(group, name, "stock", fits)
            durations = pairs_of(group, name, "stock", fits, "duration_s")
            means = compare(pairs)
            body.append(
                [
                    *([run_name({"folder": group[0]}) if len(group) == 1 else "all"] if extra else []),
                    name,
                    at,
                    str(len(pairs)),
                    number(means["first"]),
                    number(means["second"]),
                    difference(pairs),
                    difference(durations),
                ]
            )
    header = ["contender", "sent/s", "pairs", "TTFT", "TTFT: stock", "TTFT, in pairs", "time of a round, in pairs"]
    return table([*extra, *header], body)


def chat_times(sources: list[Path]) -> str:
    """Prompts without chunks: milliseconds to the first and the last token, and requests finished per second."""
    rows = [row for row in serving_rows(sources) if row["workload"] == "chat" and row["phase"] == "steady"]
    columns = {
        "first token, p50": "ttft_ms_p50",
        "first token, p99": "ttft_ms_p99",
        "last token, p50": "e2e_ms_p50",
        "last token, p99": "e2e_ms_p99",
        "done/s": "request_throughput",
    }
    body = [
        [row["contender"], rate(row), *(number(row[column]) for column in columns.values())]
        for row in sorted(rows, key=lambda row: (row["request_rate"] or math.inf, row["contender"]))
    ]
    return table(["contender", "sent/s", *columns], body)


def decode(sources: list[Path]) -> str:
    """Output tokens per second of whole batches."""
    rows = [row for source in sources for row in lines(source) if "decode_tokens_per_s" in row]
    names = in_order(row["contender"] for row in rows)
    others = [name for name in names if name != "stock"]
    cases = collections.defaultdict(dict)
    for row in rows:
        cases[row["sharing"] == "shared", row["batch"]][row["contender"]] = row["decode_tokens_per_s"]
    body = []
    for (shared, batch), of in sorted(cases.items()):
        speeds = [number(of[name]) if name in of else "" for name in names]
        ratios = [f"{of[name] / of['stock']:.2f}" if {name, "stock"} <= of.keys() else "" for name in others]
        body.append(["8 requests each" if shared else "none", str(batch), *speeds, *ratios])
    columns = [*(f"{name}, tokens/s" for name in names), *(f"{name} / stock" for name in others)]
    return table(["shared chunks", "batch", *columns], body)
