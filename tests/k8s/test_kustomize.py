"""The renderer of these tests agrees with kustomize on everything that `k8s/` uses."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.k8s.kustomize import Document, NotSupported, merged, render

ROOT = Path(__file__).parents[2]
OVERLAYS = sorted((ROOT / "k8s/overlays").iterdir())


def by_name(documents: list[Document]) -> dict[tuple[str, str], Document]:
    return {(d["kind"], d["metadata"]["name"]): d for d in documents}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda p: p.name)
def test_an_overlay_renders_as_kustomize_renders_it(overlay: Path) -> None:
    done = subprocess.run(
        ["kubectl", "kustomize", str(overlay)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert by_name(render(overlay)) == by_name(list(yaml.safe_load_all(done.stdout)))


@pytest.mark.parametrize(
    ("base", "patch", "result"),
    [
        ({"a": 1}, {"b": 2}, {"a": 1, "b": 2}),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}}, {"a": {"b": 3, "c": 2}}),
        ({"a": {"b": 1}}, {"a": None}, {}),
        ({"a": [1, 2]}, {"a": [3]}, {"a": [3]}),
        ({"a": "text"}, {"a": {"b": 1}}, {"a": {"b": 1}}),
        ({}, {"a": {"b": None, "c": 1}}, {"a": {"c": 1}}),
    ],
)
def test_mappings_merge_null_removes_and_lists_are_replaced(
    base: Any, patch: Any, result: Any
) -> None:
    before = yaml.safe_dump(base)
    assert merged(base, patch) == result
    assert yaml.safe_dump(base) == before


def config_map(name: str, **rest: Any) -> str:
    metadata = {"name": name}
    return yaml.safe_dump(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {}, **rest}
    )


@pytest.mark.parametrize(
    "said",
    [
        {"namePrefix": "my-"},
        {"resources": ["a.yaml", "again.yaml"]},
        {"resources": ["a.yaml"], "patches": [{"path": "a.yaml", "target": {"kind": "Pod"}}]},
        {"resources": ["a.yaml"], "patches": [{"path": "list.yaml"}]},
        {"configMapGenerator": [{"name": "b", "files": ["a.yaml"]}]},
        {"apiVersion": "kustomize.config.k8s.io/v1"},
    ],
)
def test_what_the_renderer_can_not_do_as_kustomize_does_is_refused(
    tmp_path: Path, said: dict[str, Any]
) -> None:
    (tmp_path / "a.yaml").write_text(config_map("a"))
    (tmp_path / "again.yaml").write_text(config_map("a"))
    (tmp_path / "list.yaml").write_text(config_map("a", data={"b": [1]}))
    header = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump({**header, **said}))
    with pytest.raises(NotSupported):
        render(tmp_path)
