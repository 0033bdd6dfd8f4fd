"""Laws of arms: a Serve file with some keys set, and nothing else changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from serve_spec.bench.online.arms import arm_file, arm_of
from serve_spec.config import ConfigError
from serve_spec.serving.app import load_config
from serve_spec.serving.command import read_plan

TWO = "num_replicas=2,routing_policy=balanced"


@pytest.fixture
def deploy(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"model": {"path": "model"}}))
    app = {
        "name": "serve_spec",
        "route_prefix": "/llm",
        "import_path": "serve_spec.serving:build_app",
        "args": {"config": str(tmp_path / "config.yaml"), "num_replicas": 3},
    }
    file = tmp_path / "deploy.yaml"
    file.write_text(yaml.safe_dump({"http_options": {"port": 8123}, "applications": [app]}))
    return file


def test_an_arm_is_the_file_with_its_keys_set(deploy: Path) -> None:
    arm = arm_of(deploy, TWO)
    assert (arm.name, arm.num_replicas) == (TWO, 2)
    with arm_file(arm) as file:
        plan = read_plan(Path(file), None, None)
    (config,) = plan.configs
    assert (config.replica.num_replicas, config.router.routing_policy) == (2, "balanced")
    assert plan.url == "http://127.0.0.1:8123/llm"
    assert not Path(file).exists()
    assert arm_of(deploy, "routing_policy=prefix").num_replicas == 3


def test_a_plain_configuration_has_arms_too(deploy: Path) -> None:
    arm = arm_of(deploy.parent / "config.yaml", "num_replicas=4")
    (app,) = arm.deployment["applications"]
    assert load_config(app["args"]).replica.num_replicas == arm.num_replicas == 4


@pytest.mark.parametrize("name", ["", "num_replicas", "num_replicas=2,", "=2", "num_replica=2"])
def test_a_wrong_arm_is_refused(deploy: Path, name: str) -> None:
    with pytest.raises(ConfigError):
        arm_of(deploy, name)


def test_a_file_without_our_application_has_no_arms(deploy: Path) -> None:
    given = yaml.safe_load(deploy.read_text())
    given["applications"][0]["import_path"] = "elsewhere:app"
    deploy.write_text(yaml.safe_dump(given))
    with pytest.raises(ConfigError, match="no application imports"):
        arm_of(deploy, "num_replicas=2")


def test_an_arm_whose_ranks_have_no_device_is_refused_before_any_runs(deploy: Path) -> None:
    with pytest.raises(ConfigError, match="set num_gpus to 2"):
        arm_of(deploy, "tensor_parallel_size=2,num_gpus=1")
    arm_of(deploy, "tensor_parallel_size=2,num_gpus=2")
