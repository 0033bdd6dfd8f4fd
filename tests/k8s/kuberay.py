"""Custom kinds as strict models: the fields we use, and the rules of who reads them.

KubeRay's RayService with its operator's rules, and the Prometheus operator's PodMonitor. Not the
operators' schemas, which are over a megabyte of somebody else's YAML: a field that is not here is a
field nobody has checked, and is refused until it is added.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator
from ray.serve.schema import ServeDeploySchema

from serve_spec.serving.command import check_deployment


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ObjectMeta(Strict):
    # A Service is named after it: DNS-1035, and room for the operator's suffixes.
    name: str = Field(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=41)
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class UpgradeStrategy(Strict):
    type: Literal["NewCluster", "None"]


class AutoscalerOptions(Strict):
    version: Literal["v1", "v2"] = "v2"
    upscalingMode: Literal["Default", "Aggressive", "Conservative"] | None = None
    idleTimeoutSeconds: int | None = None


class AuthOptions(Strict):
    mode: Literal["token", "disabled"]


class SecretKey(Strict):
    name: str
    key: str


class Credential(Strict):
    """A password; KubeRay would take it in the open, too."""

    valueFrom: dict[Literal["secretKeyRef"], SecretKey]


class GcsFaultTolerance(Strict):
    redisAddress: str = Field(pattern=r"^(rediss?://)?[-a-z0-9.]+:\d+$")
    redisPassword: Credential


class PodTemplate(Strict):
    metadata: dict[str, Any] = {}
    spec: dict[str, Any]

    @property
    def container(self) -> dict[str, Any]:
        """The first container: the one that runs Ray."""
        first: dict[str, Any] = self.spec["containers"][0]
        return first

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container.get("ports", [])}

    @property
    def env(self) -> dict[str, Any]:
        return {entry["name"]: entry.get("value") for entry in self.container.get("env", [])}

    @property
    def labels(self) -> dict[str, str]:
        labels: dict[str, str] = self.metadata.get("labels", {})
        return labels

    @property
    def mounts(self) -> dict[str, dict[str, Any]]:
        """The volumes of the first container by the path they are mounted at."""
        volumes = {volume["name"]: volume for volume in self.spec.get("volumes", [])}
        mounts = self.container.get("volumeMounts", [])
        return {mount["mountPath"]: {**volumes[mount["name"]], **mount} for mount in mounts}


class Group(Strict):
    template: PodTemplate
    rayStartParams: dict[str, str]

    @model_validator(mode="after")
    def _a_password_is_no_start_parameter(self) -> Self:
        assert "redis-password" not in self.rayStartParams, "use gcsFaultToleranceOptions"
        return self


class WorkerGroup(Group):
    groupName: str
    replicas: int = Field(ge=0)
    minReplicas: int = Field(ge=0)
    maxReplicas: int

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
    gcsFaultToleranceOptions: GcsFaultTolerance | None = None

    @property
    def groups(self) -> Iterator[Group]:
        yield self.headGroupSpec
        yield from self.workerGroupSpecs

    @property
    def pod_labels(self) -> Iterator[dict[str, str]]:
        """The labels of the head's pod, then those of each worker group's, the operator's among
        them."""
        for group in self.groups:
            node_type = "head" if group is self.headGroupSpec else "worker"
            own = {"ray.io/is-ray-node": "yes", "ray.io/node-type": node_type}
            yield {**group.template.labels, **own}

    @model_validator(mode="after")
    def _the_operator_would_accept_it(self) -> Self:
        if self.autoscalerOptions is not None and self.autoscalerOptions.version == "v2":
            for group in self.groups:
                policy = group.template.spec.get("restartPolicy", "Never")
                assert policy == "Never", "autoscaler v2 replaces pods, it does not restart them"
        if self.autoscalerOptions is not None:
            assert self.enableInTreeAutoscaling, "options of an autoscaler that does not run"
        for group in self.groups:
            by_hand = {"RAY_REDIS_ADDRESS", "REDIS_PASSWORD", "RAY_external_storage_namespace"}
            assert not by_hand & set(group.template.env), "use gcsFaultToleranceOptions"
        return self


class RayServiceSpec(Strict):
    serveConfigV2: str
    rayClusterConfig: RayCluster
    upgradeStrategy: UpgradeStrategy | None = None
    excludeHeadPodFromServeSvc: bool | None = None
    rayClusterDeletionDelaySeconds: int | None = Field(None, ge=0)

    @property
    def serve_config(self) -> dict[str, Any]:
        loaded: dict[str, Any] = yaml.safe_load(self.serveConfigV2)
        return loaded

    @property
    def deployment(self) -> ServeDeploySchema:
        return ServeDeploySchema.model_validate(self.serve_config)

    @model_validator(mode="after")
    def _ray_serve_would_take_the_application(self) -> Self:
        check_deployment(self.serve_config)
        return self


class RayService(Strict):
    apiVersion: Literal["ray.io/v1"]
    kind: Literal["RayService"]
    metadata: ObjectMeta
    spec: RayServiceSpec

    @model_validator(mode="after")
    def _fault_tolerance_is_said_once(self) -> Self:
        assert "ray.io/ft-enabled" not in self.metadata.annotations, "use gcsFaultToleranceOptions"
        return self


class PodMetricsEndpoint(Strict):
    port: str
    interval: str = Field(pattern=r"^\d+s$")


class LabelSelector(Strict):
    matchLabels: dict[str, str] = Field(min_length=1)


class PodMonitorSpec(Strict):
    selector: LabelSelector
    podMetricsEndpoints: list[PodMetricsEndpoint] = Field(min_length=1)


class PodMonitor(Strict):
    apiVersion: Literal["monitoring.coreos.com/v1"]
    kind: Literal["PodMonitor"]
    metadata: ObjectMeta
    spec: PodMonitorSpec
