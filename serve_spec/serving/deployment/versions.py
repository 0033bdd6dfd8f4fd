"""Versions of deployments: Serve restarts the replicas of a deployment if its version changes.

Serve derives the version of all deployments from all arguments of an application, among them the
number of replicas, so that scaling would restart everything.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

import ray
from ray.serve import Deployment
from ray.serve._private.config import DeploymentConfig

import serve_spec


class _OwnVersion(DeploymentConfig):
    """Keeps the version that it was made with."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "version":
            super().__setattr__(name, value)


def versioned(deployment: Deployment, *arguments: str) -> Deployment:
    """Return the deployment with a version of its own.

    It depends on `arguments`, on the runtime environment, which may hold code, and on the code of
    this package; options of the deployment are compared by Serve.
    """
    parts = [*arguments, _runtime_env(), _code()]
    version = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    known = deployment._deployment_config
    fields = {name: getattr(known, name) for name in DeploymentConfig.model_fields}
    deployment._deployment_config = _OwnVersion(**{**fields, "version": version})
    return deployment


def _runtime_env() -> str:
    if not ray.is_initialized():
        return ""
    context = ray.get_runtime_context()
    return str(context.get_runtime_env_string())  # type: ignore[no-untyped-call]


@cache
def _code() -> str:
    package = Path(serve_spec.__file__).parent
    files = sorted(package.rglob("*.py"))
    contents = b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)
    return hashlib.sha256(contents).hexdigest()
