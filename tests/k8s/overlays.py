"""Rendered overlays of `k8s/`.

As much of `kustomize build` as `k8s/` uses is here, so that overlays can be checked without its
binary: resources, components, merge and JSON patches, replacements and generated config maps. Other
keys of a kustomization are refused. `test_manifests.py` compares with the real binary.
"""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.k8s.kuberay import RayService

ROOT = Path(__file__).parents[2]
KUBERNETES = "1.33"
SERVE_PORT = 8000
USED_BY = {
    "cpu-demo": "deploy/tiny.yaml",
    "gpu-demo": "deploy/gpu.yaml",
    "gpu": "deploy/four-replicas.yaml",
    "my-model": "k8s/overlays/my-model/application/serve.yaml",
    "tp": "deploy/tp2.yaml",
}
"""Which Serve file an overlay runs."""


@dataclass(frozen=True)
class Overlay:
    """A rendered overlay, and the Serve file it runs."""

    name: str
    documents: list

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
        return yaml.safe_load((ROOT / USED_BY[self.name]).read_text())

    @property
    def app(self):
        (app,) = self.deploy_file["applications"]
        return app

    def of_kind(self, kind):
        return [document for document in self.documents if document["kind"] == kind]

    def selected(self, selector):
        labelled = zip(self.cluster.groups, self.cluster.pod_labels, strict=True)
        return [group for group, labels in labelled if selector.items() <= labels.items()]


def rendered(name):
    return Overlay(name, render(ROOT / "k8s/overlays" / name))


def composed(folder, name, component):
    """Return the overlay that an empty folder makes of an overlay and a component."""
    keys = {"resources": [f"overlays/{name}"], "components": [f"components/{component}"]}
    for paths in keys.values():
        paths[0] = os.path.relpath(ROOT / "k8s" / paths[0], folder.resolve())
    version = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(version | keys))
    return Overlay(name, render(folder))


def pod(name, group):
    """Return the pod that the operator makes from a template."""
    metadata = {**group.template.metadata, "name": name}
    spec = copy.deepcopy(group.template.spec)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def render(folder):
    """What `kubectl kustomize folder` would print, in no particular order."""
    documents = []
    _apply(folder, documents)
    return documents


def merged(base, patch):
    """`base` after a JSON merge patch (RFC 7386): mappings are merged, null removes."""
    if not isinstance(base, dict) or not isinstance(patch, dict):
        return copy.deepcopy(patch)
    result = dict(base)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key, {}), value)
    return result


def _apply(folder, documents):
    """Add the documents of the kustomization in `folder`, and patch those added so far."""
    keys = yaml.safe_load((folder / "kustomization.yaml").read_text())
    for name in keys.pop("resources", []):
        place = folder / name
        documents += render(place) if place.is_dir() else yaml.safe_load_all(place.read_text())
    options = keys.pop("generatorOptions", {})
    for generator in keys.pop("configMapGenerator", []):
        documents.append(_config_map(folder, generator, options))
    for name in keys.pop("components", []):
        _apply(folder / name, documents)
    for item in keys.pop("patches", []):
        patch = yaml.safe_load((folder / item["path"]).read_text())
        if isinstance(patch, list):
            target = item["target"]["kind"]
            for document in [known for known in documents if known["kind"] == target]:
                _patch(document, patch)
            continue
        # Of kinds that kustomize knows it merges lists by key; of others it replaces them.
        is_custom = patch["kind"] in ("RayService", "PodMonitor")
        assert is_custom or not _has_list(patch), f"{item}: a list"
        (index,) = [i for i, known in enumerate(documents) if _name(known) == _name(patch)]
        documents[index] = merged(documents[index], patch)
    for item in keys.pop("replacements", []):
        _replace(documents, **item)
    assert keys.keys() <= {"apiVersion", "kind"}, f"{folder}: {keys}"


def _patch(document, operations):
    """Apply a JSON patch (RFC 6902) of additions and replacements in place."""
    for operation in operations:
        *parents, last = operation["path"].split("/")[1:]
        place = document
        for name in parents:
            place = place[int(name)] if isinstance(place, list) else place[name]
        value = copy.deepcopy(operation["value"])
        if isinstance(place, list):
            assert (operation["op"], last) == ("add", "-"), operation
            place.append(value)
        else:
            assert operation["op"] == ("replace" if last in place else "add"), operation
            place[last] = value


def _replace(documents, source, targets):
    """Copy a value of a config map into fields of other documents."""
    key = source["fieldPath"].removeprefix("data.[").removesuffix("]")
    (value,) = [
        known["data"][key]
        for known in documents
        if (known["kind"], known["metadata"]["name"]) == (source["kind"], source["name"])
    ]
    for target in targets:
        (place,) = [known for known in documents if known["kind"] == target["select"]["kind"]]
        for path in target["fieldPaths"]:
            *parents, last = path.split(".")
            for name in parents:
                place = place[name]
            place[last] = value


def _has_list(value):
    if isinstance(value, dict):
        return any(map(_has_list, value.values()))
    return isinstance(value, list)


def _name(document):
    return document["apiVersion"], document["kind"], document["metadata"]["name"]


def _config_map(folder, generator, options):
    assert options["disableNameSuffixHash"], "names with a hash of the content"
    metadata = {"name": generator["name"]} | {
        kind: options[kind] for kind in ("labels", "annotations") if kind in options
    }
    data = {Path(name).name: (folder / name).read_text() for name in generator["files"]}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}
