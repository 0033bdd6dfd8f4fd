"""Serve's configuration files: Ray ignores a key it does not know, we do not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray._common.utils import import_attr

from serve_spec.config import ConfigError
from serve_spec.serving.command import check_deployment, read_deployment

ROOT = Path(__file__).parents[2]
DEPLOY_FILES = sorted((ROOT / "deploy").glob("*.yaml"))


@pytest.fixture
def tiny():
    return yaml.safe_load((ROOT / "deploy/tiny.yaml").read_text())


@pytest.mark.parametrize("file", DEPLOY_FILES, ids=lambda p: p.name)
def test_every_shipped_deployment_is_strictly_valid_and_names_what_exists(file):
    for app in read_deployment(file)["applications"]:
        assert callable(import_attr(app["import_path"]))
        assert (ROOT / app["args"]["config"]).is_file()


Spoil = Callable[[dict[str, Any]], None]


def engines(**options):
    """Give the engine replicas these options."""
    entry = {"name": "EngineReplica", **options}
    return lambda d: d["applications"][0].update(deployments=[entry])


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda d: d.update(http_option={}), "http_options"),
        (lambda d: d["http_options"].update(prt=1), "http_options.port"),
        (lambda d: d["http_options"].update(port="many"), "port"),
        (lambda d: d["applications"][0].update(import_pth="x"), "import_path"),
        (engines(max_queued_request=2), "max_queued_requests"),
        (engines(ray_actor_options={"num_cpu": 2}), "ray_actor_options.num_cpus"),
        (engines(num_replicas="some"), "num_replicas"),
        (engines(autoscaling_config={"upscale_delay": 2}), "upscale_delay_s"),
    ],
)
def test_a_misspelt_key_or_a_wrong_value_is_refused_at_every_level(tiny, spoil, named):
    spoil(tiny)
    with pytest.raises(ConfigError, match=named):
        check_deployment(tiny)


def test_every_misspelt_key_is_reported_at_once(tiny):
    spoilt = copy.deepcopy(tiny) | {"a": 1, "b": 2}
    with pytest.raises(ConfigError) as caught:
        check_deployment(spoilt)
    assert len(caught.value.problems) == 2


def test_policy_settings_are_judged_before_anything_starts(tiny):
    engines: dict[str, Any] = {"name": "EngineReplica", "user_config": {"min_dwell_rounds": 4}}
    tiny["applications"][0]["deployments"] = [{"name": "Router", "num_replicas": 2}, engines]
    check_deployment(tiny)
    engines["user_config"] = {"min_dwell_round": 4}
    with pytest.raises(ConfigError, match=r"deployments\.1\.user_config: .*mean min_dwell_rounds"):
        check_deployment(tiny)
    tiny["applications"][0]["import_path"] = "of.somebody:else"
    check_deployment(tiny)


def test_a_configuration_of_ours_becomes_a_deployment_of_one_application(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("model: {path: .}\n")
    deployment = read_deployment(file)
    check_deployment(deployment)
    assert deployment["applications"][0]["args"] == {"config": str(file)}


@pytest.mark.parametrize("text", ["[1, 2]", "just words", "a: [", ""])
def test_a_file_that_is_no_mapping_is_refused(tmp_path, text):
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.yaml"):
        read_deployment(file)
