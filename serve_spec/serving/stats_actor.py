"""`SpecStats`: the one place that knows the whole fleet. Soft state, off the request path."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from serve_spec.config import StatsConfig
from serve_spec.serving.fleet_stats import FleetStats

NAMESPACE = "serve_spec"
_ANSWER_WITHIN_S = 2.0


class StatsUnavailable(RuntimeError):
    """The actor did not answer. Nothing but the statistics is lost."""


class SpecStats:
    """The actor: a clock and a process around `FleetStats`."""

    def __init__(self, stale_after_s: float, history_s: float) -> None:
        self._fleet = FleetStats(stale_after_s=stale_after_s, history_s=history_s)

    def report(self, replica: str, snapshot: Mapping[str, object]) -> None:
        """Takes the newest snapshot of a replica."""
        self._fleet.report(replica, snapshot, time.time())

    def forget(self, replica: str) -> None:
        """Drops a replica that is shutting down."""
        self._fleet.forget(replica)

    def view(self) -> dict[str, object]:
        """`internal_states` and `fleet` as of now."""
        return self._fleet.view(time.time())

    def history(self) -> list[dict[str, object]]:
        """The fleet's sums over time."""
        return self._fleet.history(time.time())


class StatsClient:
    """Calls the actor, makes it where there is none, and finds it again after it was lost."""

    def __init__(self, config: StatsConfig) -> None:
        self._config = config
        self._actor: Any = None

    async def report(self, replica: str, snapshot: Mapping[str, object]) -> None:
        """Sends a replica's snapshot.

        Raises:
            StatsUnavailable: it did not arrive.
        """
        await self._call("report", replica, snapshot)

    async def view(self) -> dict[str, object]:
        """What the actor knows.

        Raises:
            StatsUnavailable: no answer within two seconds.
        """
        view: dict[str, object] = await self._call("view")
        return view

    def forget(self, replica: str) -> None:
        """Tells the actor that a replica leaves; does not wait, and may get lost."""
        if self._actor is not None:
            with contextlib.suppress(RayError):
                self._actor.forget.remote(replica)

    async def _call(self, method: str, *args: object) -> Any:
        try:
            async with asyncio.timeout(_ANSWER_WITHIN_S):
                if self._actor is None:
                    # Asks Ray's control service, which blocks: not on the event loop.
                    self._actor = await asyncio.to_thread(_connect, self._config)
                return await getattr(self._actor, method).remote(*args)
        except (RayError, TimeoutError, ValueError) as error:
            self._actor = None
            raise StatsUnavailable(f"{self._config.actor_name}: {error!r}") from error


def _connect(config: StatsConfig) -> Any:
    options: dict[str, Any] = {
        "name": config.actor_name,
        "namespace": NAMESPACE,
        "get_if_exists": True,
        "lifetime": "detached",
        "max_restarts": -1,
        "num_cpus": 0,
        # Otherwise it is born into the creating replica's placement group and dies with it.
        "scheduling_strategy": "DEFAULT",
    }
    actor = ray.remote(SpecStats).options(**options)
    return actor.remote(config.stale_after_s, config.history_s)
