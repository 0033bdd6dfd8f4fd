"""What KubeRay's operator, its autoscaler or Serve would misread is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kubernetes_validate
import pytest
from pydantic import ValidationError

from tests.k8s.kuberay import RayService
from tests.k8s.kustomize import Document
from tests.k8s.overlays import KUBERNETES, pod, rendered


def spoil_serve_config(old: str, new: str) -> Callable[[Document], None]:
    def spoil(document: Document) -> None:
        text = document["spec"]["serveConfigV2"]
        assert old in text
        document["spec"]["serveConfigV2"] = text.replace(old, new)

    return spoil


def spoil_cluster(**changes: Any) -> Callable[[Document], None]:
    return lambda document: document["spec"]["rayClusterConfig"].update(changes)


def spoil_head(**changes: Any) -> Callable[[Document], None]:
    return lambda document: document["spec"]["rayClusterConfig"]["headGroupSpec"].update(changes)


def spoil_state(**changes: Any) -> Callable[[Document], None]:
    return lambda document: document["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"].update(
        changes
    )


@pytest.fixture
def gpu_service() -> Document:
    (document,) = rendered("gpu").of_kind("RayService")
    return document


@pytest.mark.parametrize(
    "spoil",
    [
        spoil_cluster(workerGroupSpec=[]),
        lambda d: d["spec"].update(upgradeStrategy={"type": "Rolling"}),
        lambda d: d["spec"].update(upgradeStrategy={"type": "NewClusterWithIncrementalUpgrade"}),
        lambda d: d["spec"].update(upgradeStrategy={"type": None}),
        spoil_head(resources={"CPU": "0"}),
        spoil_head(rayStartParams={"redis-password": "x"}),
        lambda d: d["spec"]["rayClusterConfig"]["workerGroupSpecs"][0].update(replicas=5),
        spoil_cluster(rayVersion="2.51.0"),
        spoil_cluster(enableInTreeAutoscaling=False),
        lambda d: d["metadata"].update(name="Serve_Spec"),
        lambda d: d["metadata"]["annotations"].update({"ray.io/ft-enabled": "true"}),
        spoil_state(externalStorageNamespace="shared"),
        spoil_state(redisPassword={"value": "in the open"}),
        spoil_state(redisAddress="redis"),
        spoil_serve_config("http_options", "http_option"),
        spoil_serve_config("port: 8000", "port: many"),
        spoil_serve_config("import_path", "importpath"),
        spoil_serve_config("upscale_delay_s", "upscale_delay"),
        spoil_serve_config("num_replicas: auto", "num_replicas: some"),
        spoil_serve_config("target_ongoing_requests", "target_requests"),
    ],
)
def test_what_the_operator_or_serve_would_misread_is_refused(
    gpu_service: Document, spoil: Callable[[Document], None]
) -> None:
    RayService.model_validate(gpu_service)
    spoil(gpu_service)
    with pytest.raises(ValidationError):
        RayService.model_validate(gpu_service)


def test_a_restarting_pod_is_refused_with_the_autoscaler(gpu_service: Document) -> None:
    head = gpu_service["spec"]["rayClusterConfig"]["headGroupSpec"]
    head["template"]["spec"]["restartPolicy"] = "Always"
    with pytest.raises(ValidationError, match="autoscaler v2"):
        RayService.model_validate(gpu_service)


def test_a_pod_template_with_an_unknown_field_is_refused(gpu_service: Document) -> None:
    group = RayService.model_validate(gpu_service).spec.rayClusterConfig.headGroupSpec
    group.template.container["resource"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(pod("spoilt", group), KUBERNETES, strict=True)
