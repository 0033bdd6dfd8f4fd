"""Custom kinds as strict models: the fields in use, and the rules of their operators.

KubeRay's RayService with its operator's rules, and the Prometheus operator's PodMonitor. The
operators' own schemas take over a megabyte of YAML. A field that is not here is refused.
"""

from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator
from ray.serve.schema import ServeDeploySchema

from serve_spec.serving.deployment.plan import check_deployment


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ObjectMeta(Strict):
    # A Service is named after it: DNS-1035, and room for the operator's suffixes.
    name: str = Field(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=41)
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class AutoscalerOptions(Strict):
    version: Literal["v1", "v2"] = "v2"
    upscalingMode: Literal["Default", "Aggressive", "Conservative"] | None = None
    idleTimeoutSeconds: int | None = None


class SecretKey(Strict):
    name: str
    key: str


class GcsFaultTolerance(Strict):
    redisAddress: str = Field(pattern=r"^(rediss?://)?[-a-z0-9.]+:\d+$")
    # KubeRay would take it in the open, too.
    redisPassword: dict[Literal["valueFrom"], dict[Literal["secretKeyRef"], SecretKey]]


class PodTemplate(Strict):
    metadata: dict[str, Any] = {}
    spec: dict[str, Any]

    @property
    def container(self):
        return self.spec["containers"][0]

    @property
    def ports(self):
        return {port["name"]: port["containerPort"] for port in self.container.get("ports", [])}

    @property
    def env(self):
        return {each["name"]: each.get("value") for each in self.container.get("env", [])}

    @property
    def labels(self):
        return self.metadata.get("labels", {})

    @property
    def mounts(self):
        volumes = {volume["name"]: volume for volume in self.spec.get("volumes", [])}
        mounts = self.container.get("volumeMounts", [])
        return {mount["mountPath"]: {**volumes[mount["name"]], **mount} for mount in mounts}


class Group(Strict):
    template: PodTemplate
    rayStartParams: dict[str, str]

    @model_validator(mode="after")
    def _a_password_is_no_start_parameter(self):
        assert "redis-password" not in self.rayStartParams, "use gcsFaultToleranceOptions"
        return self


class WorkerGroup(Group):
    groupName: str
    replicas: int = Field(ge=0)
    minReplicas: int = Field(ge=0)
    maxReplicas: int

    @model_validator(mode="after")
    def _replicas_are_within_bounds(self):
        assert self.minReplicas <= self.replicas <= self.maxReplicas
        return self


class RayCluster(Strict):
    rayVersion: str
    headGroupSpec: Group
    workerGroupSpecs: list[WorkerGroup]
    enableInTreeAutoscaling: bool = False
    autoscalerOptions: AutoscalerOptions | None = None
    authOptions: dict[Literal["mode"], Literal["token", "disabled"]] | None = Field(
        None, min_length=1
    )
    gcsFaultToleranceOptions: GcsFaultTolerance | None = None

    @property
    def groups(self):
        yield self.headGroupSpec
        yield from self.workerGroupSpecs

    @property
    def pod_labels(self):
        for group in self.groups:
            node_type = "head" if group is self.headGroupSpec else "worker"
            own = {"ray.io/is-ray-node": "yes", "ray.io/node-type": node_type}
            yield {**group.template.labels, **own}

    @model_validator(mode="after")
    def _the_operator_would_accept_it(self):
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


class ClusterUpgradeOptions(Strict):
    gatewayClassName: str = Field(min_length=1)
    maxSurgePercent: int = Field(100, ge=0, le=100)
    stepSizePercent: int = Field(ge=0, le=100)
    intervalSeconds: int = Field(gt=0)

    @model_validator(mode="after")
    def _a_step_of_traffic_has_replicas(self):
        assert self.stepSizePercent <= self.maxSurgePercent
        return self


class UpgradeStrategy(Strict):
    type: Literal["NewCluster", "NewClusterWithIncrementalUpgrade", "None"]
    clusterUpgradeOptions: ClusterUpgradeOptions | None = None

    @model_validator(mode="after")
    def _options_are_for_steps(self):
        by_steps = self.type == "NewClusterWithIncrementalUpgrade"
        assert by_steps == (self.clusterUpgradeOptions is not None)
        return self


class RayServiceSpec(Strict):
    serveConfigV2: str
    rayClusterConfig: RayCluster
    upgradeStrategy: UpgradeStrategy | None = None
    excludeHeadPodFromServeSvc: bool | None = None
    rayClusterDeletionDelaySeconds: int | None = Field(None, ge=0)

    @property
    def serve_config(self):
        return yaml.safe_load(self.serveConfigV2)

    @property
    def deployment(self):
        return ServeDeploySchema.model_validate(self.serve_config)

    @model_validator(mode="after")
    def _an_upgrade_by_steps_has_an_autoscaler(self):
        strategy = self.upgradeStrategy
        if strategy is not None and strategy.clusterUpgradeOptions is not None:
            assert self.rayClusterConfig.enableInTreeAutoscaling
        return self

    @model_validator(mode="after")
    def _ray_serve_would_take_the_application(self):
        check_deployment(self.serve_config)
        return self


class RayService(Strict):
    apiVersion: Literal["ray.io/v1"]
    kind: Literal["RayService"]
    metadata: ObjectMeta
    spec: RayServiceSpec

    @model_validator(mode="after")
    def _fault_tolerance_has_no_annotation(self):
        assert "ray.io/ft-enabled" not in self.metadata.annotations, "use gcsFaultToleranceOptions"
        return self


class Relabelling(Strict):
    sourceLabels: list[str]
    regex: str
    targetLabel: str
    replacement: str


class PodMetricsEndpoint(Strict):
    port: str
    interval: str = Field(pattern=r"^\d+s$")
    metricRelabelings: list[Relabelling] = []


Labels = Annotated[dict[str, str], Field(min_length=1)]


class PodMonitorSpec(Strict):
    selector: dict[Literal["matchLabels"], Labels] = Field(min_length=1)
    podMetricsEndpoints: list[PodMetricsEndpoint] = Field(min_length=1)


class PodMonitor(Strict):
    apiVersion: Literal["monitoring.coreos.com/v1"]
    kind: Literal["PodMonitor"]
    metadata: ObjectMeta
    spec: PodMonitorSpec


class AlertingRule(Strict):
    alert: str
    expr: str
    duration: str = Field(alias="for", pattern=r"^\d+[smh]$")
    labels: Labels
    annotations: Labels


class RuleGroup(Strict):
    name: str
    rules: list[AlertingRule] = Field(min_length=1)


class PrometheusRuleSpec(Strict):
    groups: list[RuleGroup] = Field(min_length=1)


class PrometheusRule(Strict):
    apiVersion: Literal["monitoring.coreos.com/v1"]
    kind: Literal["PrometheusRule"]
    metadata: ObjectMeta
    spec: PrometheusRuleSpec
