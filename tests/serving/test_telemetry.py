"""What routers and replicas export, at what price for the engine, and what a dashboard shows."""

import asyncio
import json
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.config import ServeSpecConfig
from serve_spec.core.errors import InvalidRequest
from serve_spec.core.record import StepTimes
from serve_spec.core.request import FinishReason
from serve_spec.core.round import Reason
from serve_spec.metrics import (
    BATCH_SIZE,
    COSTS_MISSING,
    FORCED_ACCEPTANCE,
    GAP_S,
    LAST_REASON,
    METRICS,
    OUTPUT_TOKENS,
    PARAMS_N,
    PREEMPTIONS,
    QUEUE_S,
    REQUEST_WAIT_MS,
    REQUESTS,
    ROUNDS,
    STEP_MS,
    TPOT_MS,
    TTFT_MS,
    Reading,
)
from serve_spec.serving.messages import Accepted, Failed, Refused
from serve_spec.serving.statistics import request_timer, telemetry
from serve_spec.serving.statistics.recent import RecentRequests
from serve_spec.serving.statistics.request_timer import ARRIVED, RequestTimer, router_timer
from serve_spec.serving.statistics.telemetry import (
    LABELS,
    Growth,
    RayMetrics,
    RouterTelemetry,
    merged,
    ours,
    pair_name,
    start_warm,
    state_readings,
)
from tests.helpers.rounds import verified_round
from tests.serving.fake_engine import FakeLoop
from tests.serving.fakes import delta
from tools.dashboard import dashboard

ROUND = verified_round([1], batch_size=1, num_steps=2, times=StepTimes(1.0, 2.0, 3.5))
LAST = delta("b", 3, 4, 5, 6, finish=FinishReason.STOP)


class Recorder(RayMetrics):
    """Keeps what would be exported."""

    def __init__(self):
        super().__init__(dict.fromkeys(LABELS, "0"))
        self.seen = []

    def record(self, reading):
        super().record(reading)
        self.seen.append(reading)


def test_rounds_are_exported_once_and_only_when_flushed():
    metrics = Recorder()
    metrics.observe(ROUND)
    metrics.observe(ROUND)
    assert not metrics.seen
    metrics.flush()
    tokens = [r.value for r in metrics.seen if r.metric == OUTPUT_TOKENS]
    assert tokens == [4.0]
    assert [r.value for r in metrics.seen if r.metric == STEP_MS] == [3.5, 3.5]
    metrics.seen.clear()
    metrics.flush()
    assert not metrics.seen


def test_rounds_that_are_not_flushed_take_bounded_memory():
    metrics = Recorder()
    for _ in range(10_000):
        metrics.observe(ROUND)
    metrics.flush()
    assert sum(r.metric == STEP_MS for r in metrics.seen) < 10_000


readings = st.one_of(
    st.builds(
        lambda value, depth: Reading(ROUNDS, value, {"num_steps": depth}),
        st.integers(1, 9),
        st.sampled_from("012"),
    ),
    st.builds(lambda value: Reading(BATCH_SIZE, value), st.integers(0, 9)),
    st.builds(lambda value: Reading(STEP_MS, value), st.integers(1, 9)),
)


@given(st.lists(readings, max_size=40))
def test_merging_keeps_sums_newest_values_and_every_observation(found):
    def facts(some):
        counts = Counter()
        for reading in some:
            if reading.metric == ROUNDS:
                counts[reading.labels["num_steps"]] += int(reading.value)
        sizes = [r.value for r in some if r.metric == BATCH_SIZE][-1:]
        return counts, sizes, [r.value for r in some if r.metric == STEP_MS]

    assert facts(merged(found)) == facts(found)


def test_an_old_reason_is_set_back_when_a_new_one_comes():
    reasons = set()
    list(state_readings({"last_reason": "gain"}, reasons))
    found = {
        r.labels["reason"]: r.value
        for r in state_readings({"last_reason": "kv"}, reasons)
        if r.metric == LAST_REASON
    }
    assert found == {"gain": 0.0, "kv": 1.0}


@pytest.mark.parametrize(("told", "shown"), [(None, 0.0), (2.5, 1.0), ([0.9, 0.5], 1.0)])
def test_forced_acceptance_is_a_gauge_beside_the_figures_it_spoils(told, shown):
    found = list(state_readings({"synthetic_acceptance": told}, set()))
    assert found == [Reading(FORCED_ACCEPTANCE, shown)]


@pytest.mark.parametrize(
    ("state", "shown"), [("missing", 1.0), ("measured", 0.0), ("loaded", 0.0), ("unused", 0.0)]
)
def test_missing_costs_are_a_gauge_that_alerts_can_watch(state, shown):
    found = list(state_readings({"costs": {"state": state}}, set()))
    assert found == [Reading(COSTS_MISSING, shown)]


@pytest.mark.parametrize("odd", [{}, {"slot": None, "last_reason": None}, {"slot": "all"}], ids=str)
def test_a_snapshot_that_says_nothing_exports_nothing(odd):
    assert list(state_readings(odd, set())) == []


def test_a_counter_grows_by_what_its_total_has_grown():
    growth = Growth()
    seen = [[r.value for r in growth.of(PREEMPTIONS, total)] for total in (0, 3, 3, 5)]
    assert seen == [[], [3], [], [2]]


CONTEXT = SimpleNamespace(app_name="app", deployment="Router", rank=None)


def exports(*states):
    """What each export of a router sets, by name and size."""
    looks = iter(states)
    found = []

    async def scenario():
        router = RouterTelemetry(CONTEXT, lambda: next(looks))

        def keep(reading):
            key = " ".join(
                [reading.metric.name.removeprefix("serve_spec_"), *reading.labels.values()]
            )
            found[-1][key] = reading.value

        router._metrics.record = keep
        for _ in states:
            found.append({})
            await router.export()

    asyncio.run(scenario())
    return found


def state(queue_len=0, rejected=0, resumed=0, **sizes):
    histogram = {size.removeprefix("s"): count for size, count in sizes.items()}
    return {
        "queue_len": queue_len,
        "in_flight": 3,
        "num_rejected": rejected,
        "num_resumed": resumed,
        "submission_size_histogram": histogram,
    }


def test_gauges_are_set_and_counters_grow_by_what_is_new():
    first, second, third = exports(
        state(queue_len=2, rejected=5, s1=3),
        state(rejected=5, s1=3),
        state(rejected=6, resumed=2, s1=4, s8=1),
    )
    assert first == {
        "queue_len": 2, "in_flight_requests": 3, "rejected_requests": 5, "submissions 1": 3,
    }  # fmt: skip
    assert second == {"queue_len": 0, "in_flight_requests": 3}
    assert third == {
        "queue_len": 0, "in_flight_requests": 3, "rejected_requests": 1, "resumed_requests": 2,
        "submissions 1": 1, "submissions 8": 1,
    }  # fmt: skip


async def test_an_export_that_fails_is_tried_again(monkeypatch):
    monkeypatch.setattr(telemetry, "_EXPORT_INTERVAL_S", 0.001)
    looks = 0

    def broken():
        nonlocal looks
        looks += 1
        raise RuntimeError("boom")

    RouterTelemetry(CONTEXT, broken)
    while looks < 3:
        await asyncio.sleep(0.001)


def test_replicas_of_one_pair_have_one_name_but_where_a_load_test_forces_acceptance(config):
    other = ServeSpecConfig.load(config, num_replicas=4, max_num_seqs=3)
    assert pair_name(config) == pair_name(other)
    names = {
        pair_name(ServeSpecConfig.load("configs/tiny.yaml", synthetic_acceptance=forced))
        for forced in (None, 2.5, [0.9, 0.5])
    }
    assert len(names) == 3


def knowing(prior):
    """A stats actor that has an answer."""
    return SimpleNamespace(prior=lambda pair, max_steps: prior)


def test_a_cold_start_is_no_failure(config, monkeypatch):
    """Of an engine that never drafts, or that refuses the rates."""
    engine = FakeLoop()
    start_warm(config, engine, knowing([0.5]))
    assert engine.accept_rates is None

    def refuse(accept_rates):
        raise ValueError("not one rate per position")

    engine.start_from = refuse
    monkeypatch.setattr(telemetry.PolicySettings, "max_depth", 1)
    start_warm(config, engine, knowing([2.0]))


class Clock:
    now = 100.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(request_timer, "time", clock)
    return clock


def values(seen):
    return {r.metric.name.removeprefix("serve_spec_"): r.value for r in seen}


def test_first_and_later_tokens_are_timed_apart(clock):
    seen = []
    timer = RequestTimer(seen.append, "engine", started=99.5)
    timer.observe(Accepted(3, "r"))
    timer.observe(delta("a", 1, 2)._replace(prefill_s=0.1))
    clock.now += 0.08
    timer.observe(LAST)
    timer.end()
    assert values(seen) == pytest.approx(
        {
            "time_to_first_token_ms": 500,
            "first_token_wait_ms": 500,
            "first_tokens": 1,
            "time_per_output_token_ms": 20,
            "later_tokens_wait_ms": 80,
            "later_tokens": 4,
            "requests": 1,
            "finished_requests": 1,
            "request_ms": 580,
            "request_wait_ms": 580,
            "time_per_output_token_wait_ms": 20,
            "request_queue_time_seconds": 0.4,
            "request_prefill_time_seconds": 0.1,
            "request_decode_time_seconds": 0.08,
            "request_inference_time_seconds": 0.18,
            "inter_token_latency_seconds": 0.08,
        }
    )
    assert {r.labels["measured_at"] for r in seen} == {"engine"}


def test_gaps_are_recorded_by_bucket_before_a_long_answer_ends(clock):
    seen = []
    timer = RequestTimer(seen.append, "router", "door", started=99.5)
    timer.observe(delta("a", 1))
    waits = [0.003, 0.3, 0.004, *[0.02] * 40]
    for wait_s in waits:
        clock.now += wait_s
        timer.observe(delta("a", 1, 2))
    gaps = [reading for reading in seen if reading.metric is GAP_S]
    assert sum(reading.count for reading in gaps) == 32
    timer.end()
    gaps = [reading for reading in seen if reading.metric is GAP_S]
    assert sum(reading.count for reading in gaps) == len(waits)
    assert sum(reading.count * reading.value for reading in gaps) == pytest.approx(sum(waits))
    assert {r.labels["measured_at"] for r in gaps} == {"router"}
    assert len(gaps) < 6


def test_a_request_that_fails_has_no_phases():
    seen = []
    timer = RequestTimer(seen.append, "router", started=0.0)
    timer.observe(delta("a", 1))
    timer.observe(Failed("boom"))
    timer.end()
    assert not {QUEUE_S, REQUEST_WAIT_MS} & {reading.metric for reading in seen}


def exported_counts(monkeypatch):
    """What is recorded in Ray, by name and label `le`."""
    counted = Counter()

    def declare(metric, name, labels):
        return lambda value, labels: counted.update({(name, labels.get("le")): value})

    monkeypatch.setattr(telemetry, "_declare", declare)
    return counted


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 3)), max_size=20))
def test_a_distribution_is_exported_as_cumulative_counts_with_an_exact_sum(found):
    with pytest.MonkeyPatch.context() as patch:
        counted = exported_counts(patch)
        exporter = RayMetrics({})
    for half, (value, count) in enumerate(found):
        exporter.record(Reading(PARAMS_N, value, count=count))
        if half == len(found) // 2:
            exporter.flush()
    exporter.flush()
    name = PARAMS_N.name
    for bound in (1.0, 2.0, 5.0, 10.0, 20.0, float("inf")):
        le = "+Inf" if bound == float("inf") else str(bound)
        assert counted[f"{name}_bucket", le] == sum(n for value, n in found if value <= bound)
    assert counted[f"{name}_sum", None] == sum(value * n for value, n in found)


@pytest.mark.parametrize(
    ("items", "outcome"),
    [
        ([Accepted(3, "r"), LAST], "done"),
        ([Refused(InvalidRequest("top_k", -3, "no"))], "refused"),
        ([Accepted(3, "r"), delta("a", 1), Failed("boom")], "failed"),
        ([Accepted(3, "r"), delta("a", 1), RuntimeError("gone")], "failed"),
        ([Accepted(3, "r"), delta("a", 1)], "left"),
    ],
    ids=["done", "refused", "failed", "broken", "left"],
)
def test_every_request_ends_in_one_outcome(items, outcome):
    seen = []
    timer = router_timer(seen.append)
    for item in items:
        if isinstance(item, Exception):
            timer.fail()
        else:
            timer.observe(item)
    timer.end()
    ended = [r.labels for r in seen if r.metric.name == "serve_spec_requests"]
    assert ended == [
        {"outcome": outcome, "measured_at": measured_at} for measured_at in ("router", "door")
    ]


def test_a_renamed_metric_is_recorded_under_its_former_name_too(monkeypatch):
    counted = Counter()

    def declare(metric, name, labels):
        return lambda value, labels: counted.update({name.removeprefix("serve_spec_"): value})

    monkeypatch.setattr(telemetry, "_declare", declare)
    exporter = RayMetrics({})
    known = {metric.name.removeprefix("serve_spec_"): metric for metric in METRICS}
    for name in ("depth_switches", "accept_length_requests", "rounds"):
        exporter.record(Reading(known[name], 2))
    renamed = {"depth_switches": "tier_switches", "accept_length_requests": "accept_length_rows"}
    assert counted == dict.fromkeys([*renamed, *renamed.values(), "rounds"], 2)


async def test_the_router_counts_from_the_arrival_of_the_request(clock):
    seen = []
    ARRIVED.set(98.0)
    timer = router_timer(seen.append)
    timer.observe(LAST)
    timer.end()
    assert values(seen)["time_to_first_token_ms"] == pytest.approx(2000)


NODE = """\
# HELP ray_node_cpu CPU
# TYPE ray_node_cpu gauge
ray_node_cpu{{node="{node}"}} 1.0
# HELP ray_serve_spec_rounds_total Rounds.
# TYPE ray_serve_spec_rounds_total counter
ray_serve_spec_rounds_total{{node="{node}"}} 7.0
# HELP ray_serve_spec_step_ms Time.
# TYPE ray_serve_spec_step_ms histogram
ray_serve_spec_step_ms_bucket{{node="{node}",le="1.0"}} 2.0
ray_serve_spec_step_ms_count{{node="{node}"}} 2.0
"""


def test_each_metric_is_declared_once_and_its_samples_stand_together():
    a, b = (NODE.format(node=node) for node in "ab")
    lines = ours([a, "", b]).splitlines()
    assert lines[:4] == [*a.splitlines()[3:6], b.splitlines()[5]]
    assert lines[4:] == [*a.splitlines()[6:], *b.splitlines()[8:]]
    assert ours([]) == ""


SHIPPED = Path(__file__).parents[2] / "deploy/dashboards/serve_spec.json"
ALERTS = Path(__file__).parents[2] / "k8s/components/monitoring/alerts.yaml"
SUFFIXES = {
    "counter": ("_total",),
    "gauge": ("",),
    "histogram": ("_bucket", "_count", "_sum"),
    "distribution": ("_bucket_total", "_sum_total"),
}
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


def test_every_alert_names_metrics_and_labels_that_exist():
    (group,) = yaml.safe_load(ALERTS.read_text())["spec"]["groups"]
    for rule in group["rules"]:
        names = set(re.findall(r"ray_serve_spec_\w+", rule["expr"]))
        assert names
        assert names <= set(EXPORTED), rule["alert"]
        allowed = {label for name in names for label in EXPORTED[name].labels} | set(LABELS)
        assert labels_in(rule["expr"]) <= allowed, rule["alert"]
        assert rule["expr"].count("(") == rule["expr"].count(")")
        for reason in re.findall(r'reason="(\w+)"', rule["expr"]):
            assert reason in set(Reason)


def test_every_panel_says_what_its_metrics_mean():
    for panel in dashboard()["panels"]:
        if panel["type"] == "row":
            continue
        drawn = {EXPORTED[n] for t in panel["targets"] for n in names_in(t["expr"])}
        assert drawn
        assert all(metric.help in panel["description"] for metric in drawn), panel["title"]


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


def test_recent_requests_are_those_a_router_measured_and_all_readings_go_on():
    passed = []
    recent = RecentRequests(passed.append)
    assert recent.snapshot() == {"ttft_ms": None, "token_gap_ms": None, "requests": {}}
    for measured_at, ttft_ms, outcome in [
        ("router", 10.0, "done"),
        ("router", 30.0, "failed"),
        ("engine", 1000.0, "done"),
    ]:
        recent.record(Reading(TTFT_MS, ttft_ms, {"measured_at": measured_at}))
        recent.record(Reading(REQUESTS, 1, {"measured_at": measured_at, "outcome": outcome}))
    recent.record(Reading(TPOT_MS, 4.0, {"measured_at": "router"}))
    assert len(passed) == 7
    assert recent.snapshot() == {
        "ttft_ms": {"p50": 20.0, "p99": pytest.approx(29.8)},
        "token_gap_ms": {"p50": 4.0, "p99": 4.0},
        "requests": {"done": 1, "failed": 1},
    }
