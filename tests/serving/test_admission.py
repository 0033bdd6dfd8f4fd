"""Admission: bounded, fair, and it never loses or invents a place."""

import asyncio
import random
from contextlib import suppress

import pytest

from serve_spec.serving.errors import ApiError
from serve_spec.serving.router import admission
from serve_spec.serving.router.admission import Admission
from tests.serving.fakes import FAR_S, settle, until


def far():
    """A deadline that does not pass during a test."""
    return asyncio.get_running_loop().time() + FAR_S


class Caller:
    """One request: waits for its turn, then holds it until it is told to leave.

    It gives its place back where it is to, and waits for another one.
    """

    def __init__(self, admission, client="", *, begins=True, priority=0):
        self.inside = False
        self.begins = begins
        self.num_withdrawn = 0
        self._must_leave = asyncio.Queue()
        self.task = asyncio.create_task(self._visit(admission, client, priority))

    async def _visit(self, admission, client, priority):
        with suppress(ApiError):  # sent away
            async with admission.slot(far(), client, priority) as turn:
                leaves = False
                while not leaves:
                    await turn.ensure_slot()
                    self.inside, turn.has_tokens = True, self.begins
                    turn.withdraw = lambda: self._must_leave.put_nowait(False)
                    leaves = await self._must_leave.get()
                    self.inside = False
                    self.num_withdrawn += not leaves
        self.inside = False

    def may_leave(self):
        self._must_leave.put_nowait(True)

    async def leave(self):
        self.may_leave()
        await self.task

    async def give_up(self):
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task


async def empty(admission, *callers):
    """All callers leave as soon as they can; and nothing is left behind."""
    for caller in callers:
        caller.may_leave()
    await asyncio.gather(*(caller.task for caller in callers))
    assert (admission.in_flight, admission.queue_len) == (0, 0)


async def test_turns_come_in_order_of_arrival_and_never_too_many_at_once():
    admission = Admission(max_in_flight=2, max_queued=10)
    callers = [Caller(admission) for _ in range(5)]
    await settle()
    for gone in range(5):
        assert [c.inside for c in callers[gone : gone + 3]] == [True, True, False][: 5 - gone]
        assert (admission.in_flight, admission.queue_len) == (min(2, 5 - gone), max(0, 3 - gone))
        await callers[gone].leave()
        await settle()
    assert (admission.in_flight, admission.queue_len) == (0, 0)


async def test_turns_of_a_client_come_by_priority_and_clients_share_them_as_before():
    admission = Admission(max_in_flight=1, max_queued=8)
    first = Caller(admission, "a")
    await settle()
    priorities = [("a", 5), ("a", 0), ("a", -1), ("b", 9)]
    waiting = [Caller(admission, client, priority=priority) for client, priority in priorities]
    await settle()
    order = []
    leaving = first
    while len(order) < len(waiting):
        await leaving.leave()
        (leaving,) = (caller for caller in waiting if caller.inside)
        order.append(priorities[waiting.index(leaving)])
    assert order == [("a", -1), ("a", 0), ("a", 5), ("b", 9)]
    await leaving.leave()


async def test_a_full_queue_sends_away_with_429_and_a_time_to_come_back():
    admission = Admission(max_in_flight=1, max_queued=2)
    callers = [Caller(admission) for _ in range(3)]
    await settle()
    with pytest.raises(ApiError, match="2 requests are waiting") as caught:
        async with admission.slot(far()):
            pytest.fail("there is no room")
    assert caught.value.status == 429
    assert int(caught.value.headers()["Retry-After"]) >= 1
    assert admission.snapshot()["num_rejected"] == 1
    await empty(admission, *callers)
    async with admission.slot(far()):  # and now there is
        pass


@pytest.mark.parametrize("when", ["while it waits", "just before its turn", "just after"])
async def test_a_caller_who_gives_up_leaves_no_gap(when):
    admission = Admission(max_in_flight=1, max_queued=5)
    async with admission.slot(far()):
        second, third = Caller(admission), Caller(admission)
        await settle()
        if when == "while it waits":
            await second.give_up()
            assert admission.queue_len == 1
        if when == "just before its turn":
            second.task.cancel()  # it has not run yet when the place becomes free
    if when == "just after":
        second.task.cancel()  # the turn is its own, and it has not run since
    await settle()
    assert third.inside
    await empty(admission, third)


def impatient(monkeypatch):
    """Places are taken back at once."""
    monkeypatch.setattr(admission, "_PATIENCE_S", 0.0)


def inside(callers):
    return sum(caller.inside for caller in callers)


async def test_a_free_place_goes_to_the_client_that_holds_the_fewest():
    admission = Admission(max_in_flight=4, max_queued=20)
    many = [Caller(admission, "many") for _ in range(10)]
    await settle()
    few = [Caller(admission, "few") for _ in range(3)]
    await settle()
    assert (inside(many), inside(few)) == (4, 0), "no request is withdrawn: a limit of 1"
    for gone in range(4):
        await many[gone].leave()
        await settle()
    assert (inside(many), inside(few)) == (2, 2)
    await empty(admission, *many, *few)


async def test_a_client_above_its_share_gives_places_back_while_others_wait(monkeypatch):
    impatient(monkeypatch)
    admission = Admission(max_in_flight=8, max_queued=40, max_client_fraction=0.5)
    many = [Caller(admission, "many") for _ in range(20)]
    await settle()
    assert inside(many) == 8, "alone it may have them all"
    few = [Caller(admission, "few") for _ in range(2)]
    await until(lambda: inside(few) == 2)
    assert inside(many) == 6, "as many as others want"
    assert [c.num_withdrawn for c in many[:8]] == [0] * 6 + [1] * 2, "the newest"
    more = [Caller(admission, "more") for _ in range(9)]
    await until(lambda: inside(more) == 2)
    await asyncio.sleep(0.01)
    assert inside(many) == 4, "never below its limit"
    assert (inside(few), inside(more)) == (2, 2)
    for caller in more:
        await caller.leave()
    await until(lambda: inside(many) == 6)
    assert inside(few) == 2
    assert [c.inside for c in many[5:9]] == [True, False, False, False]
    await empty(admission, *many, *few)


async def test_the_time_to_come_back_is_that_of_the_places_needed_not_of_the_whole_queue():
    admission = Admission(max_in_flight=10, max_queued=200, max_client_fraction=0.5)
    callers = [Caller(admission, client) for client in "abc" for _ in range(70)]
    await settle()
    admission._mean_service_s = 5.0  # two requests a second end

    def retry_after_s(client, num_requests):
        with pytest.raises(ApiError) as caught:
            admission.refuse_if_full(client, num_requests)
        return int(caught.value.headers()["Retry-After"])

    times_s = {number: retry_after_s("d", number) for number in (1, 2, 3, 20, 200)}
    assert times_s == {1: 1, 2: 1, 3: 2, 20: 10, 200: 60}
    await empty(admission, *callers)
    alone = [Caller(admission, "a") for _ in range(110)]
    await settle()
    admission._mean_service_s = 5.0
    assert retry_after_s("a", 20) == 10, "the client's part of the queue is full"
    await empty(admission, *alone)


async def test_what_waits_inside_a_replica_comes_back_behind_the_others(monkeypatch):
    impatient(monkeypatch)
    admission = Admission(max_in_flight=8, max_queued=40, max_client_fraction=0.5)
    running = [Caller(admission, "many") for _ in range(6)]
    waiting = [Caller(admission, "many", begins=False) for _ in range(2)]
    await settle()
    other = Caller(admission, "other")
    await until(lambda: other.inside)
    assert [c.num_withdrawn for c in running] == [0] * 5 + [1], "one place to run in"
    assert [c.num_withdrawn for c in waiting] == [1, 1], "all that would come before it"
    assert inside(running) + inside(waiting) == 7
    await empty(admission, *running, *waiting, other)


async def test_a_request_of_many_choices_counts_as_many_and_leaves_others_room_to_wait():
    admission = Admission(max_in_flight=4, max_queued=10, max_client_fraction=0.5)
    admission.refuse_if_full("many", 9)  # 4 run, 5 wait
    with pytest.raises(ApiError) as caught:
        admission.refuse_if_full("many", 10)
    assert caught.value.status == 429
    many = [Caller(admission, "many") for _ in range(9)]
    await settle()
    with pytest.raises(ApiError, match="of this client"):
        admission.refuse_if_full("many")
    for client in "abcde":
        many.append(Caller(admission, client))
        await settle()
    with pytest.raises(ApiError, match="10 requests are waiting"):
        admission.refuse_if_full("f")
    await empty(admission, *many)


@pytest.mark.parametrize("seed", range(5))
async def test_after_any_coming_and_going_every_place_is_free_again(seed, monkeypatch):
    impatient(monkeypatch)
    rng = random.Random(seed)
    admission = Admission(max_in_flight=4, max_queued=6, max_client_fraction=0.5)
    callers = []
    for _ in range(300):
        action = rng.random()
        if action < 0.5:
            callers.append(Caller(admission, rng.choice("abc")))
        elif callers:
            caller = callers.pop(rng.randrange(len(callers)))
            caller.task.cancel() if action < 0.75 else caller.may_leave()
        if rng.random() < 0.5:
            await asyncio.sleep(0)
        assert 0 <= admission.in_flight <= 4
        assert admission.queue_len <= 6 + admission.num_withdrawn, "who gave a place back may wait"
    for caller in callers:
        caller.may_leave()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)
    assert (admission.in_flight, admission.queue_len) == (0, 0)
