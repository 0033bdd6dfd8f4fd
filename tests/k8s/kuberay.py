"""KubeRay's RayService as strict models: the fields we use, and the operator's own rules.

Not the operator's schema, which is over a megabyte of somebody else's YAML: a field that is not
here is a field nobody has checked, and is refused until it is added.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator
from ray.serve.schema import ServeDeploySchema

from serve_spec.serving.deploy_file import check_deployment


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ObjectMeta(Strict):
    # A Service is named after it: DNS-1035, and room for the operator's suffixes.
    name: str = Field(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=41)
    namespace: str | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class ClusterUpgradeOptions(Strict):
    gatewayClassName: str
    stepSizePercent: int = Field(ge=0, le=100)
    intervalSeconds: int = Field(gt=0)
    maxSurgePercent: int = Field(100, ge=0, le=100)


class UpgradeStrategy(Strict):
    type: Literal["NewCluster", "None", "NewClusterWithIncrementalUpgrade"]
    clusterUpgradeOptions: ClusterUpgradeOptions | None = None


class AutoscalerOptions(Strict):
    version: Literal["v1", "v2"] = "v2"
    upscalingMode: Literal["Default", "Aggressive", "Conservative"] | None = None
    idleTimeoutSeconds: int | None = None


class AuthOptions(Strict):
    mode: Literal["token", "disabled"]


class PodTemplate(Strict):
    metadata: dict[str, Any] = {}
    spec: dict[str, Any]

    @property
    def container(self) -> dict[str, Any]:
        """The first container: the one that runs Ray."""
        first: dict[str, Any] = self.spec["containers"][0]
        return first

    @property
    def ports(self) -> set[str]:
        return {port["name"] for port in self.container.get("ports", [])}


class Group(Strict):
    template: PodTemplate
    rayStartParams: dict[str, str]
    resources: dict[str, str] | None = None
    labels: dict[str, str] | None = None

    @model_validator(mode="after")
    def _resources_are_said_once(self) -> Self:
        numbers = {"num-cpus", "num-gpus", "memory", "resources"} & set(self.rayStartParams)
        assert not (numbers and self.resources), "resources and rayStartParams exclude each other"
        assert "labels" not in self.rayStartParams, "labels go into `labels`"
        return self


class WorkerGroup(Group):
    groupName: str
    replicas: int = Field(ge=0)
    minReplicas: int = Field(ge=0)
    maxReplicas: int
    numOfHosts: int = 1
    idleTimeoutSeconds: int | None = None

    @model_validator(mode="after")
    def _replicas_are_within_bounds(self) -> Self:
        assert self.minReplicas <= self.replicas <= self.maxReplicas
        return self


class RayCluster(Strict):
    rayVersion: str
    headGroupSpec: Group
    workerGroupSpecs: list[WorkerGroup]
    enableInTreeAutoscaling: bool = False
    autoscalerOptions: AutoscalerOptions | None = None
    authOptions: AuthOptions | None = None

    @property
    def groups(self) -> Iterator[Group]:
        yield self.headGroupSpec
        yield from self.workerGroupSpecs

    @model_validator(mode="after")
    def _the_operator_would_accept_it(self) -> Self:
        if self.authOptions is not None and self.authOptions.mode == "token":
            version = tuple(int(n) for n in re.findall(r"\d+", self.rayVersion))
            assert version >= (2, 52), "token authentication needs Ray 2.52"
        if self.autoscalerOptions is not None and self.autoscalerOptions.version == "v2":
            for group in self.groups:
                policy = group.template.spec.get("restartPolicy", "Never")
                assert policy == "Never", "autoscaler v2 replaces pods, it does not restart them"
        env = {e["name"] for e in self.headGroupSpec.template.container.get("env", [])}
        assert not env & {"RAY_REDIS_ADDRESS", "REDIS_PASSWORD"}, "use gcsFaultToleranceOptions"
        return self


class RayServiceSpec(Strict):
    serveConfigV2: str
    rayClusterConfig: RayCluster
    upgradeStrategy: UpgradeStrategy | None = None
    excludeHeadPodFromServeSvc: bool | None = None
    rayClusterDeletionDelaySeconds: int | None = Field(None, ge=0)
    serveService: dict[str, Any] | None = None
    suspend: bool | None = None

    @property
    def serve_config(self) -> dict[str, Any]:
        loaded: dict[str, Any] = yaml.safe_load(self.serveConfigV2)
        return loaded

    @property
    def deployment(self) -> ServeDeploySchema:
        return ServeDeploySchema.model_validate(self.serve_config)

    @model_validator(mode="after")
    def _the_pieces_fit(self) -> Self:
        check_deployment(self.serve_config)
        strategy = self.upgradeStrategy
        if strategy is not None and strategy.type == "NewClusterWithIncrementalUpgrade":
            assert self.rayClusterConfig.enableInTreeAutoscaling, "it shrinks the old cluster"
            assert strategy.clusterUpgradeOptions is not None
        return self


class RayService(Strict):
    apiVersion: Literal["ray.io/v1"]
    kind: Literal["RayService"]
    metadata: ObjectMeta
    spec: RayServiceSpec
