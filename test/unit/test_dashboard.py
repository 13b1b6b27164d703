"""The dashboard is one of Grafana's, and its queries are Prometheus's. What they ask for is there:
`test_the_dashboard_asks_for_what_there_is`, on a running server."""

import copy
import enum
import functools
import json
import operator
import re
import typing
from pathlib import Path

import promql_parser
import pytest
from grafana_foundation_sdk.cog import plugins, runtime, variants
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


def load(dashboard):
    plugins.register_default_plugins()
    return Dashboard.from_json(copy.deepcopy(dashboard))


def misfits(value, declared, way="dashboard"):
    """The parts of a loaded dashboard that are not of the types that Grafana declares, which loading does not check."""
    form, arguments = typing.get_origin(declared), typing.get_args(declared)
    if form is typing.Union:
        return min((misfits(value, one, way) for one in arguments), key=len)
    if form is list and isinstance(value, list):
        return [one for i, item in enumerate(value) for one in misfits(item, arguments[0], f"{way}[{i}]")]
    if form is typing.Literal:
        return [] if value in arguments else [way]
    if declared in (object, typing.Any, variants.Dataquery) and hasattr(value, "to_json"):
        declared = type(value)  # of the panel's type, and of the data source's
    if hasattr(declared, "to_json") and isinstance(value, declared):
        fields = typing.get_type_hints(declared).items()
        return [one for name, field in fields for one in misfits(getattr(value, name), field, f"{way}.{name}")]
    if isinstance(declared, enum.EnumMeta):
        return [] if value in list(declared) else [way]
    if declared in (int, float):
        return [] if isinstance(value, (int, declared)) and not isinstance(value, bool) else [way]
    return [] if declared is typing.Any or isinstance(value, form or declared) else [way]


def unknown(dashboard):
    """Types of panels that Grafana does not have, and data sources and variables that the dashboard does not."""
    plugins.register_default_plugins()
    panels, variables = dashboard["panels"], dashboard["templating"]["list"]
    targets = [target for panel in panels for target in panel.get("targets", ())]
    types = {"row", *runtime.Runtime().panelcfg_variants}
    sources = [{"type": one["query"], "uid": f"${{{one['name']}}}"} for one in variables if one["type"] == "datasource"]
    asking = [one for one in (*panels, *targets, *variables) if one.get("type") not in ("row", "datasource")]
    names = {f"${one['name']}" for one in variables} | WINDOWS.keys()
    return (
        [panel["type"] for panel in panels if panel["type"] not in types]
        + [one.get("datasource") for one in asking if one.get("datasource") not in sources]
        + [name for target in targets for name in re.findall(r"\$\w+", target["expr"]) if name not in names]
    )


def faults(dashboard):
    grafanas = load(dashboard)
    read = json.loads(JSONEncoder().encode(grafanas))
    return lost(dashboard, read) + misfits(grafanas, Dashboard) + unknown(dashboard)


def test_grafana_knows_all_of_it():
    assert faults(DASHBOARD) == []


PANEL = ("panels", 1)
TARGET = (*PANEL, "targets", 0)


@pytest.mark.parametrize(
    "way, value, fault",
    [
        (("refreshes",), "5s", "dashboard.refreshes"),
        ((*PANEL, "options", "colourMode"), "value", "dashboard.panels[1].options.colourMode"),
        ((*TARGET, "expression"), "1", "dashboard.panels[1].targets[0].expression"),
        (("refresh",), 5, "dashboard.refresh"),
        (("graphTooltip",), 3, "dashboard.graph_tooltip"),
        ((*PANEL, "gridPos", "h"), "4", "dashboard.panels[1].grid_pos.h"),
        ((*PANEL, "options", "colorMode"), "rainbow", "dashboard.panels[1].options.color_mode"),
        ((*PANEL, "options", "reduceOptions", "calcs"), "mean", "dashboard.panels[1].options.reduce_options.calcs"),
        ((*PANEL, "fieldConfig", "defaults", "unit"), 5, "dashboard.panels[1].field_config.defaults.unit"),
        ((*TARGET, "range"), "yes", "dashboard.panels[1].targets[0].range_val"),
        ((*PANEL, "type"), "graf", "graf"),
        ((*PANEL, "datasource", "uid"), "${other}", {"type": "prometheus", "uid": "${other}"}),
        ((*TARGET, "datasource", "type"), "loki", {"type": "loki", "uid": "${datasource}"}),
        ((*TARGET, "expr"), 'up{model_name="$model"}', "$model"),
    ],
)
def test_what_grafana_does_not_know_is_found(way, value, fault):
    wrong = copy.deepcopy(DASHBOARD)
    part = functools.reduce(operator.getitem, way[:-1], wrong)
    part[way[-1]] = value
    assert fault in faults(wrong)


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
