"""Requests travel together and are answered apart."""

import asyncio
from contextlib import aclosing, suppress
from contextvars import ContextVar
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_spec.core.request import FinishReason, TokenDelta, TokenLogprob
from serve_spec.serving.errors import ApiError, ClientTooSlow, no_replica
from serve_spec.serving.messages import Accepted, ReplicaMessage, Withdrawn, merge_deltas
from serve_spec.serving.router.batching import Batcher, ItemStream
from tests.serving.fakes import FAR_S, delta, request, settle, until


def named(name, prompt="a"):
    return replace(request(prompt), request_id=name)


def text(name, content, *, last=False):
    return name, TokenDelta(name, (1,), content, FinishReason.LENGTH if last else None)


class Wire:
    """The other end of a batcher's connection: what the test sends arrives without delay."""

    batcher: Batcher

    def __init__(self, *targets):
        self.targets = list(targets)
        """Where messages go; r1 once there is none left."""
        self.sent = []
        self.cancelled = []
        self.is_ready = None
        """What requests wait for, if anything."""

    async def ready(self):
        if self.is_ready is not None:
            await asyncio.shield(self.is_ready)

    def send(self, requests):
        self.sent.append((self.targets.pop(0) if self.targets else "r1", list(requests)))
        return self.sent[-1][0]

    def cancel(self, replica, request_ids):
        self.cancelled.append((replica, list(request_ids)))

    def accept(self, index=0):
        replica, requests = self.sent[index]
        self.say(*((a.request_id, Accepted(1, replica)) for a in requests), index=index)

    def say(self, *items, index=0):
        self.batcher.receive(self.sent[index][0], ReplicaMessage(list(items)))

    def names(self):
        return [[pending.request_id for pending in requests] for _, requests in self.sent]


class Listener:
    """Asks for one request and keeps what it receives."""

    def __init__(self, batcher, pending):
        self.heard = []
        self.task = asyncio.create_task(self._listen(batcher, pending))

    async def _listen(self, batcher, pending):
        try:
            async with aclosing(batcher.generate(pending)) as items:
                async for item in items:
                    self.heard.append(item)
        except ApiError as error:
            self.heard.append(error)

    @property
    def text(self):
        return "".join(item.text for item in self.heard if isinstance(item, TokenDelta))

    async def leave(self):
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task


def batcher(wire, **options):
    class Wired(Batcher):
        ready, send, cancel = wire.ready, wire.send, wire.cancel
        refuse_if_closing = None

    wire.batcher = Wired(**{"batch_wait_s": FAR_S, "max_batch_size": 3, **options})
    return wire.batcher


async def asking(names, wire=None, **options):
    """Requests of one letter each, as far as they get by themselves."""
    wire = wire or Wire()
    router = batcher(wire, **options)
    listeners = [Listener(router, named(name)) for name in names]
    await settle()
    return wire, router, listeners


async def together(names, wire=None):
    """One submission of these requests, accepted by replica r1."""
    wire, router, listeners = await asking(names, wire, max_batch_size=len(names))
    wire.accept()
    await settle()
    return wire, router, listeners


async def test_requests_wait_for_company_until_the_batch_is_full():
    wire, router, listeners = await asking("ab")
    assert not wire.sent
    listeners += [Listener(router, named(name)) for name in "cd"]
    await settle()
    assert wire.names() == [["a", "b", "c"]]


@pytest.mark.parametrize(
    ("names", "parts"), [("a", ["a"]), ("ab", ["a", "b"]), ("abcdefgh", ["adg", "beh", "cf"])]
)
async def test_a_batch_is_shared_out_evenly_where_there_are_several_replicas(names, parts):
    wire, router, _listeners = await asking(names, max_batch_size=len(names), num_parts=3)
    assert wire.names() == [list(part) for part in parts]
    assert sum(router.batching()["submission_size_histogram"].values()) == len(parts)


@pytest.mark.parametrize("batch_wait_s", [0.0, 0.001])
async def test_those_of_one_moment_travel_together_and_wait_for_no_company_for_ever(batch_wait_s):
    wire, _, _ = await asking("ab", batch_wait_s=batch_wait_s)
    await until(lambda: wire.sent)
    assert wire.names() == [["a", "b"]]


async def test_requests_of_different_groups_or_with_replicas_to_avoid_travel_apart():
    wire = Wire()
    router = batcher(wire, max_batch_size=2, group_of=lambda pending: pending.prompt)
    pending = [
        named("a", "x"),
        named("b", "y"),
        named("c", "x"),
        replace(named("d", "y"), avoid=frozenset({"r1"})),
        named("e", "y"),
    ]
    _waiting = [Listener(router, one) for one in pending]
    await settle()
    assert wire.names() == [["a", "c"], ["b", "e"]]


async def test_who_leaves_while_there_is_no_replica_is_never_sent():
    wire = Wire()
    wire.is_ready = asyncio.get_running_loop().create_future()
    _, _door, (a, _b) = await asking("ab", wire, max_batch_size=2)
    await a.leave()
    wire.is_ready.set_result(None)
    await settle()
    assert wire.names() == [["b"]]
    assert not wire.cancelled


async def test_those_that_leave_in_one_moment_are_one_message():
    wire, router, listeners = await together("abc")
    await asyncio.gather(*(listener.leave() for listener in listeners[:2]))
    await settle()
    assert wire.cancelled == [("r1", ["a", "b"])]
    assert router.num_open("r1") == 1


async def test_who_leaves_while_waiting_for_company_is_never_sent():
    wire, router, (a,) = await asking("a", batch_wait_s=0.01)
    await a.leave()
    _rest = [Listener(router, named(name)) for name in "bcd"]
    await settle()
    assert wire.names() == [["b", "c", "d"]]


async def test_when_a_replica_is_lost_all_its_requests_that_have_not_ended_hear_of_it():
    wire, router, (a, b) = await together("ab")
    other = Listener(router, named("c"))
    wire.targets = ["r2"]
    wire.say(text("a", "1", last=True))
    gone = no_replica("gone")
    router.fail_replica("r1", gone)
    await settle()
    assert a.heard[-1] is not gone
    assert b.heard[-1] is gone
    assert not other.heard
    assert router.num_interrupted == 1
    assert wire.cancelled == [("r1", ["b"])], "should it wake up"


async def test_a_request_that_another_replica_takes_over_counts_once_it_has_been_taken():
    wire, router, _fresh = await asking("a", max_batch_size=1)
    _again = Listener(router, replace(named("b"), is_resumption=True))
    await settle()
    assert router.num_resumed == 0
    wire.accept(0)
    wire.accept(1)
    await settle()
    assert router.num_resumed == 1


@pytest.mark.parametrize(
    ("end", "status"),
    [(None, 500), (RuntimeError("odd"), 500), (no_replica("none"), 503)],
    ids=repr,
)
async def test_where_the_way_to_a_replica_is_cut_requests_fail(end, status):
    wire = Wire()
    wire.is_ready = asyncio.get_running_loop().create_future()
    _, router, (a,) = await asking("a", wire, max_batch_size=1)
    if end is None:  # by other code than its own
        (task,) = router._submissions
        task.cancel()
    else:
        wire.is_ready.set_exception(end)
    await settle()
    assert a.heard[-1].status == status


async def test_a_client_that_does_not_read_loses_its_request_alone_and_reads_why():
    wire, router, (a,) = await asking("a", max_batch_size=1, max_unread_bytes=4096)
    slow = router.generate(named("b"))
    first = asyncio.create_task(anext(slow))
    await settle()
    for index in range(2):
        wire.accept(index)
    assert await first == Accepted(1, "r1")
    for _ in range(100):
        wire.say(text("a", "x"), text("b", "y"))
        await settle()
    assert wire.cancelled == [("r1", ["b"])]
    with pytest.raises(ApiError, match="max_unread_bytes=4096") as caught:
        await anext(slow)
    assert caught.value.code == "client_too_slow"
    wire.say(text("a", "x", last=True))
    await a.task
    assert a.text == 101 * "x"


async def test_a_submission_inherits_nothing_from_the_request_that_starts_it():
    """Serve cancels whatever was called in the context of a request whose client has left."""
    parent = ContextVar("parent", default=None)
    parents = []

    class Contextual(Wire):
        async def ready(self):
            parents.append(parent.get())

    parent.set("a request")
    await asking("ab", Contextual(), max_batch_size=2)
    assert parents == [None]


async def test_sizes_are_counted_for_the_router_and_for_each_replica():
    wire, router, _listeners = await asking("abcdef", max_batch_size=3)
    wire.accept(0)
    await settle()
    wire.accept(1)
    await settle()
    assert router.batching() == {
        "num_interrupted": 0,
        "num_resumed": 0,
        "num_withdrawn": 0,
        "submission_size": 3,
        "submission_size_histogram": {"4": 2},
        "replica_batch_size_histograms": {"r1": {"4": 1, "8": 1}},
    }


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_after_any_coming_and_going_everybody_heard_their_own_words(data):
    """Items arrive in any interleaving; some requests leave; none receives another's items."""

    async def scenario():
        names = "abcde"[: data.draw(st.integers(1, 5))]
        wire, _, listeners = await together(names)
        words = {name: data.draw(st.integers(1, 4)) for name in names}
        spoken = dict.fromkeys(names, 0)
        left = set()
        while any(spoken[name] < words[name] for name in names):
            speakers = [name for name in names if spoken[name] < words[name]]
            now = data.draw(st.lists(st.sampled_from(speakers), unique=True, min_size=1))
            if len(left) < len(names) - 1 and data.draw(st.booleans()):
                leaver = data.draw(st.sampled_from(sorted(set(names) - left)))
                left.add(leaver)
                await listeners[names.index(leaver)].leave()
            items = []
            for name in now:
                spoken[name] += 1
                items.append(
                    text(name, f"{name}.{spoken[name]} ", last=spoken[name] == words[name])
                )
            wire.say(*items)
            await settle()
            for name, listener in zip(names, listeners, strict=True):
                sent = "".join(f"{name}.{i + 1} " for i in range(spoken[name]))
                assert sent.startswith(listener.text)
                assert name in left or listener.text == sent, "without delay"
                assert name in left or listener.task.done() == (spoken[name] == words[name])
        assert wire.batcher.num_open("r1") == 0
        for listener in listeners:
            await listener.leave()
        assert not wire.batcher._by_replica, "nothing is kept of requests that have ended"

    asyncio.run(scenario())


@pytest.mark.parametrize("when", ["collected", "handed over", "begun", "ended"])
async def test_a_request_is_taken_back_wherever_it_is_and_what_came_before_is_heard(when):
    wire, router, (taken,) = await asking("a", max_batch_size=2)
    if when != "collected":
        other = Listener(router, named("b"))
        await settle()
        wire.accept()
    if when in ("begun", "ended"):
        wire.say(text("a", "x"), text("b", "y"))
    if when == "ended":
        wire.say(text("a", "z", last=True))
    await settle()
    router.withdraw("a")
    router.withdraw("a")  # harmless
    await settle()
    await taken.task
    assert taken.text == {"begun": "x", "ended": "xz"}.get(when, "")
    assert (taken.heard[-1] == Withdrawn()) == (when != "ended")
    assert router.num_withdrawn == (when != "ended")
    if when != "collected":
        wire.say(text("b", "y", last=True))
        await other.task
        assert other.text.endswith("y"), "the other one goes on"
        assert wire.cancelled == [("r1", ["a"])] * (when != "ended")


async def test_requests_without_a_token_are_named_by_replica_oldest_first():
    wire, router, _listeners = await asking("abc", Wire("r1", "r2", "r1"), max_batch_size=1)
    wire.is_ready = asyncio.get_running_loop().create_future()
    _waits = Listener(router, named("d"))
    wire.say(text("b", "x"), index=1)
    await settle()
    assert router.not_started(0.0) == {"r1": ["a", "c"]}, "d is nowhere yet"
    assert router.not_started(FAR_S) == {}


async def test_deltas_that_wait_are_one_and_nothing_overtakes():
    items = ItemStream(4096)
    for item in (delta("a", 1), delta("b", 2, 3), Withdrawn(), delta("c", 4), no_replica("gone")):
        assert items.put(item)
    assert await items.get() == delta("ab", 1, 2, 3)
    assert await items.get() == Withdrawn()
    assert await items.get() == delta("c", 4)
    with pytest.raises(ApiError, match="gone"):
        await items.get()


@pytest.mark.parametrize("num_alternatives", [0, 20])
async def test_what_waits_is_bounded_and_past_it_there_is_an_error_alone(num_alternatives):
    scored = TokenLogprob(1, -1.0, 1, tuple((i, -1.0) for i in range(num_alternatives)))
    item = delta("a", 1)._replace(logprobs=(scored,))
    items = ItemStream(100_000)
    count = 0
    while items.put(item):
        count += 1
    assert 100_000 / 3000 < count < 100_000 / 200
    with pytest.raises(ClientTooSlow):
        await items.get()


async def test_a_reader_that_catches_up_has_the_whole_bound_again():
    items = ItemStream(4096)
    for _ in range(100):
        for _ in range(10):
            assert items.put(delta("a", 1))
        assert await items.get() == delta(10 * "a", *10 * [1])


def test_a_merged_delta_says_what_its_parts_say():
    tokens = [TokenLogprob(i, -1.0, 1) for i in range(3)]
    last = delta("c", 2, finish=FinishReason.STOP)
    parts = [
        delta("a", 0)._replace(
            logprobs=(tokens[0],), prompt_logprobs=(None,), num_cached_tokens=5, prefill_s=0.1
        ),
        delta("b", 1)._replace(logprobs=(tokens[1],)),
        last._replace(logprobs=(tokens[2],)),
    ]
    assert merge_deltas(parts) == TokenDelta(
        *("cmpl-1", (0, 1, 2), "abc", FinishReason.STOP, last.speculation),
        *(tuple(tokens), (None,), 5, 0.1),
    )
    assert merge_deltas([delta("a", 0), delta("b", 1)]).logprobs is None
