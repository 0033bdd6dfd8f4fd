"""Arms of `bench online`: one Serve file, set up in several ways, each with a server of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from serve_spec.config import ConfigError


@dataclass(frozen=True)
class Arm:
    """One way to set up a server."""

    name: str
    """As it was asked for: KEY=VALUE[,KEY=VALUE...]."""
    num_replicas: int
    deployment: Mapping[str, Any]


def arm_of(deploy: Path, name: str) -> Arm:
    """`deploy`, a Serve file or a configuration, with the keys that `name` gives set.

    Raises:
        ConfigError: the file or a key is wrong, or the file has no application of ours.
    """
    # Ray takes a second to import: only for who has arms.
    from serve_spec.serving.app import load_config
    from serve_spec.serving.deploy_file import APP_IMPORT_PATH, read_deployment
    from serve_spec.serving.ranks import placement_of

    deployment = read_deployment(deploy)
    ours = [app for app in deployment["applications"] if app["import_path"] == APP_IMPORT_PATH]
    if not ours:
        raise ConfigError(f"deploy={str(deploy)!r}: no application imports {APP_IMPORT_PATH}")
    args = ours[0].setdefault("args", {})
    args.update(_settings(name))
    config = load_config(args)
    placement_of(config)  # refuses before the arms that come first have been measured
    return Arm(name, config.replica.num_replicas, deployment)


@contextmanager
def arm_file(arm: Arm) -> Iterator[str]:
    """The arm as a Serve file, for as long as the body runs."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "deploy.yaml"
        file.write_text(yaml.safe_dump(dict(arm.deployment), sort_keys=False))
        yield str(file)


def _settings(name: str) -> dict[str, str]:
    """Texts, as `serve run FILE KEY=VALUE` hands them over; `load_config` reads them."""
    pairs = [pair.partition("=") for pair in name.split(",")]
    if not all(key and equals for key, equals, _ in pairs):
        raise ConfigError(f"arms={name!r}: give KEY=VALUE, several with commas between them")
    return {key: value for key, _, value in pairs}
