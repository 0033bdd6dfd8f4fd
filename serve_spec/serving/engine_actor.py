"""The engine of a replica and its other ranks: actors in the replica's placement group.

Rank r is in bundle r, and the replica itself in bundle 0, beside rank 0, which is its engine.

Ray only hosts them. Requests, tokens and plans go over sockets (`parallel/channel.py` between
ranks), because a Ray call in every step would cost more than the step; each end also notices there
that the other one is gone.
"""

from __future__ import annotations

import logging
import os
import pkgutil
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Client, Listener
from secrets import token_hex
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from serve_spec.config import ConfigError, ServeSpecConfig
from serve_spec.engine.client import EngineClient
from serve_spec.log import get_logger

_KILL_S = 10.0
"""Seconds in which Ray ends an actor that it is told to kill."""


def placement_of(config: ServeSpecConfig) -> dict[str, Any]:
    """Return what a replica reserves, as options of its deployment: a bundle for each rank.

    Raises:
        ConfigError: ranks would have to share a GPU, or reserve nothing.
    """
    replica, size = config.replica, config.model.tensor_parallel_size
    if size > 1 and replica.num_gpus not in (0, size):
        raise ConfigError(
            f"num_gpus={replica.num_gpus:g}: tensor_parallel_size={size} ranks need a GPU each; "
            f"set num_gpus to {size} (or 0, for ranks on CPUs)"
        )
    if replica.num_cpus == replica.num_gpus == 0:
        raise ConfigError(
            f"num_cpus=0: each of tensor_parallel_size={size} ranks has to reserve something; "
            "raise num_cpus"
        )
    bundle = {"CPU": replica.num_cpus / size, "GPU": replica.num_gpus / size}
    return {
        "ray_actor_options": {"num_cpus": 0, "num_gpus": 0},  # all is for the ranks
        "placement_group_bundles": [{k: v for k, v in bundle.items() if v} for _ in range(size)],
        "placement_group_strategy": replica.placement_group_strategy,
    }


def rank_options(config: ServeSpecConfig, rank: int) -> dict[str, Any]:
    """Return options of the actor of a rank, in the placement group of this process."""
    size = config.model.tensor_parallel_size
    group = get_current_placement_group()
    assert group is not None, "a replica has a placement group"
    return {
        "num_cpus": config.replica.num_cpus / size,
        "num_gpus": config.replica.num_gpus / size,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, rank),
    }


class ActorLauncher:
    """Puts the followers of rank 0, in whose process it is made, into the placement group."""

    def __init__(self, config: ServeSpecConfig) -> None:
        self._config = config
        # The ranks may be on other nodes, unless one node is what was asked for.
        is_one_host = config.replica.placement_group_strategy == "STRICT_PACK"
        self.host = "127.0.0.1" if is_one_host else self._node_ip()

    @staticmethod
    def _node_ip() -> str:
        return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]

    def start(
        self, module: str, settings: object, rank: int, size: int, address: object
    ) -> FollowerActor:
        """See `parallel.launch.Launcher`."""
        actor = _Follower.options(**rank_options(self._config, rank)).remote()  # type: ignore[attr-defined]
        return FollowerActor(actor, actor.follow.remote(module, settings, rank, size, address))


class FollowerActor:
    """A follower that runs in an actor. See `parallel.worker_ranks.Process`."""

    def __init__(self, actor: Any, life: Any) -> None:
        self._actor = actor
        # A future, for it can be looked at from any thread, those of an event loop included.
        self._life: Future[None] = life.future()

    def exit_reason(self, within_s: float = 0.0) -> str | None:
        """See `Process`."""
        try:
            self._life.result(within_s)
        except TimeoutError:
            return None
        except RayError as error:
            return f"ended: {_first_line(error)}"
        return "ended"

    def kill(self) -> None:
        """See `Process`."""
        ray.kill(self._actor)
        with suppress(RayError, TimeoutError):
            self._life.result(_KILL_S)


@ray.remote(max_restarts=0, max_task_retries=0)
class _Follower:
    """A process that obeys rank 0 for as long as it lives."""

    def __init__(self) -> None:
        os.environ["TQDM_DISABLE"] = "1"  # progress is rank 0's to show

    def follow(self, module: str, *arguments: Any) -> None:
        """Run `module.follow(*arguments)` to its end."""
        follow: Callable[..., None] = import_module(module).follow
        try:
            follow(*arguments)
        except Exception:
            logging.getLogger(__name__).exception("this rank has failed")
            raise


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


logger = get_logger(__name__)

BUILD_ENGINE = "serve_spec.engine.build:build_engine"


def start_engine(config: ServeSpecConfig, build: str = BUILD_ENGINE) -> EngineProcess:
    """Start the engine of the replica that this process is; return when it is ready.

    build: import path of a function like `build_engine`.

    Raises:
        Exception: what `build` raises, for example CheckpointError.
        RayError: the process cannot start, or has died.
    """
    actor = Engine.options(**rank_options(config, 0)).remote()  # type: ignore[attr-defined]
    # Futures, because this thread may be the one of an event loop, where `ray.get` warns.
    address, secret = actor.listen.remote().future().result()
    life = actor.serve.remote(build, config)
    with suppress(EOFError, OSError):  # how the method ended says more
        return EngineProcess(config, actor, Client(address, authkey=secret))
    try:
        life.future().result()
    except RayTaskError as error:
        raise error.cause from None  # as it was raised there; the log has the traceback
    raise RuntimeError("the engine's process ended before it was ready")


class EngineProcess(EngineClient):
    """A client that ends the process of its engine with it."""

    def __init__(self, config: ServeSpecConfig, actor: Any, connection: Any) -> None:
        super().__init__(config, connection)
        self._actor = actor

    def shutdown(self) -> None:
        """See `EngineClient`."""
        super().shutdown()
        ray.kill(self._actor)


@ray.remote(max_restarts=0, max_task_retries=0)
class Engine:
    """The process of an engine: owns its GPU, and ends when the replica does."""

    def listen(self) -> tuple[str, bytes]:
        """Return where the replica calls, and the key that both ends prove to know."""
        # An abstract address is no file that would have to be removed.
        address, secret = f"\0serve_spec-{os.getpid()}-{token_hex(8)}", os.urandom(32)
        self._listener = Listener(address, "AF_UNIX", authkey=secret)
        return address, secret

    def serve(self, build: str, config: ServeSpecConfig) -> None:
        """Build the engine and run it for the replica, to its end."""
        # Imported here: router and builder do without torch.
        from serve_spec.engine.server import EngineServer

        with self._listener:
            connection = self._listener.accept()
        launcher = ActorLauncher(config) if config.model.tensor_parallel_size > 1 else None
        try:
            with connection:
                engine = pkgutil.resolve_name(build)(config, launcher)
                EngineServer(config, engine, connection, on_lost=_end_process).run()
        except Exception:
            logger.exception("the engine cannot start")
            raise


def _end_process() -> None:
    """End at once, whatever a step waits for."""
    os._exit(1)
