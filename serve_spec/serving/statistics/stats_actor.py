"""`SpecStats`: a Ray actor with statistics of the whole fleet. No request depends on it.

Each Serve application has one, in the Ray namespace of the application's name. It is detached, so
it outlives replicas and routers; it exits when no reports arrive.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import RayError
from ray.serve._private.common import DeploymentID, ReplicaID

from serve_spec.config import ServeSpecConfig
from serve_spec.log import get_logger
from serve_spec.metrics import Reading
from serve_spec.serving.statistics.fleet_stats import FleetStats
from serve_spec.serving.statistics.telemetry import RayMetrics, fleet_readings

logger = get_logger(__name__)

_SERVE_NAMESPACE = "serve"


class ReplicaActors:
    """The actors of one deployment, by replica id. All methods may block."""

    def __init__(self, app_name: str, deployment: str) -> None:
        self._deployment = DeploymentID(name=deployment, app_name=app_name)

    def is_alive(self, replica: str) -> bool:
        """Return whether a replica is alive; true if Ray cannot tell."""
        try:
            self._actor(replica)
        except ValueError:  # no such actor
            return False
        except RayError as error:
            logger.info("replica %s: state unknown: %r", replica, error)
        return True

    def responds(self, replica: str, within_s: float) -> bool:
        """Return whether a replica passes its health check within `within_s` seconds."""
        try:
            ray.get(self._actor(replica).check_health.remote(), timeout=within_s)
        except (RayError, ValueError, TimeoutError, RuntimeError):
            return False
        return True

    def kill(self, replica: str) -> None:
        """Kill a replica's process; no-op if it is gone."""
        try:
            ray.kill(self._actor(replica))
        except (RayError, ValueError) as error:
            logger.info("replica %s: not killed: %r", replica, error)

    def _actor(self, replica: str) -> Any:
        name = ReplicaID(unique_id=replica, deployment_id=self._deployment).to_full_id_str()
        return ray.get_actor(name, namespace=_SERVE_NAMESPACE)


# CPU cores that reports may use. Queries and Ray's head node share the host.
_CORES = 0.1
# CPU seconds of a report with some margin. Most is Ray's overhead per call.
_REPORT_S = 1e-3
_ANSWER_WITHIN_S = 2.0
_STATUS_VALID_S = 1.0
_STATUS_CORES = 0.1
_CHECK_EVERY_S = 1.0
_EXPORT_EVERY_S = 5.0
# A report is late after this many intervals.
_LATE_FACTOR = 1.5


class StatsUnavailable(RuntimeError):
    """The actor did not respond. Only statistics are affected."""


class SpecStats:
    """The actor around `FleetStats`; it checks replicas that stop reporting.

    Dead ones are removed. One that lives but does not respond after `stall_timeout_s` is killed, so
    that its replacement gets its resources.

    end: called in another thread when nothing has been reported for as long as data is kept.
    replicas: access to the replicas' actors; None: no checks.
    application: the name with which the fleet's metrics are exported; None: they are not.
    """

    def __init__(
        self,
        stale_after_s: float,
        history_s: float,
        end: Callable[[], None] | None = None,
        *,
        replicas: ReplicaActors | None = None,
        push_interval_s: float = 2.0,
        stall_timeout_s: float = 10.0,
        application: str | None = None,
    ) -> None:
        self._fleet = FleetStats(stale_after_s=stale_after_s, history_s=history_s)
        self._memory_s = max(stale_after_s, history_s)
        self._push_interval_s = push_interval_s
        self._stall_timeout_s = stall_timeout_s
        self._lock = threading.RLock()
        self._reported_s = time.time()
        self._max_interval_s = stale_after_s / 2
        self._status: dict[str, object] = {}
        self._status_until = float("-inf")
        if end is not None:
            threading.Thread(target=self._end_when_idle, args=(end,), daemon=True).start()
        if replicas is not None:
            threading.Thread(target=self._check_forever, args=(replicas,), daemon=True).start()
        if application is not None:
            labels = {"application": application, "deployment": "SpecStats", "replica": "-"}
            record = RayMetrics(labels).record
            threading.Thread(target=self._export_forever, args=(record,), daemon=True).start()

    def report(self, replica: str, encoded: bytes) -> float:
        """Store an encoded snapshot; return the minimum seconds until the replica's next one."""
        self._reported_s = time.time()
        try:
            with self._lock:
                self._fleet.report(replica, pickle.loads(encoded), self._reported_s)
        except Exception as error:  # other replicas' reports are still valid
            logger.warning("unreadable report of replica %s: %r", replica, error)
            self.forget(replica)
        return self._interval_s

    def forget(self, replica: str) -> None:
        """Remove a replica that is shutting down."""
        with self._lock:
            self._fleet.forget(replica)

    def view(self) -> bytes:
        """Return `FleetStats.view`, encoded."""
        with self._lock:
            return pickle.dumps(self._fleet.view(time.time()))

    def status(self) -> dict[str, object]:
        """Return the data of the status page, cached so that it takes at most a tenth of a core."""
        if time.time() >= self._status_until:
            used_s = -time.process_time()
            with self._lock:
                self._status = self._fleet.status(time.time())
            used_s += time.process_time()
            self._status_until = time.time() + max(_STATUS_VALID_S, used_s / _STATUS_CORES)
        return self._status

    def prior(self, pair: str, max_steps: int) -> list[float] | None:
        """See `FleetStats.prior`."""
        with self._lock:
            return self._fleet.prior(pair, max_steps, time.time())

    @property
    def _interval_s(self) -> float:
        """Minimum seconds between reports of a replica; near 0 for a small fleet."""
        return min(self._max_interval_s, self._fleet.num_replicas * _REPORT_S / _CORES)

    def _end_when_idle(self, end: Callable[[], None]) -> None:
        while (left_s := self._reported_s + self._memory_s - time.time()) > 0:
            time.sleep(left_s)
        end()

    def _check_forever(self, replicas: ReplicaActors) -> None:
        while True:
            time.sleep(_CHECK_EVERY_S)
            try:
                self.check_silent(replicas, time.time())
            except Exception as error:  # the next check may succeed
                logger.warning("silent replicas not checked: %r", error)

    def _export_forever(self, record: Callable[[Reading], None]) -> None:
        while True:
            time.sleep(_EXPORT_EVERY_S)
            try:
                self.export(record)
            except Exception as error:  # only metrics are lost
                logger.warning("metrics not exported: %r", error)

    def export(self, record: Callable[[Reading], None]) -> None:
        """Record the metrics of the fleet."""
        with self._lock:
            fleet = self._fleet.totals(time.time())
        for reading in fleet_readings(fleet):
            record(reading)

    def check_silent(self, replicas: ReplicaActors, now_s: float) -> None:
        """Remove replicas that are gone; kill those that have been unresponsive for too long."""
        interval_s = max(self._push_interval_s, self._interval_s)
        with self._lock:
            silent = self._fleet.silent(now_s, _LATE_FACTOR * interval_s)
        for name, age_s in silent.items():
            if not replicas.is_alive(name):
                self.forget(name)
            elif age_s > interval_s + self._stall_timeout_s and not replicas.responds(
                name, _ANSWER_WITHIN_S
            ):
                logger.error("replica %s does not respond; killing its process", name)
                replicas.kill(name)


class StatsClient:
    """Client of an application's actor; it creates the actor if there is none.

    Coroutines raise StatsUnavailable if there is no response within two seconds.
    """

    def __init__(self, config: ServeSpecConfig, app_name: str) -> None:
        self._config = config.stats
        self._stall_timeout_s = config.replica.stall_timeout_s
        self._app_name = app_name
        self._actor: Any = None

    async def report(self, replica: str, snapshot: Mapping[str, object]) -> float:
        """Send a replica's snapshot; return the minimum seconds until the next one."""
        # Bytes are the cheapest argument for Ray.
        encoded = pickle.dumps(dict(snapshot), pickle.HIGHEST_PROTOCOL)
        interval_s: float = await self._call("report", replica, encoded)
        return interval_s

    async def view(self) -> dict[str, object]:
        """Return `FleetStats.view`."""
        # Decoding a large fleet is slow, so it runs in a thread.
        view: dict[str, object] = await asyncio.to_thread(pickle.loads, await self._call("view"))
        return view

    async def status(self) -> dict[str, object]:
        """Return `FleetStats.status`."""
        status: dict[str, object] = await self._call("status")
        return status

    def prior(self, pair: str, max_steps: int) -> list[float] | None:
        """Return the fleet's accept rates of a pair of models or None; blocks for up to 2 s."""
        try:
            actor: Any = ray.get_actor(self._config.actor_name, self._app_name)
            answer = actor.prior.remote(pair, max_steps)
            # `ray.get` would warn in a thread with an event loop.
            prior: list[float] | None = answer.future().result(_ANSWER_WITHIN_S)
        except (RayError, TimeoutError, ValueError):
            return None
        return prior

    def forget(self, replica: str) -> None:
        """Notify the actor, best effort and without waiting, that a replica shuts down."""
        if self._actor is not None:
            with contextlib.suppress(RayError):
                self._actor.forget.remote(replica)

    def _connect(self) -> Any:
        config = self._config
        actor = ray.remote(SpecStats).options(
            name=config.actor_name,
            namespace=self._app_name,
            get_if_exists=True,
            lifetime="detached",
            max_restarts=-1,
            num_cpus=0,
            # Otherwise it would join the creating replica's placement group and die with it.
            scheduling_strategy="DEFAULT",
            # A task event per report costs as much as the report.
            enable_task_events=False,
        )
        return actor.remote(
            config.stale_after_s,
            config.history_s,
            _end_this_actor,
            replicas=ReplicaActors(self._app_name, "EngineReplica"),
            push_interval_s=config.push_interval_s,
            stall_timeout_s=self._stall_timeout_s,
            application=self._app_name,
        )

    async def _call(self, method: str, *args: object) -> Any:
        try:
            async with asyncio.timeout(_ANSWER_WITHIN_S):
                if self._actor is None:
                    # A blocking call to Ray's control service.
                    self._actor = await asyncio.to_thread(self._connect)
                return await getattr(self._actor, method).remote(*args)
        except (RayError, TimeoutError, ValueError) as error:
            self._actor = None
            raise StatsUnavailable(f"{self._config.actor_name}: {error!r}") from error


def _end_this_actor() -> None:
    ray.kill(ray.get_runtime_context().current_actor, no_restart=True)
