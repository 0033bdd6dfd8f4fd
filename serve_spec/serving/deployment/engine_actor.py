"""Ray actors of a replica's ranks, in the replica's placement group.

Rank r is in bundle r. The replica itself is in bundle 0, beside rank 0, which is its engine.

Ray only hosts them. Requests, tokens and plans go over sockets (`parallel/channel.py` between
ranks), because a Ray call in every step would cost more than the step; each end also notices there
that the other one is gone.
"""

from __future__ import annotations

import logging
import os
import pkgutil
from collections.abc import Callable, Iterable, Mapping
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
"""Maximum seconds for Ray to kill an actor."""
# Ray marks nodes with one unit of their GPU's type.
_ANY_FRACTION = 0.001


def placement_of(config: ServeSpecConfig) -> dict[str, Any]:
    """Return a replica's options, a bundle for each rank; may raise ConfigError."""
    replica, size = config.replica, config.model.tensor_parallel_size
    num_gpus = replica.num_gpus or 0
    if size > 1 and num_gpus not in (0, size):
        raise ConfigError(
            f"num_gpus={num_gpus:g}: tensor_parallel_size={size} ranks need a GPU each; "
            f"set num_gpus to {size} (or 0, for ranks on CPUs)"
        )
    if replica.num_cpus == num_gpus == 0:
        raise ConfigError(
            f"num_cpus=0: each of tensor_parallel_size={size} ranks has to reserve something; "
            "raise num_cpus"
        )
    bundle = {"CPU": replica.num_cpus / size, "GPU": num_gpus / size}
    if replica.accelerator_type is not None:
        bundle[f"accelerator_type:{replica.accelerator_type}"] = _ANY_FRACTION
    return {
        "ray_actor_options": {"num_cpus": 0, "num_gpus": 0},  # reserved by the ranks
        "placement_group_bundles": [{k: v for k, v in bundle.items() if v} for _ in range(size)],
        "placement_group_strategy": replica.placement_group_strategy,
    }


def why_unplaced(config: ServeSpecConfig, nodes: Iterable[Mapping[str, float]]) -> str | None:
    """Return why a replica waits for a node; None if there is one for it, or for each rank.

    nodes: the resources of each node of a Ray.
    """
    options, replica = placement_of(config), config.replica
    bundles: list[dict[str, float]] = options["placement_group_bundles"]
    on_one_node = bundles if options["placement_group_strategy"] == "STRICT_PACK" else bundles[:1]
    needed = {name: amount * len(on_one_node) for name, amount in bundles[0].items()}
    if any(all(node.get(name, 0) >= needed[name] for name in needed) for node in nodes):
        return None
    size, fix = config.model.tensor_parallel_size, "add one, or lower them"
    if len(on_one_node) > 1:
        fix = "add one, lower them, or set placement_group_strategy='PACK' for ranks on any nodes"
    whose = "a replica" if len(on_one_node) == size else f"one of {size} ranks"
    needs = ", ".join(f"{name} {amount:g}" for name, amount in needed.items())
    return (
        f"num_cpus={replica.num_cpus:g}, num_gpus={replica.num_gpus or 0:g}: {whose} needs a node "
        f"with {needs}, and waits, for there is none; {fix}"
    )


def rank_options(config: ServeSpecConfig, rank: int) -> dict[str, Any]:
    """Return the actor options of a rank in this process's placement group."""
    size = config.model.tensor_parallel_size
    group = get_current_placement_group()
    assert group is not None, "a replica has a placement group"
    return {
        "num_cpus": config.replica.num_cpus / size,
        "num_gpus": (config.replica.num_gpus or 0) / size,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, rank),
    }


class ActorLauncher:
    """Starts the other ranks as actors in the placement group; made in the process of rank 0."""

    def __init__(self, config: ServeSpecConfig) -> None:
        self._config = config
        # Ranks may be on other nodes unless STRICT_PACK is set.
        is_one_host = config.replica.placement_group_strategy == "STRICT_PACK"
        self.host = "127.0.0.1"
        if not is_one_host:
            self.host = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]

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
        # A future can be read from any thread, including that of an event loop.
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
    """The process of a worker rank, which runs the steps of rank 0."""

    def __init__(self) -> None:
        os.environ["TQDM_DISABLE"] = "1"  # rank 0 shows the progress

    def follow(self, module: str, *arguments: Any) -> None:
        """Run `module.follow(*arguments)` until it returns."""
        follow: Callable[..., None] = import_module(module).follow
        try:
            follow(*arguments)
        except Exception:
            logging.getLogger(__name__).exception("this rank failed")
            raise


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


logger = get_logger(__name__)

BUILD_ENGINE = "serve_spec.engine.build:build_engine"


def start_engine(config: ServeSpecConfig, build: str = BUILD_ENGINE) -> EngineProcess:
    """Start the engine of this replica; return when it is ready.

    build: import path of a function like `build_engine`; its exceptions are raised here. RayError:
    the process cannot start, or has died.
    """
    actor = Engine.options(**rank_options(config, 0)).remote()  # type: ignore[attr-defined]
    # Futures, because `ray.get` warns in a thread with an event loop.
    address, secret = actor.listen.remote().future().result()
    life = actor.serve.remote(build, config)
    with suppress(EOFError, OSError):  # the result of `serve` holds the cause
        return EngineProcess(config, actor, Client(address, authkey=secret))
    try:
        life.future().result()
    except RayTaskError as error:
        raise error.cause from None  # the original exception; its traceback is in the log
    raise RuntimeError("the engine's process ended before it was ready")


class EngineProcess(EngineClient):
    """A client that also kills the engine's process on shutdown."""

    def __init__(self, config: ServeSpecConfig, actor: Any, connection: Any) -> None:
        super().__init__(config, connection)
        self._actor = actor

    def shutdown(self) -> None:
        """See `EngineClient`."""
        super().shutdown()
        ray.kill(self._actor)


@ray.remote(max_restarts=0, max_task_retries=0)
class Engine:
    """The process of an engine. It owns the GPU and ends with the replica."""

    def listen(self) -> tuple[str, bytes]:
        """Return the address for the replica and the key that authenticates both ends."""
        # An abstract address leaves no file behind.
        address, secret = f"\0serve_spec-{os.getpid()}-{token_hex(8)}", os.urandom(32)
        self._listener = Listener(address, "AF_UNIX", authkey=secret)
        return address, secret

    def serve(self, build: str, config: ServeSpecConfig) -> None:
        """Build the engine and run it until the replica ends."""
        # Imported here because the router and the builder do not need torch.
        from serve_spec.engine.server import EngineServer

        with self._listener:
            connection = self._listener.accept()
        logging.getLogger("serve_spec.progress").setLevel(logging.INFO)
        launcher = ActorLauncher(config) if config.model.tensor_parallel_size > 1 else None
        try:
            with connection:
                engine = pkgutil.resolve_name(build)(config, launcher)
                EngineServer(config, engine, connection, on_lost=end_process).run()
        except Exception:
            logger.exception("the engine cannot start")
            raise


def end_process() -> None:
    """Exit immediately, even while a step hangs."""
    os._exit(1)
