"""The manifests are right as far as that can be known without a cluster."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import ray
import yaml
from pydantic import ValidationError
from ray._common.utils import import_attr

import serve_spec
from serve_spec.config import ServeSpecConfig, base
from serve_spec.serving.app import load_config
from tests.k8s.kuberay import Group, RayService

ROOT = Path(__file__).parents[2]
KUBERNETES = "1.33"
# Where Dockerfile.cpu puts the checkout.
IMAGE_ROOT = "/app/"

RAY_SERVICES = [
    document
    for file in sorted((ROOT / "k8s").rglob("*.yaml"))
    for document in yaml.safe_load_all(file.read_text())
    if document and document["kind"] == "RayService"
]


def pod(name: str, group: Group) -> dict[str, Any]:
    """The pod that the operator makes from a template, as far as the template says."""
    metadata = {**group.template.metadata, "name": name}
    spec = copy.deepcopy(group.template.spec)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


@pytest.fixture(params=RAY_SERVICES, ids=lambda d: d["metadata"]["name"])
def document(request: pytest.FixtureRequest) -> dict[str, Any]:
    return copy.deepcopy(request.param)  # type: ignore[no-any-return]


@pytest.fixture
def service(document: dict[str, Any]) -> RayService:
    return RayService.model_validate(document)


@pytest.fixture
def config(service: RayService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServeSpecConfig:
    """The configuration that the application runs with, read from this checkout."""
    for name in ("tiny/target", "tiny/eagle3"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setattr(base, "ASSETS", tmp_path)
    (app,) = service.spec.serve_config["applications"]
    path = app["args"]["config"]
    assert path.startswith(IMAGE_ROOT)
    return load_config({**app["args"], "config": str(ROOT / path.removeprefix(IMAGE_ROOT))})


def test_there_is_a_ray_service_to_check() -> None:
    assert RAY_SERVICES


def test_every_pod_template_is_a_valid_pod(service: RayService) -> None:
    for number, group in enumerate(service.spec.rayClusterConfig.groups):
        kubernetes_validate.validate(pod(f"group-{number}", group), KUBERNETES, strict=True)


def test_the_application_is_the_one_that_runs_without_kubernetes(service: RayService) -> None:
    (there,) = service.spec.serve_config["applications"]
    (here,) = yaml.safe_load((ROOT / "deploy/tiny.yaml").read_text())["applications"]
    there["args"]["config"] = there["args"]["config"].removeprefix(IMAGE_ROOT)
    assert there == here
    assert callable(import_attr(there["import_path"]))


def test_versions_agree_with_the_package_and_its_ray(service: RayService) -> None:
    cluster = service.spec.rayClusterConfig
    assert cluster.rayVersion == ray.__version__
    for group in cluster.groups:
        assert group.template.container["image"].endswith(
            f"serve-spec:{serve_spec.__version__}-cpu"
        )


def test_every_replica_fits_a_worker_and_every_worker_gets_one(
    service: RayService, config: ServeSpecConfig
) -> None:
    (workers,) = service.spec.rayClusterConfig.workerGroupSpecs
    resources = workers.template.container["resources"]
    assert float(resources["requests"]["cpu"]) >= config.replica.num_cpus
    assert workers.maxReplicas <= config.replica.num_replicas, "idle workers are never ready"


def test_pods_outlive_the_streams_they_drain(service: RayService, config: ServeSpecConfig) -> None:
    for group in service.spec.rayClusterConfig.workerGroupSpecs:
        grace_s = group.template.spec["terminationGracePeriodSeconds"]
        assert grace_s > config.replica.graceful_shutdown_timeout_s


def test_every_pod_can_be_reached_and_scraped(service: RayService) -> None:
    (port,) = {service.spec.deployment.http_options.port}
    for group in service.spec.rayClusterConfig.groups:
        assert group.template.ports >= {"serve", "metrics"}
        serve_ports = [p for p in group.template.container["ports"] if p["name"] == "serve"]
        assert [p["containerPort"] for p in serve_ports] == [port]
    assert service.spec.deployment.http_options.host == "0.0.0.0"


def spoil_serve_config(old: str, new: str) -> Callable[[dict[str, Any]], None]:
    def spoil(document: dict[str, Any]) -> None:
        text = document["spec"]["serveConfigV2"]
        assert old in text
        document["spec"]["serveConfigV2"] = text.replace(old, new)

    return spoil


@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: d["spec"]["rayClusterConfig"].update(workerGroupSpec=[]),
        lambda d: d["spec"].update(upgradeStrategy={"type": "Rolling"}),
        lambda d: d["spec"].update(upgradeStrategy={"type": "NewClusterWithIncrementalUpgrade"}),
        lambda d: d["spec"]["rayClusterConfig"]["headGroupSpec"].update(resources={"CPU": "0"}),
        lambda d: d["spec"]["rayClusterConfig"]["workerGroupSpecs"][0].update(replicas=2),
        lambda d: d["spec"]["rayClusterConfig"].update(rayVersion="2.51.0"),
        lambda d: d["metadata"].update(name="Serve_Spec"),
        spoil_serve_config("http_options", "http_option"),
        spoil_serve_config("port: 8000", "port: many"),
        spoil_serve_config("import_path", "importpath"),
    ],
)
def test_what_the_operator_or_serve_would_misread_is_refused(
    document: dict[str, Any], spoil: Callable[[dict[str, Any]], None]
) -> None:
    spoil(document)
    with pytest.raises(ValidationError):
        RayService.model_validate(document)


def test_a_pod_template_with_an_unknown_field_is_refused(service: RayService) -> None:
    group = service.spec.rayClusterConfig.headGroupSpec
    group.template.container["resource"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(pod("spoilt", group), KUBERNETES, strict=True)


@pytest.mark.parametrize("dockerfile", sorted((ROOT / "deploy").glob("Dockerfile*")), ids=str)
def test_an_image_copies_only_what_exists_and_starts_what_exists(dockerfile: Path) -> None:
    text = dockerfile.read_text()
    for sources in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE):
        for source in sources.split():
            assert (ROOT / source).exists(), f"COPY {source}"
    (command,) = re.findall(r"^CMD (\[.+\])$", text, re.MULTILINE)
    program, subcommand, file, *_ = yaml.safe_load(command)
    assert (program, subcommand) == ("serve-spec", "serve")
    assert (ROOT / file).is_file()
    assert f"WORKDIR {IMAGE_ROOT.rstrip('/')}" in text
