"""Generate the Grafana dashboard: `python -m tools.dashboard > FILE`.

Queries are built from the declared metrics, so panels follow renamed metrics. Gauges are the
maximum over the processes of a replica, because series of dead processes remain for a while.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from serve_spec import metrics
from serve_spec.metrics import Metric
from serve_spec.serving.statistics.telemetry import exported_names

_SELECTED = 'application=~"$application",replica=~"$replica"'
_ALL_REPLICAS = 'application=~"$application"'
_WIDTH, _HEIGHT = 8, 8
_HELP = {name: metric.help for metric in metrics.METRICS for name in exported_names(metric)}
_NAME = re.compile(r"ray_serve_spec_\w+")


@dataclass(frozen=True)
class Panel:
    """One chart: a title, Grafana's unit, and (legend, query) of each line."""

    title: str
    unit: str
    lines: tuple[tuple[str, str], ...]


def dashboard() -> dict[str, Any]:
    """Return the dashboard as JSON for Grafana."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in _rows():
        panels.append(_row(title, len(panels) + 1, top))
        top += 1
        for index, panel in enumerate(row):
            left = index % 3
            place = {"x": left * _WIDTH, "y": top, "w": _WIDTH, "h": _HEIGHT}
            panels.append(_chart(panel, len(panels) + 1, place))
            if left == 2 or index == len(row) - 1:
                top += _HEIGHT
    return {
        "uid": "serve-spec",
        "title": "serve_spec",
        "tags": ["serve_spec"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": _variables()},
        "panels": panels,
    }


def main() -> None:
    """Print the dashboard as JSON."""
    print(json.dumps(dashboard(), indent=1))


def _rows() -> Iterable[tuple[str, list[Panel]]]:
    yield "Fleet", _fleet()
    yield "Speculation, by depth and position", _speculation()
    yield "Draft token budget", _budget()
    yield "Goodput: predicted and measured", _goodput()
    yield "Batch size and queue", _batches()
    yield "Step time", _rounds()
    yield "KV pages", _pages()
    yield "Latency: engine and framework", _latency()
    yield "Sizes of requests", _sizes()


def _fleet() -> list[Panel]:
    return [
        Panel("Decoded tokens per second", "short", (
            ("fleet", _rate(metrics.OUTPUT_TOKENS)),
            ("replica {{replica}}", _rate(metrics.OUTPUT_TOKENS, "replica")),
        )),
        Panel("Prompt tokens per second", "short", (("fleet", _rate(metrics.PREFILL_TOKENS)),)),
        Panel("Requests per second", "reqps", (
            ("{{outcome}}", _rate(metrics.REQUESTS, "outcome", only='measured_at="router"')),
            ("rejected (429)", _rate(metrics.REJECTED)),
            ("resumed on another replica", _rate(metrics.RESUMED)),
            ("unknown fields", _rate(metrics.IGNORED_FIELDS)),
        )),
        Panel("Finished requests per second by reason", "reqps", (
            ("{{finish_reason}}",
             _rate(metrics.FINISHED, "finish_reason", only='measured_at="router"')),
        )),
        Panel("Acceptance rate of draft tokens", "percentunit",
              _ratios(metrics.CORRECT_DRAFTS, metrics.DRAFT_TOKENS)),
        Panel("Fraction of probing steps", "percentunit", (
            ("fleet", _ratio(metrics.PROBE_ROUNDS, metrics.ROUNDS)),
        )),
        Panel("Sequences with broken drafting", "short", (
            ("replica {{replica}}", _increase(metrics.BROKEN_DRAFTS, "replica")),
        )),
        _by_replica("Synthetic acceptance (1: load test, text is not the model's)", "short",
                    metrics.FORCED_ACCEPTANCE),
        _by_replica("Missing costs (1: `ema` decides)", "short", metrics.COSTS_MISSING),
        Panel("Replicas that report to the central actor", "short", (
            ("{{state}}", _gauge(metrics.FLEET_REPLICAS, "state", within=_ALL_REPLICAS)),
        )),
        Panel("Fleet: accepted length and measured speedup", "short", (
            ("tokens per request and step",
             _gauge(metrics.FLEET_ACCEPT_LENGTH, "deployment", within=_ALL_REPLICAS)),
            ("speedup", _gauge(metrics.FLEET_SPEEDUP, "deployment", within=_ALL_REPLICAS)),
        )),
        Panel("Fleet: acceptance rate by position", "percentunit", (
            ("position {{position}}",
             _gauge(metrics.FLEET_ACCEPT_RATE, "pair", "position", within=_ALL_REPLICAS)),
        )),
    ]  # fmt: skip


def _speculation() -> list[Panel]:
    return [
        _by_replica("Speculation depth per replica", "short", metrics.NUM_STEPS),
        Panel("Steps per second by depth", "short", (
            ("depth {{num_steps}}", _rate(metrics.ROUNDS, "num_steps")),
        )),
        Panel("Depth switches by reason", "short", (
            ("{{reason}}", _increase(metrics.SWITCHES, "reason")),
        )),
        Panel("Acceptance rate by position (of drafts reached)", "percentunit", (
            ("position {{position}}",
             _ratio(metrics.POSITION_ACCEPTED, metrics.POSITION_REACHED, "position")),
        )),
        Panel("Verified draft tokens per second by position", "short", (
            ("position {{position}}", _rate(metrics.POSITION_DRAFTED, "position")),
        )),
        Panel("Accepted length per request and step (tokens)", "short", (
            ("{{accept_length}} tokens", _rate(metrics.ACCEPT_LENGTHS, "accept_length")),
        )),
        Panel("Mean accepted drafts (EMA) by batch-size slot", "short", (
            ("slot {{slot}}, replica {{replica}}",
             _gauge(metrics.EMA_ACCEPT_LENGTH, "slot", "replica")),
        )),
        _by_replica("Active batch-size slot", "short", metrics.SLOT),
        Panel("Reason for the last depth decision", "short", (
            ("{{reason}}", f"sum by (reason) ({_gauge(metrics.LAST_REASON, 'reason', 'replica')})"),
        )),
    ]  # fmt: skip


def _budget() -> list[Panel]:
    unverified = _rate(metrics.UNVERIFIED_DRAFTS)
    return [
        _by_replica("Draft budget of the last budgeted step", "short", metrics.DRAFT_BUDGET),
        Panel("Fraction of steps with unverified drafts", "percentunit",
              _ratios(metrics.BUDGET_ROUNDS, metrics.ROUNDS)),
        Panel("Fraction of proposed drafts left unverified", "percentunit", (
            ("fleet", f"{unverified} / ({unverified} + {_rate(metrics.DRAFT_TOKENS)})"),
        )),
        Panel("Proposed draft tokens per second by position", "short", (
            ("position {{position}}", _rate(metrics.POSITION_PROPOSED, "position")),
        )),
        Panel("Fraction of proposed drafts verified, by position", "percentunit", (
            ("position {{position}}",
             _ratio(metrics.POSITION_DRAFTED, metrics.POSITION_PROPOSED, "position")),
        )),
        Panel("Acceptance rate of grammar drafts", "percentunit", (
            ("fleet", _ratio(metrics.GRAMMAR_TOKENS, metrics.GRAMMAR_DRAFTS)),
        )),
    ]  # fmt: skip


def _goodput() -> list[Panel]:
    return [
        Panel("Measured speedup over plain decoding", "short", (
            ("batch {{batch_size}}, replica {{replica}}",
             _gauge(metrics.SPEEDUP, "batch_size", "replica")),
        )),
        Panel("Predicted goodput by depth (tokens/ms)", "short", (
            ("depth {{num_steps}}, replica {{replica}}",
             _gauge(metrics.PREDICTED_GOODPUT, "num_steps", "replica")),
        )),
        _by_replica("Draft time relative to verification time", "percentunit", metrics.OVERHEAD),
        Panel("Observed / expected accepted drafts (1: calibrated)", "short",
              _ratios(metrics.OBSERVED_DRAFTS, metrics.EXPECTED_DRAFTS)),
        Panel("Median step time, predicted and measured", "ms", (
            ("predicted", _quantile(metrics.PREDICTED_MS, 0.5)),
            ("measured", _quantile(metrics.MEASURED_MS, 0.5)),
        )),
    ]  # fmt: skip


def _batches() -> list[Panel]:
    return [
        _by_replica("Batch size per replica", "short", metrics.BATCH_SIZE),
        Panel("Steps per second by batch size", "short", (
            ("{{batch_size}} and more", _rate(metrics.BATCH_SIZE_ROUNDS, "batch_size")),
        )),
        Panel("Batches sent to replicas per second by size", "short", (
            ("at most {{size}}", _rate(metrics.SUBMISSIONS, "size")),
        )),
        Panel("Sequences in engines", "short", (
            ("running", f"sum({_gauge(metrics.RUNNING_SEQS, 'replica')})"),
            ("waiting", f"sum({_gauge(metrics.WAITING_SEQS, 'replica')})"),
        )),
        Panel("Requests at the router", "short", (
            ("waiting", f"sum({_gauge(metrics.QUEUE_LEN, 'replica', within=_ALL_REPLICAS)})"),
            ("in flight", f"sum({_gauge(metrics.IN_FLIGHT, 'replica', within=_ALL_REPLICAS)})"),
        )),
    ]  # fmt: skip


def _rounds() -> list[Panel]:
    stages = ((metrics.DRAFT_MS, "draft"), (metrics.VERIFY_MS, "verify"),
              (metrics.STEP_MS, "step"), (metrics.IDLE_MS, "device idle"))  # fmt: skip
    return [
        Panel("Median time", "ms", tuple(
            (name, _quantile(metric, 0.5)) for metric, name in stages
        )),
        Panel("99th percentile", "ms", tuple(
            (name, _quantile(metric, 0.99)) for metric, name in stages
        )),
    ]  # fmt: skip


def _pages() -> list[Panel]:
    by_state = _gauge(metrics.KV_PAGES, "state", "replica")
    return [
        Panel("KV pages by state", "short", (("{{state}}", f"sum by (state) ({by_state})"),)),
        _by_replica("KV cache usage", "percentunit", metrics.KV_USAGE),
        Panel("Preemptions", "short", (
            ("replica {{replica}}", _increase(metrics.PREEMPTIONS, "replica")),
        )),
        Panel("Prefix cache hit rate (tokens)", "percentunit",
              _ratios(metrics.PREFIX_HIT_TOKENS, metrics.PREFIX_QUERY_TOKENS)),
    ]  # fmt: skip


def _latency() -> list[Panel]:
    return [
        Panel("Time to first token at the router", "ms", _quantiles(metrics.TTFT_MS)),
        Panel("Time per output token at the router", "ms", _quantiles(metrics.TPOT_MS)),
        Panel("Time of requests at the router", "ms", _quantiles(metrics.REQUEST_MS)),
        Panel("Mean time to first token, engine and framework", "ms",
              _split(metrics.FIRST_TOKEN_WAIT_MS, metrics.FIRST_TOKENS)),
        Panel("Mean time per output token, engine and framework", "ms",
              _split(metrics.LATER_TOKENS_WAIT_MS, metrics.LATER_TOKENS)),
        Panel("Time between messages with tokens at the router", "s", _quantiles(metrics.GAP_S)),
        Panel("Phases of a request at the router, 90th percentile", "s", tuple(
            (name, _quantile(metric, 0.9, 'measured_at="router"'))
            for name, metric in (("queue", metrics.QUEUE_S), ("prefill", metrics.PREFILL_S),
                                 ("decode", metrics.DECODE_S),
                                 ("prefill and decode", metrics.INFERENCE_S))
        )),
        Panel("Sums of times per second at the router", "ms", tuple(
            (name, _rate(metric, only='measured_at="router"'))
            for name, metric in (("requests", metrics.REQUEST_WAIT_MS),
                                 ("means per output token", metrics.TPOT_WAIT_MS))
        )),
    ]  # fmt: skip


def _sizes() -> list[Panel]:
    return [
        Panel(title, "short", tuple(
            (f"p{round(100 * q)}", _quantile(metric, q, within=_ALL_REPLICAS))
            for q in (0.5, 0.9, 0.99)
        ))
        for title, metric in (
            ("Prompt tokens of a request", metrics.PROMPT_TOKENS),
            ("Tokens emitted of a request", metrics.GENERATION_TOKENS),
            ("Most tokens emitted of the choices of a prompt", metrics.MAX_GENERATION_TOKENS),
            ("Parameter max_tokens", metrics.PARAMS_MAX_TOKENS),
            ("Choices of a prompt", metrics.PARAMS_N),
        )
    ]  # fmt: skip


def _by_replica(title: str, unit: str, gauge: Metric) -> Panel:
    return Panel(title, unit, (("replica {{replica}}", _gauge(gauge, "replica")),))


def _ratios(part: Metric, whole: Metric) -> tuple[tuple[str, str], ...]:
    by_replica = _ratio(part, whole, "replica")
    return ("fleet", _ratio(part, whole)), ("replica {{replica}}", by_replica)


def _quantiles(metric: Metric) -> tuple[tuple[str, str], ...]:
    router = 'measured_at="router"'
    return tuple((f"p{round(100 * q)}", _quantile(metric, q, router)) for q in (0.5, 0.9, 0.99))


def _split(total_ms: Metric, count: Metric) -> tuple[tuple[str, str], ...]:
    """Return the mean in the engine, and the router's mean minus it for the framework."""

    def mean(where: str) -> str:
        only = f'measured_at="{where}"'
        return f"({_rate(total_ms, only=only)} / {_rate(count, only=only)})"

    return ("engine", mean("engine")), ("framework", f"{mean('router')} - {mean('engine')}")


def _selector(only: str, within: str = _ALL_REPLICAS) -> str:
    return f"{{{within},{only}}}" if only else f"{{{within}}}"


def _counter(metric: Metric, function: str, by: tuple[str, ...], only: str) -> str:
    (name,) = exported_names(metric)
    # Router series have ranks of their own, which the replica variable does not select.
    is_of_engine = metric not in metrics.ROUTER_METRICS and "measured_at" not in metric.labels
    selector = _selector(only, _SELECTED if is_of_engine else _ALL_REPLICAS)
    grouped = f" by ({', '.join(by)})" if by else ""
    return f"sum{grouped} ({function}({name}{selector}[$__rate_interval]))"


def _rate(metric: Metric, *by: str, only: str = "") -> str:
    return _counter(metric, "rate", by, only)


def _increase(metric: Metric, *by: str) -> str:
    return _counter(metric, "increase", by, "")


def _ratio(part: Metric, whole: Metric, *by: str) -> str:
    return f"{_rate(part, *by)} / {_rate(whole, *by)}"


def _gauge(metric: Metric, *by: str, within: str = _SELECTED) -> str:
    (name,) = exported_names(metric)
    return f"max by (application, {', '.join(by)}) ({name}{_selector('', within)})"


def _quantile(metric: Metric, quantile: float, only: str = "", within: str = _SELECTED) -> str:
    buckets, *_ = exported_names(metric)
    within = _ALL_REPLICAS if only else within
    rate = f"rate({buckets}{_selector(only, within)}[$__rate_interval])"
    return f"histogram_quantile({quantile}, sum by (le) ({rate}))"


def _row(title: str, number: int, top: int) -> dict[str, Any]:
    place = {"x": 0, "y": top, "w": 24, "h": 1}
    return {"id": number, "type": "row", "title": title, "gridPos": place, "panels": []}


def _chart(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    targets = [
        {"refId": chr(ord("A") + i), "datasource": source, "expr": query, "legendFormat": legend}
        for i, (legend, query) in enumerate(panel.lines)
    ]
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": _description(panel),
        "datasource": source,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": targets,
    }


def _description(panel: Panel) -> str:
    """Return the meaning of every metric that a panel draws, as declared."""
    named = dict.fromkeys(name for _, query in panel.lines for name in _NAME.findall(query))
    return " ".join(dict.fromkeys(_HELP[name] for name in named))


def _variables() -> list[dict[str, Any]]:
    (known,) = exported_names(metrics.RUNNING_SEQS)
    choices = [
        ("application", f"label_values({known}, application)"),
        ("replica", f'label_values({known}{{application=~"$application"}}, replica)'),
    ]
    source = {"type": "prometheus", "uid": "${datasource}"}
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        *(
            {
                "name": name,
                "label": name.capitalize(),
                "type": "query",
                "datasource": source,
                "query": query,
                "definition": query,
                "refresh": 2,
                "multi": True,
                "includeAll": True,
                "allValue": ".*",
                "current": {"text": ["All"], "value": ["$__all"]},
            }
            for name, query in choices
        ),
    ]


if __name__ == "__main__":
    main()
