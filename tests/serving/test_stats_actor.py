"""The actor without Ray: its clocks, and what it answers."""

import pickle
import threading
from types import SimpleNamespace

import pytest
from ray.exceptions import RaySystemError

from serve_spec.serving.statistics import stats_actor
from serve_spec.serving.statistics.stats_actor import ReplicaActors, SpecStats


class Clocks:
    """Time stands still unless told otherwise; every look at the CPU clock finds `work_s` more."""

    def __init__(self):
        self.now_s, self.used_s, self.work_s = 1000.0, 0.0, 0.0

    def time(self):
        return self.now_s

    def process_time(self):
        self.used_s += self.work_s
        return self.used_s


@pytest.fixture
def clocks(monkeypatch):
    clocks = Clocks()
    monkeypatch.setattr(stats_actor, "time", clocks)
    return clocks


def report(actor, replica, **snapshot):
    return actor.report(replica, pickle.dumps(snapshot))


def batch_size(shown):
    return int(shown["fleet"]["batch_size"])


def test_what_is_reported_is_shown(clocks):
    actor = SpecStats(stale_after_s=15, history_s=60)
    whole = {"batch_size": 3, "kv": {"odd": [1, None]}, "other": {"é": 0.5}}
    report(actor, "a", **whole)
    report(actor, "b", batch_size=4)
    view = pickle.loads(actor.view())
    assert batch_size(view) == batch_size(actor.status()) == 7
    assert [state["replica"] for state in view["internal_states"]] == ["a", "b"]
    assert whole.items() <= view["internal_states"][0].items()
    actor.forget("a")
    actor.forget("never seen")
    assert batch_size(pickle.loads(actor.view())) == 4


PAIR = {
    "pair": "m+d",
    "candidate_steps": [0, 2],
    "acceptance": {"positions": [{"position": 1, "accept_rate": 0.75, "trials": 8}]},
}


def test_figures_of_the_fleet_are_metrics_once_they_are_known(clocks):
    actor = SpecStats(stale_after_s=15, history_s=60)

    def exported():
        found = {}
        actor.export(lambda r: found.update({(r.metric.name, *r.labels.values()): r.value}))
        return {name.removeprefix("serve_spec_fleet_") for name, *_ in found}, found

    names, _ = exported()
    assert names == {"replicas", "accept_length_tokens"}
    report(actor, "a", **PAIR, counters={"decode_rows": 4, "correct_drafts": 6})
    clocks.now_s += 16
    report(actor, "b", **PAIR, counters={"decode_rows": 2, "correct_drafts": 1},
           speculation={"effective_speedup": 1.5, "window": {"busy_s": 1.0}})  # fmt: skip
    _, found = exported()
    assert found == {
        ("serve_spec_fleet_replicas", "fresh"): 1,
        ("serve_spec_fleet_replicas", "stale"): 1,
        ("serve_spec_fleet_accept_length_tokens",): 1.5,
        ("serve_spec_fleet_effective_speedup_ratio",): 1.5,
        ("serve_spec_fleet_accept_rate_ratio", "m+d", "2", "1"): 0.75,
        ("serve_spec_fleet_accept_rate_ratio", "m+d", "2", "2"): 0.75,
    }


def test_the_status_is_made_once_a_second_and_more_rarely_where_it_is_dear(clocks):
    actor = SpecStats(stale_after_s=15, history_s=60)
    report(actor, "a", batch_size=1)
    assert batch_size(actor.status()) == 1
    report(actor, "a", batch_size=2)
    clocks.now_s += 0.9
    assert batch_size(actor.status()) == 1
    clocks.now_s += 0.2
    clocks.work_s = 0.5
    assert batch_size(actor.status()) == 2
    report(actor, "a", batch_size=3)
    clocks.now_s += 4.9
    assert batch_size(actor.status()) == 2
    clocks.now_s += 0.2
    assert batch_size(actor.status()) == 3


def test_it_ends_when_nobody_has_reported_for_as_long_as_it_remembers(clocks):
    actors = []
    has_tokens, has_ended = threading.Event(), threading.Event()
    slept = []

    def sleep(seconds):
        assert has_tokens.wait(60)
        clocks.now_s += seconds / 2
        if len(slept) < 2:
            report(actors[0], "a")
        clocks.now_s += seconds / 2
        slept.append(seconds)

    clocks.sleep = sleep
    actors.append(SpecStats(stale_after_s=15, history_s=60, end=has_ended.set))
    has_tokens.set()
    assert has_ended.wait(60)
    assert slept == [60, 30, 45], "two reports came in between"


def test_a_report_that_can_not_be_read_is_nobody_else_s_trouble(clocks):
    actor = SpecStats(stale_after_s=15, history_s=60)
    report(actor, "a", batch_size=3)
    actor.report("b", b"nonsense")
    report(actor, "b", batch_size=10**400)
    assert batch_size(pickle.loads(actor.view())) == 3
    report(actor, "b", batch_size=4)
    assert batch_size(pickle.loads(actor.view())) == 7


def test_the_dead_leave_with_their_first_missing_report_and_the_stuck_are_ended(clocks):
    actor = SpecStats(stale_after_s=15, history_s=60, push_interval_s=2, stall_timeout_s=10)
    killed = []
    replicas = SimpleNamespace(
        is_alive=lambda name: name != "d", responds=lambda name, _: name != "s", kill=killed.append
    )
    for name in "dsw":
        report(actor, name, batch_size=1)

    def shown_after(age_s):
        actor.check_silent(replicas, clocks.now_s + age_s)
        view = pickle.loads(actor.view())
        return {state["replica"] for state in view["internal_states"]}

    assert shown_after(2.9) == {"d", "s", "w"}, "a report may be late"
    assert shown_after(3.1) == {"s", "w"}
    assert shown_after(11.9) == {"s", "w"}
    assert killed == []
    assert shown_after(12.1) == {"s", "w"}
    assert killed == ["s"], "one that answers is not killed"


@pytest.mark.parametrize(
    ("error", "is_alive"),
    [(None, True), (ValueError("no such actor"), False), (RaySystemError("busy"), True)],
    ids=repr,
)
def test_a_replica_is_gone_only_when_ray_says_so(error, is_alive, monkeypatch):
    def get_actor(name, namespace):
        assert (name, namespace) == ("SERVE_REPLICA::app#EngineReplica#r1", "serve")
        if error is not None:
            raise error
        return object()

    monkeypatch.setattr("serve_spec.serving.statistics.stats_actor.ray.get_actor", get_actor)
    assert ReplicaActors("app", "EngineReplica").is_alive("r1") is is_alive


def test_a_large_fleet_reports_less_often_but_never_so_rarely_that_it_seems_silent(clocks):
    actor = SpecStats(stale_after_s=15, history_s=60)
    asked = [report(actor, str(number)) for number in range(6000)]
    assert asked[0] <= 0.01, "less than any replica waits by itself"
    assert asked == sorted(asked)
    for num_replicas, interval_s in enumerate(asked, start=1):
        assert num_replicas * 1e-3 <= 0.1001 * interval_s or interval_s == 7.5
    assert asked[-1] == 7.5
