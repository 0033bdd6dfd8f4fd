"""Servers that the benchmark starts, and their variants."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import yaml

from serve_spec.config import ConfigError

_READY = re.compile(r"^ready: (?:.* at )?(https?://\S+)")
_STOP_WITHIN_S = 120.0


def serve_command(model: str, port: int | None, keys: Mapping[str, Any] | None = None) -> list[str]:
    """Return the command that starts a server; `keys` override the configuration."""
    chosen = [] if port is None else ["--port", str(port)]
    for key, value in (keys or {}).items():
        chosen += ["--set", f"{key}={json.dumps(value)}"]
    return [sys.executable, "-u", "-m", "serve_spec", "serve", model, *chosen]


@contextmanager
def own_server(command: Sequence[str], client_cores: int = 0) -> Iterator[str]:
    """Start a server, yield its base URL, and stop it; raise ConfigError if it does not start.

    client_cores: the body runs on so many cores, the server on all others; 0: both use all.
    """
    cores = sorted(os.sched_getaffinity(0))
    kept = len(cores) - client_cores
    if kept < 1:
        raise ConfigError(
            f"--client-cores={client_cores!r}: the machine has {len(cores)} cores; leave some"
        )
    with _on_cores(cores[:kept]):  # a child inherits them
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C reaches only this process
        )
    assert process.stdout is not None, "stdout is a pipe"
    try:
        url = _ready_url(process.stdout)
        if url is None:
            raise ConfigError(
                f"command={' '.join(command)!r}: ended with status {process.wait()} before it was "
                "ready; see its output"
            )
        # A full pipe would stop the server.
        threading.Thread(target=_pass_on, args=(process.stdout,), daemon=True).start()
        with _on_cores(cores[kept:] or cores):
            yield url
    finally:
        _stop(process)


@contextmanager
def _on_cores(cores: Collection[int]) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def announced_url(line: str) -> str | None:
    """Return the URL of a line such as `ready: tiny at http://127.0.0.1:8000   (Ctrl-C ...)`."""
    match = _READY.match(line)
    return None if match is None else match.group(1)


def _ready_url(lines: Iterable[str]) -> str | None:
    """Pass lines on to stderr until one has the URL, or all of them."""
    for line in lines:
        print(line, end="", file=sys.stderr)
        if url := announced_url(line):
            return url
    return None


def _pass_on(output: IO[str]) -> None:
    with output:
        while _ready_url(output):
            pass


def _stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.terminate()  # background jobs of a shell ignore interrupts
    try:
        process.wait(_STOP_WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()


@dataclass(frozen=True)
class ServerVariant:
    """A server configuration to compare."""

    name: str
    """Its settings: KEY=VALUE[,KEY=VALUE...]."""
    num_replicas: int
    deployment: Mapping[str, Any]


def server_variant(
    deploy: str | Path, name: str, keys: Mapping[str, Any] | None = None
) -> ServerVariant:
    """Return a Serve file, configuration or checkpoint with the settings of `name`.

    keys: other keys, which lose to the settings. Raises ConfigError: the file or a key is invalid.
    """
    # These import Ray, which takes a second.
    from serve_spec.serving.deployment.app import load_config
    from serve_spec.serving.deployment.engine_actor import placement_of
    from serve_spec.serving.deployment.plan import APP_IMPORT_PATH, read_deployment

    deployment = read_deployment(deploy, keys)
    ours = [app for app in deployment["applications"] if app["import_path"] == APP_IMPORT_PATH]
    if not ours:
        raise ConfigError(f"--deploy={deploy}: no application imports {APP_IMPORT_PATH}; add one")
    args = ours[0].setdefault("args", {})
    args.update(_settings(name))
    config = load_config(args)
    placement_of(config)  # raises before other variants are measured
    return ServerVariant(name, config.replica.num_replicas, deployment)


@contextmanager
def serve_file(variant: ServerVariant) -> Iterator[str]:
    """Yield a temporary Serve file of the variant."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "deploy.yaml"
        file.write_text(yaml.safe_dump(dict(variant.deployment), sort_keys=False))
        yield str(file)


def _settings(name: str) -> dict[str, str]:
    """Return the settings as texts, which `load_config` parses."""
    pairs = [pair.partition("=") for pair in name.split(",")]
    if not all(key and equals for key, equals, _ in pairs):
        raise ConfigError(f"--variants={name!r}: give KEY=VALUE, separated by commas")
    return {key: value for key, _, value in pairs}
