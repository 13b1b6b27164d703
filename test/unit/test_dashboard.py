"""The dashboard is one of Grafana's, and its queries are Prometheus's. What they ask for is there:
`test_the_dashboard_asks_for_what_there_is`, on a running server."""

import copy
import json
from pathlib import Path

import promql_parser
import pytest
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

FILE = Path(__file__).parents[2] / "examples/monitoring/sglang-lazy-dashboard.json"
DASHBOARD = json.loads(FILE.read_text(encoding="utf-8"))
WINDOWS = {"$__rate_interval": "5m", "$__range": "1h"}


def lost(before, after, way="dashboard"):
    """The parts of `before` that Grafana's types dropped or changed. They may add defaults."""
    if isinstance(before, dict) and isinstance(after, dict):
        missing = [f"{way}.{name}" for name in before.keys() - after.keys()]
        return missing + [
            one for name in before.keys() & after.keys() for one in lost(before[name], after[name], f"{way}.{name}")
        ]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return [one for i, pair in enumerate(zip(before, after, strict=True)) for one in lost(*pair, f"{way}[{i}]")]
    return [] if before == after else [way]


def loaded(dashboard):
    plugins.register_default_plugins()
    return json.loads(JSONEncoder().encode(Dashboard.from_json(copy.deepcopy(dashboard))))


def test_grafanas_types_load_all_of_it():
    assert lost(DASHBOARD, loaded(DASHBOARD)) == []


def test_fields_unknown_to_grafana_are_found():
    wrong = copy.deepcopy(DASHBOARD)
    wrong["refreshes"] = "5s"
    wrong["panels"][1]["options"]["colourMode"] = "value"
    wrong["panels"][1]["targets"][0]["expression"] = "1"
    places = {
        "dashboard.refreshes",
        "dashboard.panels[1].options.colourMode",
        "dashboard.panels[1].targets[0].expression",
    }
    assert set(lost(wrong, loaded(wrong))) == places


def parse(query):
    for variable, value in WINDOWS.items():
        query = query.replace(variable, value)
    return promql_parser.parse(query)


def test_queries_are_valid_prometheus():
    queries = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    assert len(queries) > 20
    for query in queries:
        parse(query)
    for wrong in (queries[0][:-1], "rate(sglang_lazy:chunk_hits_total)", "sum by model_name (up)"):
        with pytest.raises(ValueError):
            parse(wrong)


def test_panels_do_not_overlap():
    """Within Grafana's 24 columns, without overlap, each with its own number and title."""
    panels = DASHBOARD["panels"]
    for key in ("id", "title"):
        assert len({panel[key] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24
