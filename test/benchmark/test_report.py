"""The tables of docs/results: they match their data, give known answers, and refuse what cannot be tabulated."""

import json
import re

import pytest

from benchmark.report.__main__ import MARK, PAGES, rendered
from benchmark.report.cells import number
from benchmark.report.host_time import STEPS, references, steps
from benchmark.report.kernels import kernels, window_rows
from benchmark.report.policies import policies, policies_matches
from benchmark.report.serving import chat, chat_times, latency, load, phases, policy_costs
from benchmark.report.tiers import copies, precomputing

LATENCY = {"model": "m", "workload": "latency", "parameters": {"chunks": 2, "chunk_len": 1024}, "requests": 2}
LOAD = {
    "model": "m",
    "workload": "synthetic",
    "parameters": {"chunks": 5, "pool": 100, "chunk_len": 2048, "alpha": 1.1, "output_len": 16},
    "phase": "steady",
    "kv_pool_gb": 10,
    "request_throughput": 2.5,
    "hit_rate": 0.5,
}


def write(folder, rows, command="bench.py --together"):
    folder.mkdir(parents=True)
    (folder / "environment.json").write_text(json.dumps({"command": command}))
    common = {"kv_pool_gb": None, "request_rate": None, "max_concurrency": None}
    (folder / "rows.jsonl").write_text("".join(json.dumps({**common, **row}) + "\n" for row in rows))
    return folder


def cells(text):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]


@pytest.mark.parametrize("page", sorted(PAGES.rglob("*.md")), ids=lambda page: str(page.relative_to(PAGES)))
def test_tables_match_their_data(page):
    """Fails if a table was edited by hand, or data replaced without `python -m benchmark.report`."""
    assert rendered(page) == page.read_text(encoding="utf-8")


def test_pages_link_to_all_data():
    named = set()
    for page in PAGES.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        sources = [name for mark in MARK.finditer(text) for name in mark[3].split()]
        links = re.findall(r"\]\(([^)#:]+)\)", text)
        assert not [link for link in links if not (page.parent / link).exists()], page
        named |= {(page.parent / name).resolve() for name in sources + links}
    data = [path for path in PAGES.rglob("*") if path.is_file() and path.suffix != ".md"]
    assert [path for path in data if not named & {path, *path.parents}] == []


def test_steps(tmp_path):
    """20 chunks take 40 us of a step and one takes 2: 2 us for each further chunk, in one of two runs."""
    rows = []
    for arrival in (2, 3):
        for shape, each in ("1x128", 2), ("20x128", arrival):
            times = {step: {"p50": each if step == "arrival" else 0} for step in STEPS}
            rows.append({"shape": shape, "mode": "warm", "steps_us_per_chunk": times, "us_per_chunk": {"p50": 500}})
        rows += [{"mode": mode, "us_per_further_chunk": 7, "us_per_fill": 9} for mode in ("warm", "evicting")]
    source = tmp_path / "now.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in [{"environment": {}}, *rows]))
    found = dict(cells(steps([source])))
    assert found["arrival"] == "2.53 (2.00 to 3.05)"
    assert (found["admission"], found["all"]) == ("0.00 (0.00 to 0.00)", "7.00 (7.00 to 7.00)")
    assert found["computing one that is missing"] == "9.00 (9.00 to 9.00)"
    assert found["a request of one chunk, warm"].startswith("500 ")


def kernel_rows(path, shape, *rows):
    common = {"family": "gemma", "op": "decode", "baseline": False, "layers": None}
    given = [{**common, "shape": shape, **row} for row in rows]
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    path.write_text(json.dumps({"rows": [*old, *given]}))


def test_kernels(tmp_path):
    """Ratios to the faster baseline; blank where an implementation refuses a shape, unlike where it fails."""
    path = tmp_path / "bench.json"
    fa2, fa3 = ({"implementation": name, "baseline": True} for name in ("fa2", "fa3"))
    cuda, triton, other = ({"implementation": name} for name in ("cuda", "triton", "other"))
    kernel_rows(
        path, "a", {**fa2, "p50": 2}, {**fa3, "p50": 1}, {**cuda, "p50": 3, "ratio": 3}, {**other, "refused": ""}
    )
    kernel_rows(path, "b", {**fa2, "p50": 2}, {**fa3, "refused": ""}, {**cuda, "refused": ""}, {**triton, "failed": ""})
    text = kernels([path], family="gemma")
    assert text.splitlines()[0] == "| batch | FlashInfer, ms | its kernel | cuda | triton |"
    assert cells(text) == [["a", "1.0000", "fa3", "3.00", ""], ["b", "2.0000", "fa2", "", "failed"]]


def test_window_rows(tmp_path):
    """One call per step, beside twelve layers of 0.02 ms; a refusal and an fp8 cache do not count."""
    path = tmp_path / "bench.json"
    common = {"family": "rows", "layers": 12}
    kernel_rows(
        path,
        "a",
        {**common, "op": "window_rows", "implementation": "window_rows, cuda", "refused": ""},
        {**common, "op": "window_rows", "implementation": "window_rows, triton", "p50": 0.006},
        {**common, "implementation": "triton", "p50": 0.02},
        {**common, "implementation": "triton, e4m3", "p50": 0.01},
    )
    assert cells(window_rows([path])) == [["a", "0.0060", "12", "0.2400", "2.5%"]]


def test_precomputing(tmp_path):
    """Rounds in which either contender went first."""
    order = [(1, "stock", 4), (1, "precompute", 5), (2, "precompute", 10), (2, "stock", 8)]
    rows = [dict(round=turn, contender=name, tokens=8000, seconds=seconds) for turn, name, seconds in order]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [{"environment": {}}, *rows]))
    assert cells(precomputing([path])) == [["1", "1,600", "2,000", "0.80"], ["2", "800", "1,000", "0.80"]]


def test_latency(tmp_path):
    """Medians by phase; for paired new prompts, 8 and 9 ms are 20% and 10% below a mean of 10."""
    times = {"lazy": {"cold": [8, 9], "reordered": [3, 3]}, "stock": {"cold": [10, 10], "reordered": [10, 10]}}
    times["stock"]["same order"] = [4, 4]
    rows = [
        {**LATENCY, "contender": name, "phase": phase, "ttft_ms_p50": values[0], "ttft_ms_stages": values}
        for name, of in times.items()
        for phase, values in of.items()
    ]
    (found,) = cells(latency([write(tmp_path / "run", rows)]))
    assert found[:5] == ["2 x 1,024", "2", "8.00", "10.0", "-15.0 ± 63.5%"]
    assert found[5:] == ["3.00", "10.0", "4.00"]
    (alone,) = cells(latency([write(tmp_path / "alone", rows, command="bench.py")]))
    assert alone[4] == ""


def test_policy_costs(tmp_path):
    """Warm requests of the shape that the policies were asked, fastest first; `lazy` is named `block`."""
    other = {**LATENCY, "parameters": {"chunks": 3, "chunk_len": 1024}}
    times = {"stock": 90, "lazy": 20, "lazy@full": 80, "lazy@base+query:ratio=0.15": 50, "lazy@base": 19}
    rows = [
        {**LATENCY, "contender": name, "phase": phase, "ttft_ms_p50": time}
        for name, time in times.items()
        for phase, time in (("cold", 99), ("same order", 15), ("reordered", time))
    ]
    rows += [{**other, "contender": "lazy", "phase": "reordered", "ttft_ms_p50": 7}]
    assert cells(policy_costs([write(tmp_path / "run", rows)])) == [
        ["`base`", "19.0", "0.95", "0.24"],
        ["`block`", "20.0", "1.00", "0.25"],
        ["`base+query:ratio=0.15`", "50.0", "2.50", "0.62"],
        ["`full`", "80.0", "4.00", "1.00"],
    ]


def test_load(tmp_path):
    """Contenders of several folders in one row, old names mapped to today's, and a star where one fell behind."""
    first = {**LOAD, "contender": "lazy", "ttft_ms_p50": 50, "request_rate": 3, "saturated": False}
    second = {**first, "contender": "materialize", "ttft_ms_p50": 2000, "saturated": True}
    sources = [write(tmp_path / "a", [first]), write(tmp_path / "b", [second])]
    text = load(sources)
    assert "TTFT: copy" in text.splitlines()[0]
    assert cells(text) == [["5 of 100 x 2,048, Zipf 1.1", "3", "50.0", "2,000*", "2.50", "2.50", "50% / 50%"]]
    with pytest.raises(ValueError, match="expected one row, got 2"):
        load([*sources, write(tmp_path / "c", [first])])


def test_chat(tmp_path):
    """Each folder, then all pooled; 1 and 2 ms above a mean of 10 are 10% and 20%."""
    for folder, mine in (("a", 11), ("b", 12)):
        row = {"model": "m", "workload": "chat", "parameters": {}, "phase": "steady", "requests": 1}
        times = {"lazy": mine, "stock": 10}
        rows = [
            {**row, "contender": name, "ttft_ms_stages": [time], "duration_s_stages": [1]}
            for name, time in times.items()
        ]
        write(tmp_path / folder, rows)
    found = cells(chat([tmp_path]))
    assert [row[3] for row in found] == ["1", "1", "2"]
    assert [row[6].split()[0] for row in found] == ["+10.0", "+20.0", "+15.0"]


def test_chat_times(tmp_path):
    """By rate, then by contender; not those of other phases or workloads."""
    times = {"ttft_ms_p50": 1, "ttft_ms_p99": 2, "e2e_ms_p50": 3, "e2e_ms_p99": 4, "request_throughput": 5}
    row = {"model": "m", "workload": "chat", "phase": "steady", "contender": "lazy", "request_rate": None, **times}
    others = [{**row, "phase": "cold"}, {**row, "workload": "agent"}]
    found = [row, {**row, "contender": "stock", "request_rate": 20}, {**row, "request_rate": 20}, *others]
    measured = ["1.00", "2.00", "3.00", "4.00", "5.00"]
    assert cells(chat_times([write(tmp_path / "a", found)])) == [
        ["lazy", "20", *measured],
        ["stock", "20", *measured],
        ["lazy", "all at once", *measured],
    ]


def test_host_time(tmp_path):
    """The median of several runs with their range; missing measurements stay blank."""
    row = {"contender": "lazy", "chunk_len": 128, "mode": "warm", "resident": 100}
    file = tmp_path / "host_time.jsonl"
    file.write_text("".join(json.dumps({**row, "us_per_further_chunk": time}) + "\n" for time in (9, 11, 30)))
    assert cells(references([file])) == [["128", "100", "11.0 (9.00 to 30.0)", "", "", "", ""]]


def test_phases(tmp_path):
    """One line per contender."""
    row = {**LATENCY, "hit_rate": 0.5}
    rows = [
        {**row, "contender": name, "phase": phase, "ttft_ms_p50": time}
        for name, times in (("stock", (90, 91, 92)), ("lazy-host", (80, 30, 31)))
        for phase, time in zip(("cold", "same order", "reordered"), times, strict=True)
    ]
    assert cells(phases([write(tmp_path / "run", rows)])) == [
        ["2 x 1,024", "2", "lazy-host", "80.0 (50%)", "30.0 (50%)", "31.0 (50%)"],
        ["2 x 1,024", "2", "stock", "90.0 (50%)", "91.0 (50%)", "92.0 (50%)"],
    ]


def test_copies(tmp_path):
    rows = [{"gpu": "x"}]
    for by, speeds, costs, wait in (
        ("plain", (55, 54), ((0, 0.5), (0.3, 0.25)), (24, 25)),
        ("engine", (53, 51), ((4, 1.5), (11, 8)), (0.06, 0.33)),
    ):
        for copy, speed, lost in zip(("load", "back_up"), speeds, costs, strict=True):
            rows.append({"copy": copy, "by": by, "gb_per_s": speed, "call_ms": 1})
            rows += [
                {"copy": copy, "by": by, "beside": name, "ms_per_gb": cost, "gb_per_s": 40}
                for name, cost in zip(("prefill", "decoding"), lost, strict=True)
            ]
        small = {"count": 20, "median_ms": wait[0], "max_ms": wait[1]}
        rows.append({"copy": "back_up", "by": by, "small_copies": small})
    file = tmp_path / "copies.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cells(copies([file])) == [
        ["plain", "55.0", "0.00", "0.50", "54.0", "0.30", "0.25", "24.0 (25.0)"],
        ["engine", "53.0", "4.00", "1.50", "51.0", "11.0", "8.00", "0.06 (0.33)"],
    ]


def test_policies(tmp_path):
    """Halfway from block to full in NLL, all the way in KL; policies that missed a prompt appear only where
    they are named."""

    def line(policy, group, share, nll, own_kl):
        return {"policy": policy, "group": group, "id": "1", "share": share, "nll": nll, "own_kl": own_kl}

    rows = [line("full", group, 1, 1, 0) for group in "ab"] + [line("block", group, 0, 3, 1) for group in "ab"]
    rows += [line("base", group, 0.25, 2, 0) for group in "ab"]
    rows += [line("static:score=first", "a", 0.5, 2.5, 0.75), line("static:score=received", "a", 0.5, 1, 0.5)]
    file = tmp_path / "results.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cells(policies([file])) == [["`base`", "25%", "50% (50% to 50%)", "100% (100% to 100%)"]]
    assert "2 prompts" in policies([file]) and "1 prompts" in policies([file], r"static:.+")
    assert [row[2].split()[0] for row in cells(policies([file], r"static:.+"))] == ["25%", "100%"]


def test_exact_matches_by_data_set(tmp_path):
    """Two prompts of one set and one of another; a policy that did not answer one of them is left out."""

    def line(policy, group, prompt, em):
        scores = {} if em is None else {"em": em}
        away = float(policy != "full")
        return {"policy": policy, "group": group, "id": prompt, "share": 0.5, "nll": away, "own_kl": away, **scores}

    answers = {"full": (1, 1, 1), "block": (1, 0, 0), "base": (1, None, 0)}
    prompts = (("a", "1"), ("a", "2"), ("b", "1"))
    rows = [line(name, *at, em) for name, found in answers.items() for at, em in zip(prompts, found, strict=True)]
    file = tmp_path / "results.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = policies_matches([file])
    assert text.splitlines()[0] == "| policy | recomputed | all 3 prompts | against `block` | a, 2 | b, 1 |"
    full, block = cells(text)
    assert full[:3] + full[4:] == ["`full`", "50%", "100% (100% to 100%)", "100%", "100%"]
    assert full[3] == "+66.7 (+0.0 to +100.0)"
    assert block[:2] + block[3:] == ["`block`", "50%", "", "50%", "0%"] and block[2].startswith("33% (0%")


@pytest.mark.parametrize("value, text", [(0.123, "0.12"), (9.996, "10.0"), (99.96, "100"), (1234.5, "1,234")])
def test_numbers(value, text):
    assert number(value) == text


def test_a_missing_source_is_an_error(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- table latency nowhere -->\n<!-- end -->\n")
    with pytest.raises(ValueError, match="nowhere"):
        rendered(page)
