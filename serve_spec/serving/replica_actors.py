"""Serve's actors behind the replicas of a deployment: whether they live, answer, and their end."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import RayError
from ray.serve._private.common import DeploymentID, ReplicaID

from serve_spec.log import get_logger

logger = get_logger(__name__)

_SERVE_NAMESPACE = "serve"


class ReplicaActors:
    """Actors of one deployment by the unique ids of its replicas. Every method may block."""

    def __init__(self, app_name: str, deployment: str) -> None:
        self._deployment = DeploymentID(name=deployment, app_name=app_name)

    def is_there(self, replica: str) -> bool:
        """Return whether a replica lives; true where Ray does not know at the moment."""
        try:
            self._actor(replica)
        except ValueError:  # Ray knows: there is no such actor
            return False
        except RayError as error:
            logger.info("replica %s: unknown whether it lives: %r", replica, error)
        return True

    def answers(self, replica: str, within_s: float) -> bool:
        """Return whether a replica passes its health check within so many seconds."""
        try:
            ray.get(self._actor(replica).check_health.remote(), timeout=within_s)
        except (RayError, ValueError, TimeoutError, RuntimeError):
            return False
        return True

    def kill(self, replica: str) -> None:
        """End a replica's process; harmless if it is gone."""
        try:
            ray.kill(self._actor(replica))
        except (RayError, ValueError) as error:
            logger.info("replica %s: not ended: %r", replica, error)

    def _actor(self, replica: str) -> Any:
        name = ReplicaID(unique_id=replica, deployment_id=self._deployment).to_full_id_str()
        return ray.get_actor(name, namespace=_SERVE_NAMESPACE)
