"""The renderer of these tests agrees with kustomize on everything that `k8s/` uses."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.k8s.kustomize import NotSupported, render

ROOT = Path(__file__).parents[2]
OVERLAYS = sorted((ROOT / "k8s/overlays").iterdir())


def by_name(documents):
    return {(d["kind"], d["metadata"]["name"]): d for d in documents}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda p: p.name)
def test_an_overlay_renders_as_kustomize_renders_it(overlay):
    done = subprocess.run(
        ["kubectl", "kustomize", str(overlay)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert by_name(render(overlay)) == by_name(list(yaml.safe_load_all(done.stdout)))


@pytest.mark.parametrize(
    ("said", "patch"),
    [
        ({"resources": ["a.yaml", "a.yaml"]}, {}),
        ({"resources": ["a.yaml"], "namePrefix": "b-"}, {}),
        ({"resources": ["a.yaml"], "patches": [{"path": "p.yaml"}]}, {"data": {"keys": [1]}}),
    ],
    ids=["a resource named twice", "an unknown field", "a list that is merged by key"],
)
def test_what_kustomize_would_read_otherwise_is_refused(tmp_path, said, patch):
    head = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    one = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}}
    files = {"kustomization.yaml": head | said, "a.yaml": one, "p.yaml": one | patch}
    for name, content in files.items():
        (tmp_path / name).write_text(yaml.safe_dump(content))
    with pytest.raises(NotSupported):
        render(tmp_path)
