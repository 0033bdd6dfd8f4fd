"""The fleet behind a handle of Serve, with real connections, and the choice of a replica."""

import asyncio
import gc
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from serve_spec.config import ServeSpecConfig
from serve_spec.core.errors import InvalidRequest
from serve_spec.core.request import FinishReason
from serve_spec.serving.errors import ApiError, ReplicaLost
from serve_spec.serving.messages import Accepted, Failed, Refused
from serve_spec.serving.router import fleet as module
from serve_spec.serving.router.admission import Admission
from serve_spec.serving.router.choice import (
    MarginalCosts,
    Policy,
    ReplicaChooser,
    ReplicaLoad,
    SentPrefixes,
    blocks,
    first_block,
    is_short_of_pages,
    ranked,
)
from serve_spec.serving.router.fleet import RayFleet, requests_to_move
from serve_spec.serving.statistics.stats_actor import StatsUnavailable
from tests.serving.fakes import Handle, ReplicaEnd, delta, request, running, until

ACCEPTED = Accepted(1, "r1")
LAST = delta("b", 2, finish=FinishReason.STOP)
ID = request().request_id


@pytest.fixture(autouse=True)
def _serve_is_away(monkeypatch):
    """Serve's controller does not answer; without a Ray, asking it would start one."""

    def status():
        raise RayServeException("away")

    monkeypatch.setattr(module.serve, "status", status)


async def items_of(fleet):
    return [item async for item in fleet.generate(request())]


@pytest.mark.parametrize(
    "items",
    [[ACCEPTED, LAST], [Refused(InvalidRequest("top_k", -3, "no"))], [ACCEPTED, Failed("boom")]],
    ids=lambda items: type(items[-1]).__name__,
)
async def test_a_connection_outlives_the_answers_on_it(config, items):
    async with running(config, ReplicaEnd(*items)) as fleet:
        for _ in range(2):
            received = await items_of(fleet)
            assert [type(item) for item in received] == [type(item) for item in items]
            assert all(
                isinstance(a, Refused) or a == b for a, b in zip(received, items, strict=True)
            )
        assert fleet.num_interrupted == 0


async def test_a_client_that_leaves_before_the_first_answer_is_not_logged(config, caplog):
    async with running(config, ReplicaEnd()) as fleet:
        waiting = asyncio.ensure_future(anext(fleet.generate(request())))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.wait({waiting})
        await asyncio.sleep(0.01)
    gc.collect()  # errors that have not been read are logged here
    assert caplog.text == ""


async def test_a_replica_is_found_although_serve_is_away_for_a_moment(config, monkeypatch):
    monkeypatch.setattr(module, "_BROADCAST_EVERY_S", 0.001)
    async with running(config, ReplicaEnd(LAST), RayError("odd"), TimeoutError()) as fleet:
        assert await items_of(fleet) == [LAST]


@pytest.mark.parametrize(
    ("num_healthy", "why"), [(0, "none is running"), (1, "none responds"), (None, "none responds")]
)
async def test_waiting_ends_when_no_replica_is_left_or_none_answers(
    config, monkeypatch, num_healthy, why
):
    async def count(self):
        return num_healthy

    monkeypatch.setattr(RayFleet, "num_healthy", count)
    monkeypatch.setattr(module, "_WATCH_EVERY_S", 0.001)
    async with running(ServeSpecConfig.load(config, stall_timeout_s=0.01)) as fleet:
        with pytest.raises(ApiError, match=why) as caught:
            await items_of(fleet)
        assert caught.value.status == 503


async def test_replicas_that_all_shut_down_end_what_waits_and_take_nothing_new(config, monkeypatch):
    apps = {}
    monkeypatch.setattr(module.serve, "status", lambda: SimpleNamespace(applications=apps))
    monkeypatch.setattr(module, "_WATCH_EVERY_S", 0.001)
    replica = ReplicaEnd(LAST)
    async with running(config, replica) as fleet:
        assert await items_of(fleet) == [LAST]
        await fleet.refuse_if_closing()
        ending = asyncio.create_task(replica.drain())
        await until(lambda: not fleet._connections.usable())
        with pytest.raises(ApiError, match="all are shutting down") as caught:
            await fleet.refuse_if_closing()
        assert caught.value.status == 503
        assert await items_of(fleet) == [LAST]
        await ending


async def test_a_request_waits_for_the_replica_that_replaces_those_that_shut_down(
    config, monkeypatch
):
    running_one = SimpleNamespace(replica_states={"RUNNING": 1, "STOPPING": 1})
    app = SimpleNamespace(deployments={Handle.deployment_name: running_one})
    status = SimpleNamespace(applications={"app": app})
    monkeypatch.setattr(module.serve, "status", lambda: status)
    monkeypatch.setattr(module, "_WATCH_EVERY_S", 0.001)
    old, new = ReplicaEnd(name="r1"), ReplicaEnd(LAST, name="r2")
    async with running(config, old) as fleet:
        await until(fleet._connections.usable)
        ending = asyncio.create_task(old.drain())
        await until(lambda: not fleet._connections.usable())
        asking = asyncio.create_task(fleet.refuse_if_closing())
        await asyncio.sleep(0.05)
        assert not asking.done()
        await new.connect(fleet._connections.address)
        await asking
        assert await items_of(fleet) == [LAST]
        await ending


async def test_connected_replicas_serve_whatever_a_new_controller_knows_of_them(
    config, monkeypatch
):
    apps = {}
    monkeypatch.setattr(module.serve, "status", lambda: SimpleNamespace(applications=apps))
    replica = ReplicaEnd(LAST)
    async with running(config, replica) as fleet:
        await until(fleet._connections.usable)
        assert await fleet.num_healthy() == 1
        engines = SimpleNamespace(replica_states={"RECOVERING": 1})
        apps["app"] = SimpleNamespace(deployments={"EngineReplica": engines})
        assert await fleet.num_healthy() == 1
        replica.close()
        await until(lambda: not fleet._connections.usable())
        assert await fleet.num_healthy() == 0


async def test_until_the_first_replica_is_ready_the_answer_is_that_it_starts(config, monkeypatch):
    states = {}

    def status():
        engines = SimpleNamespace(replica_states=states)
        return SimpleNamespace(
            applications={"app": SimpleNamespace(deployments={"EngineReplica": engines})}
        )

    monkeypatch.setattr(module.serve, "status", status)
    async with running(config) as fleet:
        for now, num_healthy, code in (
            ({}, 0, "no_healthy_replica"),
            ({"STARTING": 1}, 0, "starting"),
            ({"RUNNING": 1, "STARTING": 1}, 1, "no_healthy_replica"),
            ({"STARTING": 2}, 0, "no_healthy_replica"),
        ):
            states.clear()
            states.update(now)
            assert await fleet.num_healthy() == num_healthy
            error = fleet.unavailable("none is running")
            assert (error.status, error.code) == (503, code)
            assert "Retry-After" in error.headers()


async def test_a_silent_replica_loses_its_requests_and_serves_on_once_it_speaks(
    config, monkeypatch
):
    monkeypatch.setattr(module, "_WATCH_EVERY_S", 0.001)
    replica = ReplicaEnd(ACCEPTED)
    async with running(ServeSpecConfig.load(config, stall_timeout_s=0.02)) as fleet:
        fleet._handle.replica = replica
        with pytest.raises(ReplicaLost, match="r1 does not respond"):
            await items_of(fleet)
        await until(lambda: replica.cancelled == [ID])
        replica.items = (LAST,)
        answer = asyncio.create_task(items_of(fleet))
        replica.report_load()
        assert await answer == [LAST]


async def test_replicas_that_come_and_go_change_what_a_router_admits(config, monkeypatch):
    monkeypatch.setattr(module, "_WATCH_EVERY_S", 0.001)
    admission = Admission(max_in_flight=3, max_queued=1, max_client_fraction=0.5)
    replicas = [ReplicaEnd(LAST, name=name) for name in ("r1", "r2", "r3")]
    async with running(config, resize=admission.resize) as fleet:
        assert admission.max_in_flight == 3, "requests may wait for the first one"
        for number, replica in enumerate(replicas, 1):
            await replica.connect(fleet._connections.address)
            replica.report_load()
            await until(lambda number=number: admission.max_in_flight == 3 * number)
        assert admission.max_client_in_flight == 4
        await replicas[0].drain()
        await until(lambda: admission.max_in_flight == 6)


async def test_how_many_replicas_know_their_costs_is_known_while_the_stats_actor_answers(
    config, monkeypatch
):
    states = [{"costs": {"state": state}} for state in ("missing", "loaded", "loaded")]
    built = RayFleet(Handle(None), "app", "router", "127.0.0.1", config)

    async def status():
        if not states:
            raise StatsUnavailable("gone")
        return {"replicas": [*states, {}]}

    monkeypatch.setattr(built._stats, "status", status)
    assert await built.costs() == {"missing": 1, "loaded": 2}
    states.clear()
    assert await built.costs() == {}


PROMPT = "x" * 640


def link(rows=None, **load):
    return SimpleNamespace(num_requests=rows or {}, load=load)


class Router:
    """A router that sends to the replicas it chooses."""

    def __init__(self, policy="balanced", max_requests=100, **connections):
        self.num_open = Counter()
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
    connections = {
        "a": link(marginal_ms_by_batch_size=dear),
        "b": link(marginal_ms_by_batch_size=cheap),
    }
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


def state(running, waiting=0, decoding=None, **more):
    decoding = running if decoding is None else decoding
    return {"num_running": running, "num_waiting": waiting, "batch_size": decoding, **more}


WAITING = [f"r{i}" for i in range(6)]
SHORT = {"kv": {"free_pages": 1, "total_pages": 100}}


MOVES = {
    "all of them": (state(8, 6), state(0), WAITING),
    "as many as there are places": (state(8, 6), state(5), WAITING[:3]),
    "the oldest have begun": (state(8, 4), state(0), WAITING[2:]),
    "the oldest compute their prompts": (state(8, 6, decoding=6), state(0), WAITING[2:]),
    "none waits": (state(8, 0), state(0), []),
    "no place": (state(8, 6), state(8), []),
    "a queue there too": (state(8, 6), state(4, 4), []),
    "a sick replica": (state(8, 6), state(0, is_healthy=False), []),
    "no pages": (state(8, 6), state(2, 1, **SHORT), []),
    "another router's wait, too": (state(8, 9), state(0), WAITING),
    "one that does not answer": ({}, state(0), []),
}


@pytest.mark.parametrize(("busy", "idle", "moved"), MOVES.values(), ids=MOVES)
def test_waiting_requests_move_to_free_places(busy, idle, moved):
    stats = {"idle": idle, **({"busy": busy} if busy else {})}
    assert requests_to_move({"busy": WAITING}, stats, num_slots=8) == moved


POLICIES = get_args(Policy)
MS = {0: 5.0, 1: 6.0, 2: 8.0, 4: 12.0, 8: 20.0}
CHEAP = MarginalCosts(MS)
DEAR = MarginalCosts({rows: 2 * ms for rows, ms in MS.items()})


def load(name, rows, costs=None, **fields):
    return ReplicaLoad(name, rows, max_requests=100, marginal_costs=costs, **fields)


def order(policy, *loads, num=1, **options):
    return ranked(policy, loads, num, **{"load_factor": 1.25, **options})


@st.composite
def fleets(draw):
    costs = st.sampled_from([CHEAP, DEAR, None])
    return [
        ReplicaLoad(
            f"r{i}",
            draw(st.integers(0, 6)),
            draw(st.integers(0, 6)),
            num_slots=draw(st.integers(3, 8)),
            max_requests=10,
            is_short_of_pages=draw(st.booleans()),
            is_healthy=draw(st.booleans()),
            marginal_costs=draw(costs),
            matched_blocks=draw(st.integers(0, 3)),
        )
        for i in range(draw(st.integers(1, 5)))
    ]


@given(fleet=fleets(), policy=st.sampled_from(POLICIES), num=st.integers(1, 8), data=st.data())
def test_every_replica_is_ranked_and_sick_avoided_full_and_busy_ones_come_last(
    fleet, policy, num, data
):
    avoid = frozenset(data.draw(st.sets(st.sampled_from([f.name for f in fleet]))))
    names = order(policy, *fleet, num=num, avoid=avoid)
    assert sorted(names) == [f.name for f in fleet]
    by_name = {f.name: f for f in fleet}

    def is_full(load):
        return load.is_short_of_pages or load.num_requests + num > load.max_requests

    classes = [
        (
            not by_name[n].is_healthy,
            n in avoid,
            is_full(by_name[n]),
            by_name[n].num_requests + num > by_name[n].num_slots,
        )
        for n in names
    ]
    assert classes == sorted(classes)


def test_goodput_goes_where_one_more_costs_least_however_many_are_there():
    assert order("goodput", load("slow", 1, DEAR), load("fast", 2, CHEAP)) == ["fast", "slow"]
    assert order("goodput", load("slow", 0, DEAR), load("fast", 4, CHEAP)) == ["slow", "fast"]


def test_goodput_weighs_all_requests_of_a_submission():
    flat, steep = MarginalCosts({0: 7.0}), MarginalCosts({0: 5.0, 1: 20.0})
    assert order("goodput", load("flat", 0, flat), load("steep", 0, steep)) == ["steep", "flat"]
    fleet = load("flat", 0, flat), load("steep", 0, steep)
    assert order("goodput", *fleet, num=2) == ["flat", "steep"]


def test_goodput_between_two_measured_costs_goes_by_what_lies_between():
    """A somewhat cheaper replica gets somewhat more, not all up to the next measured size."""
    ms = {0: 2.0, 32: 5.0, 64: 11.0}
    cheaper = MarginalCosts(ms)
    dearer = MarginalCosts({rows: 1.4 * each for rows, each in ms.items()})
    assert order("goodput", load("a", 36, cheaper), load("b", 34, dearer)) == ["a", "b"]
    assert order("goodput", load("a", 50, cheaper), load("b", 34, dearer)) == ["b", "a"]


@given(rows=st.integers(0, 300))
def test_the_more_rows_the_dearer_the_next_one(rows):
    costs = {0: 2.0, 1: 2.0, 2: 3.0, 32: 5.0, 64: 11.0}
    ms = [load("a", n, MarginalCosts(costs)).marginal_ms(1) for n in (rows, rows + 1)]
    assert ms[0] <= ms[1]
    assert ms[0] == costs.get(rows, ms[0]), "a measured cost is exact at its own rows"
    assert rows < 64 or ms[0] >= 11.0 * rows / 128
    assert rows < 128 or ms[0] < ms[1]


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_waits_for_a_place_while_another_replica_has_one(policy):
    fast = load("fast", 4, CHEAP, num_slots=4, matched_blocks=3)
    slow = load("slow", 7, DEAR, num_slots=8)
    assert order(policy, fast, slow) == ["slow", "fast"]
    both_full = fast, load("slow", 8, DEAR, num_slots=8)
    assert order(policy, *both_full, load_factor=9.0) == ["fast", "slow"]


@pytest.mark.parametrize(
    ("num_waiting", "free_pages", "short"), [(3, 5, True), (3, 50, False), (0, 5, False)]
)
def test_only_a_queue_without_free_pages_is_there_to_stay(num_waiting, free_pages, short):
    stats = {"num_waiting": num_waiting, "kv": {"free_pages": free_pages, "total_pages": 100}}
    assert is_short_of_pages(stats) == short


def test_goodput_between_costs_that_differ_as_measurements_do_is_balanced():
    noisy = MarginalCosts({rows: 1.2 * ms for rows, ms in MS.items()})
    assert order("goodput", load("a", 2, CHEAP), load("b", 1, noisy)) == ["b", "a"]
    assert order("goodput", load("a", 2, CHEAP), load("b", 1, DEAR)) == ["a", "b"]


def test_goodput_without_every_replica_s_costs_and_prefix_without_a_match_are_balanced():
    fleet = load("a", 3), load("b", 1, CHEAP), load("c", 2)
    for policy in POLICIES:
        assert order(policy, *fleet) == ["b", "c", "a"]


def test_prefix_goes_to_the_longest_match_until_it_has_too_many():
    long, short = load("long", 2, matched_blocks=3), load("short", 2, matched_blocks=1)
    assert order("prefix", short, long) == ["long", "short"]
    busy = load("long", 5, matched_blocks=3)
    assert order("prefix", busy, short) == ["short", "long"], "6 of 8 is over 1.25 · 4"
    assert order("prefix", busy, short, load_factor=2.0) == ["long", "short"]


@given(num=st.integers(1, 40), factor=st.floats(1, 3))
def test_prefix_never_piles_up_what_it_could_spread(num, factor):
    """All requests share one prompt: still no replica has more than the bound."""
    rows = {"a": 0, "b": 0, "c": 0}
    for sent in range(num):
        fleet = [load(name, n, matched_blocks=9 if n else 0) for name, n in rows.items()]
        rows[order("prefix", *fleet, load_factor=factor)[0]] += 1
        assert max(rows.values()) <= -(-factor * (sent + 1) // 3)


@given(
    stem=st.lists(st.integers(0, 9), max_size=80),
    left=st.lists(st.integers(0, 9), max_size=80),
    right=st.lists(st.integers(0, 9), max_size=80),
)
def test_prompts_share_as_many_blocks_as_they_share_tokens(stem, left, right):
    one, other = stem + left, stem + right
    common = next(
        (i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y),
        min(len(one), len(other)),
    )
    sent = SentPrefixes()
    sent.note("r", blocks(one))
    assert sent.matched("r", blocks(other)) == common // 16
    assert sent.matched("other", blocks(other)) == 0


def test_text_is_compared_by_its_beginning_too():
    stem = "You are a helpful assistant. " * 10
    assert blocks(stem + "one")[:4] == blocks(stem + "two")[:4]
    assert first_block(request(stem + "one")) == first_block(request(stem + "two"))
    assert first_block(request("short")) is None


@given(st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 3), max_size=99))))
def test_what_was_sent_takes_bounded_memory_and_the_newest_stays(sent):
    memory = SentPrefixes(max_blocks=8)
    for replica, prompt in sent:
        memory.note(replica, blocks(prompt))
        assert len(memory) <= 8
        assert memory.matched(replica, blocks(prompt)) == len(blocks(prompt))
