"""What a router sent and what replicas said decide where the next requests go."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

from serve_spec.serving.routing import ReplicaChooser
from tests.serving.fakes import request

PROMPT = "x" * 640


def link(rows=None, **load):
    return SimpleNamespace(rows=rows or {}, load=load)


class Router:
    """A router that sends to the replicas it chooses."""

    def __init__(self, policy="balanced", max_requests=100, **connections):
        self.num_open: Counter[str] = Counter()
        self.connections = connections
        self.chooser = ReplicaChooser(
            policy,
            "me",
            self.num_open.__getitem__,
            num_slots=100,
            max_requests=max_requests,
            load_factor=1.25,
        )

    def send(self, num=1, avoid=""):
        asked = replace(request(PROMPT), avoid=frozenset(avoid))
        name = self.chooser.choose([asked] * num, self.connections)
        self.num_open[name] += num
        return name


def test_what_was_sent_and_has_not_ended_counts():
    router = Router(a=link(), b=link())
    there, other = router.send(8), router.send(4)
    assert other != there
    router.num_open[there] = 1
    assert router.send() == there


def test_what_other_routers_sent_counts_as_reported_and_own_requests_count_once():
    assert Router(a=link({"you": 5}), b=link({"me": 5, "you": 1})).send() == "b"


def test_goodput_uses_each_replica_s_own_costs():
    dear, cheap = {"0": 9.0, "1": 9.5}, {"0": 3.0, "1": 4.0}
    connections = {"a": link(marginal_ms_by_rows=dear), "b": link(marginal_ms_by_rows=cheap)}
    router = Router("goodput", **connections)
    assert [router.send(), router.send()] == ["b", "b"]


def test_prefix_stays_where_the_prompt_was_sent_and_forgets_the_dead():
    router = Router("prefix", a=link(), b=link())
    there = router.send()
    router.num_open.clear()
    assert router.send() == there
    router.chooser.forget(there)
    router.num_open[there] = 1
    assert router.send() != there


def test_replicas_to_be_avoided_are_the_last_resort():
    router = Router(a=link(), b=link({"you": 9}))
    assert router.send(avoid="a") == "b"
    assert router.send(avoid="ab") == "a"
