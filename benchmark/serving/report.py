"""Writes the tables of docs/results from the data beside them.

    python benchmark/serving/report.py

A page marks a table by `<!-- table KIND SOURCE... -->` and `<!-- end -->`; what stands between is replaced. A source is
a file or folder beside the page: a folder stands for every results folder of bench.py below it. Kinds:

    runs            machine, versions, commits and commands of any sources
    latency         bench.py: one request at a time
    load            bench.py: synthetic prompts by rate and skew, steady phase
    documents       bench.py: real documents, retriever traces and agents, steady phase
    chat            bench.py: prompts without chunks, in pairs of rounds
    decode          decode_speed.py
    kernels-FAMILY  python -m sgl_kernel_lazy.bench: decode, shared, extend, spans or ragged
    references      host_time.py: what each further chunk of a request takes
    requests        host_time.py: whole requests, and evictions
    answers         evaluate.py
"""

import collections
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from paired import compare, paired_stages

PAGES = Path(__file__).parents[2] / "docs" / "results"
MARK = re.compile(r"(<!-- table (\S+) ([^>]+) -->\n).*?(<!-- end -->)", re.DOTALL)
OLD_NAMES = {"materialize": "copy"}
"""Contenders that older data has under another name."""
PAIR = ("lazy", "stock")
ORDER = ("lazy", "copy", "stock", "stock-again", "stock-no-cache", "stock-flashinfer")


def table(header: list[str], rows: Iterable[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def number(value: float) -> str:
    """Three digits or more, no false precision."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def spread(values: list[float]) -> str:
    """The median, with the range where there are several."""
    median = number(statistics.median(values))
    return median if len(values) == 1 else f"{median} ({number(min(values))} to {number(max(values))})"


def difference(found: dict) -> str:
    return f"{found['mean']:+.1f} ± {found['half_width']:.1f}%"


def in_order(names: Iterable[str]) -> list[str]:
    return sorted(set(names), key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))


def only(values: list):
    if len(values) != 1:
        raise ValueError(f"expected one row, got {len(values)}")
    return values[0]


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def folders(sources: list[Path]) -> list[Path]:
    return sorted(path.parent for source in sources for path in source.rglob("environment.json"))


def serving_rows(sources: list[Path]) -> list[dict]:
    """Rows of bench.py, each with its folder."""
    found = [{**row, "folder": folder} for folder in folders(sources) for row in lines(folder / "rows.jsonl")]
    return [{**row, "contender": OLD_NAMES.get(row["contender"], row["contender"])} for row in found]


def leading(rows: list[dict], columns: dict[str, Callable[[dict], str]]) -> dict[str, Callable[[dict], str]]:
    """The columns in which the rows differ."""
    return {name: value for name, value in columns.items() if len({value(row) for row in rows}) > 1}


def rate(row: dict) -> str:
    return "all at once" if row["request_rate"] is None else f"{row['request_rate']:g}"


# Where it was measured


def environments(source: Path) -> list[tuple[str, dict]]:
    """What each run noted of itself, with the name of its file or folder."""
    if source.is_dir():
        return [(f.name, json.loads((f / "environment.json").read_text(encoding="utf-8"))) for f in folders([source])]
    if source.suffix == ".json":
        return [(source.stem, json.loads(source.read_text(encoding="utf-8"))["header"])]
    return [(source.stem, row["environment"]) for row in lines(source) if "environment" in row]


def facts(environment: dict) -> dict[str, str]:
    """The same facts of any benchmark's environment."""
    driver, _, power = (environment.get("driver, power limit") or "").partition("\n")[0].partition(", ")
    driver, power = environment.get("driver") or driver, environment.get("power_limit") or power
    gpu = environment.get("gpu")
    versions = environment.get("versions") or {name: environment[name] for name in ("torch", "triton", "flashinfer")}
    found = {
        "date": environment.get("time", "")[:10],
        "GPU": f"{gpu}, {power.removesuffix('.00 W')} W, driver {driver}" if gpu else "none",
        "host": environment.get("machine", ""),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "Python": environment["python"],
        "commit": environment["commit"],
        "seed": str(environment["seed"]),
    }
    return {name: fact for name, fact in found.items() if fact}


def runs(sources: list[Path]) -> str:
    """A column for each source, and below the commands; runs of one source that differ in time alone are one."""
    found: dict[str, dict[str, list[str]]] = {}
    commands: dict[str, collections.Counter] = {}
    for name, environment in (each for source in sources for each in environments(source)):
        for fact, value in facts(environment).items():
            values = found.setdefault(name, {}).setdefault(fact, [])
            values += [value] if value not in values else []
        command = re.sub(r" (--commit \S+|--out \S+)", "", environment["command"])
        command = f"python {command.removeprefix('python ')}"
        commands.setdefault(name, collections.Counter())[command.replace(" --case", " \\\n    --case")] += 1
    names = list(dict.fromkeys(fact for facts_ in found.values() for fact in facts_))
    same = [name for name in names if len({str(facts_.get(name)) for facts_ in found.values()}) == 1]
    text = ""
    if len(found) > 1:
        differ = [name for name in names if name not in same]
        text += table(
            ["run", *differ], ([run, *(", ".join(of.get(n, [])) for n in differ)] for run, of in found.items())
        )
        text += "\n"
    first = next(iter(found.values()))
    text += table(["", ""], ([name, ", ".join(first[name])] for name in same))
    text += "\n```sh\n"
    for run, counts in commands.items():
        text += f"# {run}\n" if len(found) > 1 else ""
        text += "".join(f"{command}{f'  # {n} times' if n > 1 else ''}\n" for command, n in counts.items())
    return text + "```\n"


# bench.py and decode_speed.py


def latency(sources: list[Path]) -> str:
    rows = [row for row in serving_rows(sources) if row["workload"] == "latency" and row["contender"] in PAIR]
    cases = collections.defaultdict(dict)
    for row in rows:
        parameters = row["parameters"]
        case = (parameters["chunks"] * parameters["chunk_len"], parameters["chunks"], row["model"], row["folder"])
        cases[case].setdefault((row["contender"], row["phase"]), []).append(row)
    extra = leading(rows, {"model": lambda row: row["model"], "run": run_name})
    body = []
    for (tokens, chunks, model, folder), found in sorted(cases.items()):
        of = {key: only(values) for key, values in found.items()}
        try:
            pairs = paired_stages([folder], *PAIR)
        except (ValueError, KeyError):  # they did not take turns, or the data is from before stages were kept
            pairs = {}
        cold = [
            difference(compare(each))
            for key, each in pairs.items()
            if (case := json.loads(key))["workload"] == "latency"
            and (case["phase"], case["model"], case["parameters"]["chunks"]) == ("cold", model, chunks)
            and case["parameters"]["chunk_len"] * chunks == tokens
        ]
        any_row = next(iter(of.values()))
        columns = [("lazy", "cold"), ("stock", "cold"), ("lazy", "reordered"), ("stock", "reordered")]
        times = [number(of[key]["ttft_ms_p50"]) if key in of else "" for key in [*columns, ("stock", "same order")]]
        body.append(
            [
                *(value(any_row) for value in extra.values()),
                f"{chunks} x {tokens // chunks:,}",
                str(any_row["requests"]),
                *times[:2],
                *(cold or [""]),
                *times[2:],
            ]
        )
    header = ["chunks", "requests", "new: lazy", "new: stock", "in pairs", "new order: lazy", "new order: stock"]
    return table([*extra, *header, "same prefix: stock"], body)


def run_name(row: dict) -> str:
    return f"{row['folder'].parent.name}/{row['folder'].name}"


def traffic(row: dict) -> str:
    """What is sent, in a few words."""
    p = row["parameters"]
    if row["workload"] == "synthetic":
        text = f"{p['chunks']} of {p['pool']:,} x {p['chunk_len']:,}, Zipf {p['alpha']:g}"
    else:
        text = {"retrieval": lambda: Path(p["data"]).stem, "trace": lambda: f"trace of {p['dataset']}"}.get(
            row["workload"], lambda: row["workload"]
        )()
    return text if p.get("output_len", 16) == 16 or row["workload"] == "agent" else f"{text}, {p['output_len']} out"


def load(sources: list[Path]) -> str:
    throughput = {"done/s": lambda row: number(row["request_throughput"])}
    return _steady([row for row in serving_rows(sources) if row["workload"] == "synthetic"], throughput)


def documents(sources: list[Path]) -> str:
    answer = {"answer": lambda row: number(row["e2e_ms_mean"])}
    rows = [row for row in serving_rows(sources) if row["workload"] in ("retrieval", "trace", "agent")]
    return _steady(rows, answer)


def _steady(rows: list[dict], second: dict[str, Callable[[dict], str]]) -> str:
    """TTFT (p50, ms) and a second measure of each contender; a star marks what fell behind the rate."""
    rows = [row for row in rows if row["phase"] == "steady"]
    extra = leading(rows, {"model": lambda row: row["model"], "KV pool, GB": lambda row: f"{row['kv_pool_gb']:g}"})
    cases = collections.defaultdict(lambda: collections.defaultdict(list))
    for row in rows:
        place = (row["workload"], row["parameters"].get("alpha", 0), traffic(row), row["request_rate"] or math.inf)
        cases[(*place, row["kv_pool_gb"], row["model"])][row["contender"]].append(row)
    names = in_order(row["contender"] for row in rows)
    measures = {
        "TTFT": lambda row: number(row["ttft_ms_p50"]) + ("*" if row["saturated"] and row["request_rate"] else ""),
        **second,
    }
    body = []
    for (_, _, what, *_), found in sorted(cases.items()):
        of = {name: only(values) for name, values in found.items()}
        first = next(iter(of.values()))
        cells = [measure(of[name]) if name in of else "" for measure in measures.values() for name in names]
        hits = " / ".join(f"{of[name]['hit_rate']:.0%}" for name in names if name in of)
        body.append([*(value(first) for value in extra.values()), what, rate(first), *cells, hits])
    header = [f"{what}: {name}" for what in measures for name in names]
    return table([*extra, "traffic", "sent/s", *header, "hit rate"], body)


def chat(sources: list[Path]) -> str:
    """Each contender against stock, by folder and, where there are several, over all of them."""
    rows = [row for row in serving_rows(sources) if row["workload"] == "chat"]
    body = []
    contenders = [name for name in in_order(row["contender"] for row in rows) if name != "stock"]
    for name, at in [(name, at) for name in contenders for at in sorted({rate(row) for row in rows})]:
        mine = [row for row in rows if rate(row) == at and row["contender"] == name]
        found = list(dict.fromkeys(row["folder"] for row in mine))
        for group in [[folder] for folder in found] + ([found] if len(found) > 1 else []):
            pairs = chat_pairs(group, name, at, "ttft_ms")
            ttft = compare(pairs)
            durations = chat_pairs(group, name, at, "duration_s")
            label = run_name(mine[found.index(group[0])]) if len(group) == 1 else "all"
            first = [label] if len({row["folder"] for row in rows}) > 1 else []
            times = [
                number(ttft["first"]),
                number(ttft["second"]),
                difference(ttft),
                difference(compare(durations)) if durations else "",
            ]
            body.append([*first, name, at, str(len(pairs)), *times])
    first = ["run"] if len({row["folder"] for row in rows}) > 1 else []
    header = ["contender", "sent/s", "pairs", "TTFT", "TTFT: stock", "TTFT, in pairs", "time of a round, in pairs"]
    return table([*first, *header], body)


def chat_pairs(found: list[Path], name: str, at: str, measure: str) -> list[tuple[float, float]]:
    """Of all rounds at a rate; none where the data is from before stages were kept."""
    try:
        pairs = paired_stages(found, name, "stock", measure)
    except KeyError:
        return []
    keys = [key for key in pairs if (case := json.loads(key))["workload"] == "chat" and rate(case) == at]
    return [pair for key in keys for pair in pairs[key]]


def decode(sources: list[Path]) -> str:
    rows = [row for source in sources for row in lines(source) if "batch" in row]
    names = in_order(row["contender"] for row in rows)
    cases = collections.defaultdict(dict)
    for row in rows:
        cases[row["sharing"], row["batch"]][row["contender"]] = row["decode_tokens_per_s"]
    body = [
        [{"unshared": "none", "shared": "8 requests each"}[sharing], str(batch), *(number(of[name]) for name in names)]
        + [f"{of['lazy'] / of['stock']:.2f}"]
        for (sharing, batch), of in sorted(cases.items(), key=lambda case: (case[0][0] == "shared", case[0][1]))
    ]
    return table(["shared chunks", "batch", *(f"{name}, tokens/s" for name in names), "lazy / stock"], body)


# python -m sgl_kernel_lazy.bench


def kernels(sources: list[Path], family: str) -> str:
    """Milliseconds of FlashInfer's better kernel, and every implementation's time as a multiple of it."""
    rows = [row for source in sources for row in json.loads(source.read_text())["rows"] if row["family"] == family]
    shapes = collections.defaultdict(list)
    for row in rows:
        shapes[row["shape"]].append(row)
    names = list(dict.fromkeys(row["implementation"] for row in rows if not row["stock"]))
    body = []
    for shape, found in shapes.items():
        stock = min((row for row in found if row["stock"] and "p50" in row), key=lambda row: row["p50"])
        of = {row["implementation"]: row for row in found if "p50" in row}
        ratios = [f"{of[name]['ratio']:.2f}" if name in of else "" for name in names]
        body.append([shape, f"{stock['p50']:.4f}", stock["implementation"], *ratios])
    return table(["batch", "FlashInfer, ms", "its kernel", *names], body)


# host_time.py


def host_rows(sources: list[Path]) -> dict[tuple, dict[str, list[float]]]:
    """By contender, shape or chunk length, mode and resident chunks: the values of each column in all runs."""
    found = collections.defaultdict(lambda: collections.defaultdict(list))
    for row in (row for source in sources for row in lines(source) if "environment" not in row):
        key = (row["contender"], row.get("shape") or row["chunk_len"], row["mode"], row["resident"])
        flat = (
            {**row, "mean": row["us_per_chunk"]["mean"], "p50": row["us_per_chunk"]["p50"]} if "shape" in row else row
        )
        for name, value in flat.items():
            if isinstance(value, (int, float)):
                found[key][name].append(value)
    return found


def references(sources: list[Path]) -> str:
    """Microseconds that one more chunk adds to a request."""
    found = host_rows(sources)
    cases = dict.fromkeys((key[1], key[3]) for key in found if isinstance(key[1], int))
    body = []
    for chunk_len, resident in sorted(cases):
        columns = (
            ("lazy", "warm", "us_per_further_chunk"),
            ("lazy", "evicting", "us_per_further_chunk"),
            ("lazy", "evicting", "us_per_fill"),
            ("lazy", "evicting", "us_on_average"),
            ("stock", "warm", "us_per_further_chunk"),
        )
        values = [found[name, chunk_len, mode, resident][column] for name, mode, column in columns]
        body.append([f"{chunk_len:,}", f"{resident:,}", *(spread(each) if each else "" for each in values)])
    header = ["chunk", "resident", "hit, nothing evicted", "hit, full pool", "a miss adds", "mean, full pool"]
    return table([*header, "stock, warm"], body)


def requests(sources: list[Path]) -> str:
    """Milliseconds of a request's host time, and microseconds of an evicted leaf."""
    found = host_rows(sources)
    shapes = dict.fromkeys((key[1], key[3]) for key in found if isinstance(key[1], str))
    names = in_order(key[0] for key in found)
    body = []
    for shape, resident in sorted(shapes, key=lambda case: ([int(n) for n in case[0].split("x")][::-1], case[1])):
        values = [
            found[name, shape, mode, resident][column]
            for mode, column in (("warm", "ms_per_request_p50"), ("evicting", "ms_per_request_p50"))
            + (("evicting", "us_per_evicted"),)
            for name in names
        ]
        body.append([shape, f"{resident:,}", *(number(statistics.median(each)) if each else "" for each in values)])
    header = [f"{what}: {name}" for what in ("warm, ms", "full pool, ms", "eviction, µs") for name in names]
    return table(["request", "resident", *header], body)


# evaluate.py


def answers(sources: list[Path]) -> str:
    rows = [row for source in sources for row in lines(source) if "condition" in row]
    groups = list(dict.fromkeys(row["group"] for row in rows))
    body = []
    for condition in dict.fromkeys(row["condition"] for row in rows):
        of = {row["group"]: row for row in rows if row["condition"] == condition}
        cells = []
        for group in groups:
            low, high = of[group]["exact_match_interval"]
            cells.append(f"{of[group]['exact_match']:.1%} ({low:.1%} to {high:.1%})")
        differ = ""
        if all("same_as_reference" in row for row in of.values()):
            counts = [round((1 - row["same_as_reference"]) * row["n"]) for row in of.values()]
            differ = f"{sum(counts)} of {sum(row['n'] for row in of.values()):,}"
        body.append([f"`{condition}`", *cells, differ])
    return table(["condition", *groups, "differ from the reference"], body)


KINDS: dict[str, Callable[[list[Path]], str]] = {
    kind.__name__: kind for kind in (runs, latency, load, documents, chat, decode, references, requests, answers)
}


def rendered(page: Path) -> str:
    """The page's text with its tables as the data has them."""

    def replaced(mark: re.Match) -> str:
        opening, kind, names, end = mark.groups()
        sources = [page.parent / name for name in names.split()]
        if missing := [source for source in sources if not source.exists()]:
            raise ValueError(f"{page}: no {', '.join(map(str, missing))}")
        if kind.startswith("kernels-"):
            return f"{opening}{kernels(sources, kind.removeprefix('kernels-'))}{end}"
        return f"{opening}{KINDS[kind](sources)}{end}"

    return MARK.sub(replaced, page.read_text(encoding="utf-8"))


def main() -> None:
    for page in sorted(PAGES.rglob("*.md")):
        try:
            page.write_text(rendered(page), encoding="utf-8")
        except (ValueError, KeyError, OSError) as error:
            sys.exit(f"error: {page}: {error!r}")


if __name__ == "__main__":
    main()
