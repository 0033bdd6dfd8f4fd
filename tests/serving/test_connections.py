"""Routers and replicas find each other, and what either end loses ends at the other."""

import asyncio
import pickle
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.core.errors import InvalidRequest
from serve_spec.core.request import FinishReason, TokenDelta, TokenLogprob
from serve_spec.core.stats import SpeculationStats
from serve_spec.serving.errors import ReplicaLost
from serve_spec.serving.messages import (
    Accepted,
    Failed,
    Refused,
    ReplicaMessage,
    decode_replica_message,
    encode_replica_message,
    encode_router_message,
)
from serve_spec.serving.router import connections as module
from serve_spec.serving.router.connections import ResponseQueue
from serve_spec.serving.router.stream import MessageStream
from tests.serving.fakes import ReplicaEnd, listening, request, until


class Replica(ReplicaEnd):
    """Requests say what the test puts into their queue."""

    def say(self, name, token, *, last=False):
        finish = FinishReason.LENGTH if last else None
        self.queues[name].put(name, TokenDelta(name, (token,), "x", finish))


def named(name):
    return replace(request(), request_id=name)


@asynccontextmanager
async def connected(**options):
    async with listening(**options) as router:
        replica = Replica()
        await replica.connect(router.connections.address)
        await until(router.connections.usable)
        yield router, replica


@asynccontextmanager
async def of_two_routers():
    """A replica with requests a and b of one router and c of another."""
    async with connected() as (router, replica), listening(name="other") as other:
        await replica.connect(other.connections.address)
        await until(other.connections.usable)
        router.ask(named("a"), named("b"))
        other.ask(named("c"))
        await until(lambda: len(replica.queues) == 3)
        yield router, other, replica


async def test_a_replica_that_is_called_says_how_busy_it_is_and_has_one_connection():
    async with connected() as (router, replica):
        await replica.connect(router.connections.address)
        router.ask(named("a"), named("b"))
        await until(lambda: len(replica.queues) == 2)
        replica.report_load()
        await until(lambda: len(router.heard) == 2)
        (connection,) = router.connections.usable().values()
        assert (connection.load["num_running"], connection.num_requests) == (7, {"router": 2})


async def test_every_router_hears_of_its_own_requests_and_of_how_many_the_others_have():
    async with of_two_routers() as (router, other, replica):
        for name in "abc":
            replica.say(name, 1, last=name == "a")
        await until(lambda: other.items() and router.items())
        assert [name for name, _ in router.items()] == ["a", "b"]
        assert [name for name, _ in other.items()] == ["c"]
        assert replica.num_requests() == {"router": 1, "other": 1}
        assert other.heard[-1].num_requests["router"] in (1, 2)


async def test_what_a_router_cancels_ends_in_the_engine():
    async with connected() as (router, replica):
        router.ask(named("a"), named("b"))
        await until(lambda: len(replica.queues) == 2)
        router.connections.send("r1", encode_router_message(cancelled=["a", "b"]))
        await until(lambda: replica.cancelled == ["a", "b"])
        assert not replica.flushed.is_set()
        router.connections.send("r1", encode_router_message(flushes_cache=True))
        await replica.flushed.wait()
        router.connections.send("gone", encode_router_message(cancelled=["c"]))


async def test_a_cancellation_that_arrives_with_its_request_is_not_lost():
    async with connected() as (router, replica):
        router.ask(named("a"), named("b"))
        router.connections.send("r1", encode_router_message(cancelled=["a"]))
        await until(lambda: replica.queues)
        assert [*replica.queues] == ["b"], "the engine never gets the other one"
        assert replica.num_requests() == {"router": 1}


async def test_requests_that_their_router_does_not_have_end_with_the_next_load_report():
    async with of_two_routers() as (router, _other, replica):
        router.open.remove("a")  # its cancellation is lost
        replica.report_load()
        await until(lambda: replica.cancelled == ["a"])
        assert replica.num_requests() == {"router": 1, "other": 1}


async def test_a_replica_that_connects_anew_loses_the_requests_of_its_old_connection():
    async with listening() as router:
        old, writer, _ = await calling(router.connections.address)
        await until(router.connections.usable)
        *_, newer = await calling(router.connections.address)
        await until(lambda: router.lost)
        await old.read()
        await until(router.connections.usable)
        assert [name for name, _ in router.lost] == ["r1"]
        writer.close()
        newer.close()


async def test_requests_end_with_their_router_and_those_of_others_do_not():
    async with AsyncExitStack() as other_life:
        other = await other_life.enter_async_context(listening(name="other"))
        async with connected() as (router, replica):
            await replica.connect(other.connections.address)
            await until(other.connections.usable)
            router.ask(named("a"))
            other.ask(named("b"))
            await until(lambda: len(replica.queues) == 2)
            for connection in router.connections.usable().values():
                connection.stream.abort()
            await until(lambda: replica.num_requests() == {"other": 1})
            assert replica.cancelled == ["a"]
            await replica.connect(router.connections.address)  # it is not lost, and connects again
            await until(router.connections.usable)


@pytest.mark.parametrize(
    ("message", "status"),
    [(None, 503), (b"no message", 500), (encode_replica_message(ReplicaMessage([]))[:-3], 500)],
    ids=repr,
)
async def test_a_connection_that_breaks_off_loses_the_requests_of_its_replica(message, status):
    async with listening() as router:
        *_, stream = await calling(router.connections.address)
        await until(router.connections.usable)
        if message is None:
            stream.close()
        else:
            stream.write(message)
        await until(lambda: router.lost)
        ((name, error),) = router.lost
        assert isinstance(error, ReplicaLost)
        assert (name, error.replica, error.status) == ("r1", "r1", status)
        assert not router.connections.usable()


async def calling(address, name=b"r1", secret=None):
    """Call a router as a replica does, and report the load once."""
    reader, writer = await asyncio.open_connection(address.host, address.port)
    stream = MessageStream(reader, writer)
    ends = b"replica", b"router", name
    if await stream.authenticate(secret or address.secret, *ends) is not None:
        stream.write(encode_replica_message(ReplicaMessage([], {}, {"num_running": 0})))
    return reader, writer, stream


async def test_a_connection_without_the_secret_or_with_a_long_handshake_is_refused():
    async with listening() as router:
        address = router.connections.address
        reader, *_ = await calling(address, secret=b"guessed")
        await reader.read()
        with pytest.raises((EOFError, ConnectionError)):
            await calling(address, b"x" * 9000)
        reader, writer = await asyncio.open_connection(address.host, address.port)
        stream = MessageStream(reader, writer)
        challenge = await stream.read()
        stream.write(challenge + b"r1")  # its own challenge, to get its own proof
        stream.write(await stream.read())
        await reader.read()
        assert not router.connections.usable()
        assert not router.lost


@pytest.mark.parametrize("forgery", ["altered", "repeated", "left out", "not tagged", "sent back"])
async def test_a_message_that_the_replica_did_not_send_next_ends_its_connection(forgery):
    load = encode_replica_message(ReplicaMessage([], {}, {"num_running": 9}))
    async with listening() as router:
        reader, writer, stream = await calling(router.connections.address)
        await until(router.connections.usable)
        if forgery == "sent back":  # the router's answer to the load
            forged = await reader.readexactly(
                int.from_bytes(length := await reader.read(4), "little")
            )
            writer.write(length + forged)
        else:
            sent = []
            stream._writer = SimpleNamespace(write=sent.append)  # not to the other end
            stream.write(load)
            stream.write(load)
            first, second = sent
            writer.write(
                {
                    "altered": first[:-1] + bytes([first[-1] ^ 1]),
                    "repeated": first + first,
                    "left out": second,
                    "not tagged": len(load).to_bytes(4, "little") + load,
                }[forgery]
            )
        await until(lambda: router.lost)
        ((name, error),) = router.lost
        assert (name, error.status) == ("r1", 503)
        assert len(router.heard) == (2 if forgery == "repeated" else 1)


async def test_a_replica_refuses_a_router_without_the_secret_and_does_not_send_it():
    async with listening() as router:
        replica = Replica()
        with pytest.raises(ConnectionRefusedError, match="is not router"):
            await replica.connect(router.connections.address._replace(secret=b"another"))
        assert not replica.num_requests()
        await replica.connect(router.connections.address)
        await until(router.connections.usable)


async def test_a_silent_replica_loses_its_requests_once_and_is_avoided_until_it_speaks():
    async with connected(max_quiet_checks=3) as (router, replica):
        for _ in range(2):
            router.connections.check()
        replica.report_load()
        await until(lambda: len(router.heard) == 2)
        for _ in range(2):
            router.connections.check()
        assert router.connections.usable()
        for _ in range(5):
            router.connections.check()
        ((name, error),) = router.lost
        assert (name, error.status) == ("r1", 503)
        assert not router.connections.usable()
        replica.report_load()
        await until(router.connections.usable)


async def test_a_request_that_cannot_be_read_fails_alone():
    async with connected() as (router, replica):
        broken = replace(named("a"), avoid=Unreadable())
        router.connections.send("r1", encode_router_message([broken, named("b")]))
        await until(router.items)
        ((name, item),) = router.items()
        assert name == "a"
        assert isinstance(item, Failed)
        assert replica.num_requests() == {"router": 1}


class Unreadable:
    """Something that is pickled by a function which fails."""

    def __reduce__(self):
        return int, ("x",)


async def test_a_replica_that_is_to_end_finishes_its_requests_and_takes_no_others():
    async with connected() as (router, replica):
        router.ask(named("a"))
        await until(lambda: replica.queues)
        draining = asyncio.create_task(replica.drain())
        await until(lambda: not router.connections.usable())
        replica.say("a", 1, last=True)
        await draining
        await until(lambda: router.lost)
        ((_, item),) = router.items()
        assert item.finish_reason is FinishReason.LENGTH
        await replica.connect(router.connections.address)
        assert not router.connections.usable()


async def test_a_replica_that_is_to_end_still_takes_what_waits_in_a_router():
    async with connected() as (router, replica):
        router.ask(named("a"))
        await until(lambda: replica.queues)
        draining = asyncio.create_task(replica.drain())
        await until(lambda: not router.connections.usable())
        assert router.connections.reachable().keys() == {"r1"}
        for ending, following in ("ab", "bc"):
            replica.say(ending, 1, last=True)
            await until(lambda name=ending: router.has_ended(name))
            router.ask(named(following))
            await until(lambda name=following: name in replica.queues)
        assert not draining.done()
        replica.say("c", 1, last=True)
        await draining
        await until(lambda: router.lost)
        assert not router.connections.reachable()


async def test_a_replica_that_breaks_down_says_what_is_left_to_say():
    async with connected() as (router, replica):
        router.ask(named("a"))
        await until(lambda: replica.queues)
        replica.queues["a"].put("a", Failed("boom"))
        replica.close()
        await until(lambda: router.lost)
        assert router.items() == [("a", Failed("boom"))]


async def test_a_router_that_does_not_listen_any_more_is_an_error_and_may_be_called_again(
    monkeypatch,
):
    replica = Replica()
    async with listening() as router:
        with pytest.raises(OSError, match=r"refused|failed"):
            await replica.connect(router.connections.address._replace(port=1))
        monkeypatch.setattr(module, "_CONNECT_WITHIN_S", 1e-9)
        with pytest.raises(TimeoutError):
            await replica.connect(router.connections.address)
        monkeypatch.undo()
        await replica.connect(router.connections.address)
        await until(router.connections.usable)


async def test_waiting_for_a_replica_ends_when_there_is_one_or_in_time():
    async with listening() as router:
        await router.connections.changed(within_s=0.001)
        waiting = asyncio.create_task(router.connections.changed(within_s=3600))
        await asyncio.sleep(0)
        *_, writer = await calling(router.connections.address)
        await waiting
        assert router.connections.usable()
        writer.close()


async def test_rounds_that_a_slow_router_misses_are_one_delta_of_each_request():
    queue = ResponseQueue()
    for name in "ab":
        queue.answers[name] = asyncio.create_task(asyncio.sleep(0))
    queue.put("a", Accepted(3, "r1"))
    for token in range(4):
        for name in "ab":
            queue.put(name, TokenDelta(name, (token,), "x"))
    queue.put("b", Failed("boom"))
    merged = TokenDelta("a", (0, 1, 2, 3), "xxxx")
    assert await anext(aiter(queue)) == [
        ("a", Accepted(3, "r1")),
        ("a", merged),
        ("b", merged._replace(request_id="b")),
        ("b", Failed("boom")),
    ]
    assert list(queue.answers) == ["a"]


TEXTS = st.text(st.characters(), max_size=5)  # half surrogate pairs, too
DELTAS = st.builds(
    TokenDelta,
    st.just("a"),
    st.lists(st.integers(0, 2**31), max_size=4).map(tuple),
    TEXTS,
    st.sampled_from([None, *FinishReason]),
    st.sampled_from([None, SpeculationStats(3)]),
    st.sampled_from([None, (TokenLogprob(1, -1.0, 1, ((2, -3.0),)),)]),
    st.sampled_from([None, (None,)]),
    st.integers(0, 3),
    st.floats(0, 100),
)
ITEMS = st.one_of(DELTAS, st.sampled_from([Accepted(3, "r1"), Failed("boom", overloaded=True)]))


@given(st.lists(ITEMS, max_size=5), st.booleans())
def test_what_is_decoded_is_what_was_encoded(items, is_closing):
    load = None if items else {"num_running": 1}
    message = ReplicaMessage([("a", item) for item in items], {"router": 2}, load, is_closing)
    assert decode_replica_message(encode_replica_message(message)) == message


def test_a_refusal_keeps_its_error_and_an_item_that_cannot_be_read_fails_its_request_alone():
    refusal = Refused(InvalidRequest("top_k", -3, "no"))
    encoded = encode_replica_message(ReplicaMessage([("d", refusal)]))
    ((_, refused),) = decode_replica_message(encoded).items
    assert str(refused.error) == str(refusal.error)
    encoded = [("a", b"no pickle"), ("b", (1,), "x"), ("c", pickle.dumps(Accepted(3, "r1")))]
    (a, failed), *others = decode_replica_message(pickle.dumps((encoded, {}, None, False))).items
    assert a == "a"
    assert isinstance(failed, Failed)
    assert others == [("b", TokenDelta("b", (1,), "x")), ("c", Accepted(3, "r1"))]
