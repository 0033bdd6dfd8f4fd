"""Tensor parallelism under Ray: a replica's followers are actors of its placement group.

Rank 0 is the replica itself, in bundle 0; rank r is an actor in bundle r. Ray only hosts them:
orders, and news of the other end, travel on rank 0's own lines (`parallel/line.py`), for a call of
Ray in every round would cost more than the round.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from importlib import import_module
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from serve_spec.config import ConfigError, ServeSpecConfig

_KILL_S = 10.0
"""Seconds in which Ray ends an actor that it is told to kill."""


def placement_of(config: ServeSpecConfig) -> dict[str, Any]:
    """What a replica reserves, as options of its deployment: for several ranks, a bundle each.

    Raises:
        ConfigError: ranks would have to share a GPU, or reserve nothing.
    """
    replica, size = config.replica, config.model.tensor_parallel_size
    if size == 1:
        return {"ray_actor_options": {"num_cpus": replica.num_cpus, "num_gpus": replica.num_gpus}}
    if replica.num_gpus not in (0, size):
        raise ConfigError(
            f"num_gpus={replica.num_gpus:g}: tensor_parallel_size={size} ranks need a GPU each; "
            f"set num_gpus to {size} (or 0, for ranks on CPUs)"
        )
    if replica.num_cpus == replica.num_gpus == 0:
        raise ConfigError(
            f"num_cpus=0: each of tensor_parallel_size={size} ranks has to reserve something; "
            "raise num_cpus"
        )
    actor = {"num_cpus": replica.num_cpus / size, "num_gpus": replica.num_gpus / size}
    bundle = {"CPU": actor["num_cpus"], "GPU": actor["num_gpus"]}
    return {
        "ray_actor_options": actor,
        "placement_group_bundles": [{k: v for k, v in bundle.items() if v} for _ in range(size)],
        "placement_group_strategy": replica.placement_group_strategy,
    }


class ActorLauncher:
    """Puts a replica's followers into its placement group. To be made by the replica."""

    def __init__(self, config: ServeSpecConfig) -> None:
        group = get_current_placement_group()
        assert group is not None, "a deployment with several ranks has bundles"
        self._group: PlacementGroup = group
        self._options = placement_of(config)["ray_actor_options"]
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
        actor = _Follower.options(  # type: ignore[attr-defined]
            **self._options,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, rank),
        ).remote()
        return FollowerActor(actor, actor.follow.remote(module, settings, rank, size, address))


class FollowerActor:
    """A follower that runs in an actor. See `parallel.followers.Process`."""

    def __init__(self, actor: Any, life: Any) -> None:
        self._actor = actor
        # A future, for it can be looked at from any thread, those of an event loop included.
        self._life: Future[None] = life.future()

    def how_it_ended(self, within_s: float = 0.0) -> str | None:
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
        """Runs `module.follow(*arguments)` to its end."""
        follow: Callable[..., None] = import_module(module).follow
        try:
            follow(*arguments)
        except Exception:
            logging.getLogger(__name__).exception("this rank has failed")
            raise


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
