"""What Serve runs from a Serve file: the options of the code, with the file's over them."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from ray.serve import Application
from ray.serve.config import AutoscalingConfig

from serve_spec.config import ServeSpecConfig, base
from serve_spec.serving.deployment.app import build_app, load_config

ROOT = Path(__file__).parents[2]
DEPLOY_FILES = sorted((ROOT / "deploy").glob("*.yaml"))
MODELS = "/models/"
"""Where configurations expect checkpoints that do not ship with the package."""
_SETTINGS = dict(
    line.split("=", 1)
    for line in shlex.split((ROOT / "deploy/throughput.env").read_text(), comments=True)
)
THROUGHPUT = {name: value for name, value in _SETTINGS.items() if "$" not in value}
"""Ray Serve's high-throughput settings, by the name of the variable."""
OF_USER = _SETTINGS.keys() - THROUGHPUT.keys()
"""Variables whose values a shell finds out: programs and folders."""


@dataclass(frozen=True)
class Deployed:
    """One deployment as Serve would run it."""

    options: Mapping[str, Any]
    actor: Mapping[str, Any]

    @property
    def autoscaling(self):
        given = self.options.get("autoscaling_config")
        return None if given is None else AutoscalingConfig.model_validate(given)

    @property
    def min_replicas(self):
        return self.autoscaling.min_replicas if self.autoscaling else self.options["num_replicas"]

    @property
    def max_replicas(self):
        return self.autoscaling.max_replicas if self.autoscaling else self.options["num_replicas"]

    @property
    def bundles(self):
        """What one replica reserves: its placement group, or its actor alone."""
        actor = {"CPU": self.actor.get("num_cpus", 1), "GPU": self.actor.get("num_gpus", 0)}
        return self.options["placement_group_bundles"] or [actor]

    @property
    def num_cpus(self):
        return sum(bundle.get("CPU", 0) for bundle in self.bundles)

    @property
    def num_gpus(self):
        return sum(bundle.get("GPU", 0) for bundle in self.bundles)


@dataclass(frozen=True)
class Deployment:
    """One application of a Serve file: its configuration and what it deploys, by name."""

    config: ServeSpecConfig
    parts: Mapping[str, Deployed]

    @property
    def engines(self):
        return self.parts["EngineReplica"]

    @property
    def routers(self):
        return self.parts["Router"]


def read(app, stand_ins):
    """The deployment of `app`, an application of a Serve file that names a configuration of this
    checkout, or a checkpoint of the hub.

    stand_ins: an empty folder; checkpoints that are not on this machine get an empty folder there.
        The shipped pair stands in for one of the hub.
    """
    # As the pods get one from a Secret.
    args = {"api_keys": ["key"], **app["args"]}
    if "config" in args:
        args["config"] = _configuration(ROOT / args["config"], stand_ins)
    else:
        args["model"] = "asset:tiny"
    given = {each["name"]: each for each in app.get("deployments", [])}
    code = dict(_built(build_app(args)))
    assert given.keys() <= code.keys(), "deployments that the application does not have"
    parts = {name: _deployed(code[name], given.get(name, {})) for name in code}
    return Deployment(load_config(args), parts)


def checkpoints(app):
    """The folders below `MODELS` that the configuration of `app` names."""
    if "config" not in app["args"]:
        return []
    text = (ROOT / app["args"]["config"]).read_text()
    named = yaml.safe_load(text)
    paths = named["model"]["path"], named["speculative"]["speculative_draft_model_path"]
    return [path for path in paths if path.startswith(MODELS)]


def _configuration(file, stand_ins):
    keys = yaml.safe_load(file.read_text())
    for section, key in (("model", "path"), ("speculative", "speculative_draft_model_path")):
        path = keys[section][key]
        if path.startswith(MODELS):
            stand_in = stand_ins / path.removeprefix(MODELS)
            stand_in.mkdir(exist_ok=True)
            keys[section][key] = str(stand_in)
        else:
            assert (base.ASSETS / path.removeprefix("asset:")).is_dir()
    return keys


def _built(app):
    deployment = app._bound_deployment
    yield deployment.name, deployment
    for argument in deployment.init_args:
        if isinstance(argument, Application):
            yield from _built(argument)


def _deployed(code, given):
    """As `ray.serve._private.application_state.override_deployment_info` puts them together."""
    group = {
        "placement_group_bundles": code._replica_config.placement_group_bundles,
        "placement_group_strategy": code._replica_config.placement_group_strategy,
    }
    options = {**code._deployment_config.model_dump(), **group, **given}
    actor = options.pop("ray_actor_options", None) or code.ray_actor_options
    return Deployed(options, actor)
