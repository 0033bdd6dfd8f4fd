"""What a router sent and what replicas said decide where the next requests go."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.serving.fleet import (
    Policy,
    ReplicaChooser,
    ReplicaLoad,
    SentPrefixes,
    blocks,
    first_block,
    is_short_of_pages,
    ranked,
    requests_to_move,
)
from tests.serving.fakes import request

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
CHEAP = {0: 5.0, 1: 6.0, 2: 8.0, 4: 12.0, 8: 20.0}
DEAR = {rows: 2 * ms for rows, ms in CHEAP.items()}


def load(name, rows, costs=None, **fields):
    return ReplicaLoad(name, rows, max_requests=100, marginal_ms_by_batch_size=costs, **fields)


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
            marginal_ms_by_batch_size=draw(costs),
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
    flat, steep = {0: 7.0}, {0: 5.0, 1: 20.0}
    assert order("goodput", load("flat", 0, flat), load("steep", 0, steep)) == ["steep", "flat"]
    fleet = load("flat", 0, flat), load("steep", 0, steep)
    assert order("goodput", *fleet, num=2) == ["flat", "steep"]


def test_goodput_between_two_entries_of_the_costs_goes_by_what_lies_between():
    """A replica that is somewhat cheaper gets somewhat more, and not all up to the next entry."""
    cheaper = {0: 2.0, 32: 5.0, 64: 11.0}
    dearer = {rows: 1.4 * ms for rows, ms in cheaper.items()}
    assert order("goodput", load("a", 36, cheaper), load("b", 34, dearer)) == ["a", "b"]
    assert order("goodput", load("a", 50, cheaper), load("b", 34, dearer)) == ["b", "a"]


@given(rows=st.integers(0, 300))
def test_the_more_rows_the_dearer_the_next_one(rows):
    costs = {0: 2.0, 1: 2.0, 2: 3.0, 32: 5.0, 64: 11.0}
    ms = [load("a", n, costs).marginal_ms(1) for n in (rows, rows + 1)]
    assert ms[0] <= ms[1]
    assert ms[0] == costs.get(rows, ms[0]), "an entry is exact at its own rows"
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
    noisy = {rows: 1.2 * ms for rows, ms in CHEAP.items()}
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
