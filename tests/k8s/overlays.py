"""A rendered overlay of `k8s/`, and what it says."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.k8s.kuberay import RayService
from tests.k8s.kustomize import Document, render

ROOT = Path(__file__).parents[2]
KUBERNETES = "1.33"
SERVE_PORT = 8000
USED_BY = {"cpu-demo": "tiny.yaml", "gpu": "four-replicas.yaml", "tp": "tp2.yaml"}
"""Which Serve file an overlay runs."""


@dataclass(frozen=True)
class Overlay:
    """A rendered overlay, and the Serve file it runs."""

    name: str
    documents: list[Document]

    @property
    def service(self):
        (service,) = self.of_kind("RayService")
        return RayService.model_validate(service)

    @property
    def cluster(self):
        return self.service.spec.rayClusterConfig

    @property
    def workers(self):
        (workers,) = self.cluster.workerGroupSpecs
        return workers

    @property
    def deploy_file(self):
        return yaml.safe_load((ROOT / "deploy" / USED_BY[self.name]).read_text())

    @property
    def app(self):
        (app,) = self.deploy_file["applications"]
        return app

    def of_kind(self, kind):
        return [document for document in self.documents if document["kind"] == kind]

    def selected(self, selector):
        """The groups whose pods a selector finds."""
        labelled = zip(self.cluster.groups, self.cluster.pod_labels, strict=True)
        return [group for group, labels in labelled if selector.items() <= labels.items()]


def rendered(name):
    return Overlay(name, render(ROOT / "k8s/overlays" / name))


def pod(name, group):
    """The pod that the operator makes from a template, as far as the template says."""
    metadata = {**group.template.metadata, "name": name}
    spec = copy.deepcopy(group.template.spec)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
