"""Every panel of the dashboard asks for something that exists."""

import json
import re
from pathlib import Path

from serve_spec.metrics import METRICS
from serve_spec.serving.telemetry import LABELS
from tools.dashboard import dashboard

SHIPPED = Path(__file__).parents[2] / "deploy/dashboards/serve_spec.json"
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}
# By Ray's rules, not by our code for them: what its exporter really does is in test_ray.
EXPORTED = {f"ray_{m.name}{suffix}": m for m in METRICS for suffix in SUFFIXES[m.kind]}

WORD = re.compile(r"[A-Za-z_:][A-Za-z0-9_:]*")
KEYWORDS = {"sum", "max", "by", "rate", "increase", "histogram_quantile", "label_values"}


def queries(board):
    """(query, legend) of every panel and variable."""
    found = [
        (target["expr"], target["legendFormat"])
        for panel in board["panels"]
        for target in panel.get("targets", [])
    ]
    variables = [v["query"] for v in board["templating"]["list"] if v["type"] == "query"]
    return found + [(query, "") for query in variables]


def names_in(query):
    """Metric names: whatever word is neither PromQL nor a label, a variable, or in quotes."""
    bare = re.sub(r'"[^"]*"', "", query)
    bare = re.sub(r"\bby \([^)]*\)", "", bare)
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]", "", bare)
    bare = re.sub(r"(label_values\(\w+), \w+\)", r"\1)", bare)
    return set(WORD.findall(bare)) - KEYWORDS


def labels_in(query):
    in_selectors = re.findall(r"(\w+)=~?\"", query)
    grouped = [
        label for found in re.findall(r"\bby \(([^)]*)\)", query) for label in found.split(", ")
    ]
    return {*in_selectors, *grouped} - {"le"}


def test_the_shipped_file_is_the_one_the_code_describes():
    assert json.loads(SHIPPED.read_text()) == dashboard(), (
        "run python -m tools.dashboard > deploy/dashboards/serve_spec.json"
    )


def test_every_query_names_what_exists_and_asks_counters_for_growth_and_gauges_for_values():
    assert len(queries(dashboard())) > 30
    for query, legend in queries(dashboard()):
        names = names_in(query)
        assert names, query
        assert names <= set(EXPORTED), f"{query} names {names - set(EXPORTED)}"
        allowed = {label for name in names for label in EXPORTED[name].labels} | set(LABELS)
        assert labels_in(query) <= allowed, query
        assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= labels_in(query), legend
        for opening, closing in ("()", "{}", "[]"):
            assert query.count(opening) == query.count(closing), query
        for name in () if query.startswith("label_values") else names:
            grows = bool(re.search(rf"(rate|increase)\({name}\b", query))
            assert grows == (EXPORTED[name].kind != "gauge"), query


def test_every_metric_is_shown_somewhere():
    shown = {EXPORTED[name] for query, _ in queries(dashboard()) for name in names_in(query)}
    assert {metric.name for metric in set(METRICS) - shown} == set()


def test_panels_do_not_overlap():
    taken = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
