"""Fleets in this process: fake engines, engines that fail, and items from a script."""

import asyncio
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import NamedTuple

from serve_spec.core.errors import InvalidRequest
from serve_spec.core.request import SamplingParams, TokenDelta
from serve_spec.core.stats import SpeculationStats
from serve_spec.serving import messages
from serve_spec.serving.errors import ApiError, ReplicaLost, no_replica
from serve_spec.serving.router.connections import ReplicaConnections, RouterConnections
from serve_spec.serving.router.fleet import RayFleet
from serve_spec.serving.statistics.fleet_stats import FleetStats
from tests.serving.fake_engine import SamplingLoop

FAR_S = 3600.0
"""Longer than any test takes."""


class QuietFleet:
    """A fleet without statistics that takes no request back."""

    def withdraw(self, request_id):
        """Nothing is withdrawn here."""

    async def refuse_if_closing(self):
        """Its replicas never shut down."""

    def batching(self):
        return {"submission_size_histogram": {}}

    async def num_healthy(self):
        return 1

    def unavailable(self, why):
        return no_replica(why)

    async def costs(self):
        return {}

    async def stats(self):
        return {}

    async def status(self):
        return {}


async def _deltas(stream):
    """Yield what a stream hands over."""
    items = asyncio.Queue()
    reader = asyncio.create_task(stream.each(items.put_nowait))
    reader.add_done_callback(items.put_nowait)
    try:
        while (item := await items.get()) is not reader:
            yield item
        await reader
    finally:
        reader.cancel()


class LoopFleet(QuietFleet):
    """What `RayFleet` and `EngineReplica` do together, without Ray between them."""

    def __init__(self, loop, num_replicas=1):
        self.loop = loop
        self.num_replicas = num_replicas

    async def generate(self, request):
        try:
            stream = await self.loop.submit(request.prompt, request.params, request.request_id)
            yield messages.Accepted(stream.num_prompt_tokens, "here")
            async for delta in _deltas(stream):
                yield delta
        except InvalidRequest as error:
            yield messages.Refused(error)
        except RuntimeError as error:
            yield messages.Failed(str(error))
        finally:
            self.loop.cancel(request.request_id)

    def flush_cache(self):
        self.loop.flush_cache()

    async def num_healthy(self):
        return self.num_replicas

    async def costs(self):
        return {"missing": 1}

    async def stats(self):
        return {"internal_states": [self.loop.snapshot()], "fleet": {}}

    async def status(self):
        stats = FleetStats(stale_after_s=60, history_s=60)
        stats.report("here", self.loop.snapshot(), 0.0)
        return stats.status(0.0)


class ScriptedFleet(QuietFleet):
    """Answers every request with the same items; an exception among them is raised."""

    def __init__(self, items):
        self.items = list(items)
        self.next = None
        """What it answers after the first time; None: the same."""
        self.num_open = 0

    async def generate(self, request):
        self.num_open += 1
        try:
            items, self.items = self.items, self.next or self.items
            for item in items:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.num_open -= 1


def lost():
    return ReplicaLost(no_replica("gone"))


class Takes(NamedTuple):
    """The router takes the request back after so many items."""

    after: int


class FailingFleet(QuietFleet):
    """Replica after replica; each fails after as many items as it is given.

    endings: a number of items, an error instead of the first item, or the end of a request that the
    router takes back. The replica after the last one does not fail.
    """

    def __init__(self, *endings):
        self.endings = list(endings)
        self.requests = []

    async def generate(self, asked):
        self.requests.append(asked)
        ending = self.endings.pop(0) if self.endings else float("inf")
        if isinstance(ending, ApiError):
            raise ending
        if isinstance(ending, messages.Failed):
            yield ending
            return
        loop = SamplingLoop(len(self.requests))
        stream = await loop.submit(asked.prompt, asked.params, asked.request_id, asked.emitted)
        accepted = messages.Accepted(stream.num_prompt_tokens, f"r{len(self.requests)}")
        items = [accepted, *[item async for item in stream]]
        for count, item in enumerate(items):
            if isinstance(ending, Takes) and count >= ending.after:
                yield messages.Withdrawn()
            elif not isinstance(ending, Takes) and count >= ending:
                raise lost()
            yield item


class FailingChoices(QuietFleet):
    """Replicas of every choice: the first fails after `ending` items, the second does not."""

    def __init__(self, ending=float("inf")):
        self.ending = ending
        self.choices = {}

    def generate(self, asked):
        choice = asked.request_id.rpartition("-")[0]
        return self.choices.setdefault(choice, FailingFleet(self.ending)).generate(asked)


async def until(condition):
    """Return once it holds; fail if it does not for a minute."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


async def settle():
    """Lets every task that can run now run."""
    for _ in range(20):
        await asyncio.sleep(0)


class ReplicaEnd(RouterConnections):
    """A replica's end of its connections; it sends `items` and whatever tests put into `queues`."""

    def __init__(self, *items, name="r1"):
        self.items = items
        self.cancelled = []
        self.queues = {}
        self.flushed = asyncio.Event()
        load = {"num_running": 7, "is_healthy": True}
        super().__init__(name, self._say, lambda: load, self.flushed.set)

    async def _say(self, asked, queue):
        self.queues[asked.request_id] = queue
        for item in self.items:
            queue.put(asked.request_id, item)
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.append(asked.request_id)


class RouterEnd:
    """A router's end of its connection to replica r1, and what it receives."""

    def __init__(self, name="router", max_quiet_checks=3, host="127.0.0.1"):
        self.connections = ReplicaConnections(name, host, self, max_quiet_checks)
        self.heard, self.lost = [], []
        self.open = []

    def known_requests(self, replica):
        return self.open

    def receive(self, replica, message):
        self.heard.append(message)

    def fail_replica(self, replica, error):
        self.lost.append((replica, error))

    def items(self):
        return [item for message in self.heard for item in message.items]

    def items_of(self, name):
        return [item for request_id, item in self.items() if request_id == name]

    def has_ended(self, *names):
        return all(any(map(messages.is_last, self.items_of(name))) for name in names)

    def ask(self, *requests):
        self.open += [asked.request_id for asked in requests]
        self.connections.send("r1", messages.encode_router_message(requests))


@asynccontextmanager
async def listening(**options):
    router = RouterEnd(**options)
    serving = asyncio.create_task(router.connections.serve())
    try:
        yield router
    finally:
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving


class Handle:
    """The part of a `DeploymentHandle` that the fleet uses; its deployment has one replica.

    errors: raised, one after the other, before the replica is called.
    """

    deployment_name = "EngineReplica"

    def __init__(self, replica, *errors):
        self.replica = replica
        self.errors = list(errors)

    def broadcast(self, method, address):
        assert method == "connect"

        async def results(**options):
            if self.errors:
                raise self.errors.pop(0)
            if self.replica is not None:
                await self.replica.connect(address)
            return [None]

        return SimpleNamespace(results_async=results)


@asynccontextmanager
async def running(config, replica=None, *errors, name="router", resize=lambda count: None):
    """A `RayFleet`, the router `name`, in front of one replica."""
    fleet = RayFleet(Handle(replica, *errors), "app", name, "127.0.0.1", config)
    fleet.start(resize)
    try:
        yield fleet
    finally:
        for task in fleet._tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


def request(prompt="a b", **params):
    """A request for a fleet."""
    return messages.GenerateRequest("cmpl-1", "trace", prompt, SamplingParams(**params))


def delta(text, *ids, finish=None):
    """One round's part of `request()`."""
    stats = SpeculationStats() if finish else None
    return TokenDelta("cmpl-1", ids, text, finish, stats)
