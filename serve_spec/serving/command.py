"""`serve-spec serve FILE`: serve a model with Ray Serve until Ctrl-C.

FILE is a Serve config (such as deploy/tiny.yaml) or a configuration (such as configs/tiny.yaml).
Unknown keys of a Serve config are errors, although Ray would ignore them.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import math
import os
import shlex
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from ray.serve.schema import ServeDeploySchema

from serve_spec.config import ConfigError, RouterConfig, ServeSpecConfig
from serve_spec.config.base import parse_yaml, read_text, unknown_key
from serve_spec.config.speculative import parse_update

APP_IMPORT_PATH = "serve_spec.serving:build_app"
APP_NAME = "serve_spec"
ENGINES = "EngineReplica"
"""The deployment whose `user_config` holds policy settings."""


def read_deployment(file: Path) -> dict[str, Any]:
    """Return the Serve config for `file`.

    file: a Serve config, or a serve_spec configuration, which becomes a single application.

    Raises:
        ConfigError: the file is missing, invalid YAML, or has an unknown key or an invalid value.
    """
    given = parse_yaml(read_text(file), str(file))
    if not isinstance(given, dict):
        raise ConfigError(
            f"{file}: not a mapping; give a Serve config or a serve_spec configuration"
        )
    if "applications" in given:
        check_deployment(given)
        return given
    app = {
        "name": APP_NAME,
        "route_prefix": "/",
        "import_path": APP_IMPORT_PATH,
        "args": {"config": str(file.absolute())},
    }
    return {"applications": [app]}


def check_deployment(given: Mapping[str, Any]) -> None:
    """Validate a Serve config: its keys, Ray's schema, and the `user_config` of our engines.

    Raises:
        ConfigError: there are unknown keys, invalid values or invalid policy settings.
    """
    unknown = list(_unknown_keys(ServeDeploySchema, given, ""))
    if unknown:
        raise ConfigError(*unknown)
    try:
        ServeDeploySchema.model_validate(given)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    for place, settings in _policy_settings(given):
        try:
            parse_update(settings)
        except ConfigError as error:
            raise ConfigError(*(f"{place}: {problem}" for problem in error.problems)) from None


def _policy_settings(given: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yield the path and content of every `user_config` of our engines."""
    for i, app in enumerate(given["applications"]):
        deployments = app.get("deployments", []) if app["import_path"] == APP_IMPORT_PATH else []
        for j, deployment in enumerate(deployments):
            settings = deployment.get("user_config")
            if deployment["name"] == ENGINES and settings is not None:
                yield f"applications.{i}.deployments.{j}.user_config", settings


def _unknown_keys(model: Any, given: object, place: str) -> Iterator[str]:
    """Yield an error message for each key of `given` that Ray's pydantic class does not have."""
    if isinstance(given, list):
        for index, item in enumerate(given):
            yield from _unknown_keys(model, item, f"{place}{index}.")
    elif isinstance(given, Mapping):
        known = [f"{place}{key}" for key in model.model_fields]
        for key, value in given.items():
            field = model.model_fields.get(key)
            if field is None:
                yield unknown_key(f"{place}{key}", known)
                continue
            for nested in _models_in(field.annotation):
                yield from _unknown_keys(nested, value, f"{place}{key}.")


def _models_in(annotation: object) -> Iterator[object]:
    """Yield the pydantic classes inside `Optional[X]`, `List[X]` and the like."""
    if hasattr(annotation, "model_fields"):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


_POLL_S = 0.25


class StartFailed(RuntimeError):
    """An application failed to start."""


@dataclass(frozen=True)
class Plan:
    """A Serve config, the configurations of its applications and the HTTP address."""

    deployment: Mapping[str, Any]
    configs: tuple[ServeSpecConfig, ...]
    host: str
    port: int
    route_prefix: str = "/"

    @property
    def url(self) -> str:
        """Base URL for a client on this machine."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return f"http://{host}:{self.port}{self.route_prefix.rstrip('/')}"

    @property
    def is_open_to_all(self) -> bool:
        """Whether other machines can send requests without an API key."""
        is_local = self.host in ("localhost", "::1") or self.host.startswith("127.")
        return not is_local and any(not c.router.api_keys for c in self.configs)

    @property
    def num_cpus(self) -> int:
        """Logical CPUs that Ray needs to place every replica."""
        needed = sum(c.replica.num_cpus * c.replica.num_replicas for c in self.configs)
        return max(os.cpu_count() or 1, math.ceil(needed))


def main(argv: list[str]) -> int:
    """Run the command; return 0, 1 if the application does not start, 2 for invalid input."""
    args = _parser().parse_args(argv)
    # Ray reports usage statistics by default.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Serve's log stays in Ray's log folder; warnings of serve_spec are shown.
    os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
    try:
        plan = read_plan(Path(args.file), args.host, args.port)
        if args.address is None:
            _check_port(plan.host, plan.port)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if plan.is_open_to_all:
        print(
            f"warning: host={plan.host!r}: every machine that reaches it can use the server; set "
            "router.api_keys, or listen on 127.0.0.1",
            file=sys.stderr,
        )
    prepare_environment(plan)
    with _stop_signals() as stop:
        return _serve(plan, stop, args.address, dashboard=args.dashboard)


def read_plan(file: Path, host: str | None, port: int | None) -> Plan:
    """Return the plan for `file`; `host` and `port` override it.

    Raises:
        ConfigError: the file, or a configuration it names, is missing or invalid.
    """
    # Ray takes a second to import, so the arguments are checked first.
    from serve_spec.serving.app import load_config

    deployment = read_deployment(file)
    ours = [a for a in deployment["applications"] if a["import_path"] == APP_IMPORT_PATH]
    configs = tuple(load_config(_without_engine(app.get("args", {}))) for app in ours)
    router = configs[0].router if configs else RouterConfig()
    http = {"host": router.host, "port": router.port, **deployment.get("http_options", {})}
    http["host"] = host or http["host"]
    http["port"] = port or http["port"]
    deployment = {**deployment, "http_options": http}
    prefix = ours[0].get("route_prefix", "/") if ours else "/"
    return Plan(deployment, configs, http["host"], http["port"], prefix)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="serve-spec serve", description=__doc__)
    parser.add_argument(
        "file", metavar="FILE", help="Serve config or serve_spec configuration (YAML)"
    )
    parser.add_argument("--host", help="address to listen on (default: from the file)")
    parser.add_argument("--port", type=int, help="TCP port to listen on (default: from the file)")
    parser.add_argument(
        "--address",
        default=os.environ.get("RAY_ADDRESS"),
        help="address of a running Ray cluster (default: $RAY_ADDRESS, else a new local cluster)",
    )
    parser.add_argument("--dashboard", action="store_true", help="start the Ray dashboard")
    return parser


def prepare_environment(plan: Plan) -> None:
    """Set Serve's environment variables that are not set; a running cluster keeps its own."""
    from serve_spec.serving.proxy import (
        CALLBACK,
        CALLBACK_VARIABLE,
        HEADER_TIMEOUT_VARIABLE,
        own_settings,
    )

    router = plan.configs[0].router if plan.configs else RouterConfig()
    for name, value in {**own_settings(router), CALLBACK_VARIABLE: CALLBACK}.items():
        os.environ.setdefault(name, value)
    if plan.configs:
        os.environ[HEADER_TIMEOUT_VARIABLE] = str(router.header_timeout_s)


def _serve(plan: Plan, stop: threading.Event, address: str | None, *, dashboard: bool) -> int:
    """Deploy, print the URL, wait for `stop`, and shut down; return the exit status."""
    import ray
    from ray import serve

    own_cluster = address is None
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    size: dict[str, Any] = {"num_cpus": plan.num_cpus, "include_dashboard": dashboard}
    print("starting Ray ...", flush=True)
    try:
        ray.init(address or "local", logging_level=logging.ERROR, **(size if own_cluster else {}))
    except ConnectionError as error:
        print(f"address={address!r}: {error}", file=sys.stderr)
        return 1
    _take_signals(stop)  # `ray.init` replaces the handler for SIGTERM
    try:
        _deploy(plan, stop)
        if not stop.is_set():
            print(announcement(plan), flush=True)
            stop.wait()
        print("shutting down ...", flush=True)
        status = 0
    except StartFailed as error:
        print(error, file=sys.stderr)
        status = 1
    # Ray prints the end of its own controller as a failed task.
    with redirect_stdout(io.StringIO()):
        _remove(plan)
        if own_cluster:
            serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()
    return status


def _remove(plan: Plan) -> None:
    """Delete the applications and wait for running requests, until a second Ctrl-C.

    This comes before Serve's shutdown, which closes the proxies that streams pass through.
    """
    from ray import serve

    names = {app["name"] for app in plan.deployment["applications"]}
    with suppress(KeyboardInterrupt):
        for name in names:
            serve.delete(name, _blocking=False)
        while names & serve.status().applications.keys():
            time.sleep(_POLL_S)


def _deploy(plan: Plan, stop: threading.Event) -> None:
    """Deploy and wait until the application answers over HTTP, or `stop` is set."""
    from ray import serve
    from ray.serve._private.api import serve_start  # as `serve run FILE` does
    from ray.serve.schema import ServeDeploySchema

    schema = ServeDeploySchema.model_validate(plan.deployment)
    print("loading the model ...", flush=True)
    client = serve_start(
        http_options=schema.http_options.model_dump(), proxy_location=schema.proxy_location
    )
    client.deploy_apps(schema)
    names = {app.name for app in schema.applications}
    while not stop.wait(_POLL_S):
        apps = serve.status().applications
        for name in names & apps.keys():
            if apps[name].status == "DEPLOY_FAILED":
                raise StartFailed(f"application {name!r} failed to start:\n{_reasons(apps[name])}")
        running = [name for name in names & apps.keys() if apps[name].status == "RUNNING"]
        # Applications of others may not have /health.
        if len(running) == len(names) and (not plan.configs or _answers(f"{plan.url}/health")):
            return


def _reasons(app: Any) -> str:
    """Return the messages in Serve's status of an application and of its deployments."""
    messages = [app.message, *(d.message for d in app.deployments.values())]
    return "\n".join(message for message in messages if message)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def announcement(plan: Plan) -> str:
    """Return the URL and a curl command to try."""
    if not plan.configs:
        return f"ready: {plan.url}"
    config = plan.configs[0]
    body = {
        "model": config.model.names[0],
        "prompt": "class Stack:\n    def __init__(self):",
        "max_tokens": 64,
        "temperature": 0,
        "stream": True,
    }
    key = " -H 'Authorization: Bearer YOUR_API_KEY'" if config.router.api_keys else ""
    return (
        f"\nready: {config.model.names[0]} at {plan.url}   (Ctrl-C stops it)\n\n"
        f"curl -N {plan.url}/v1/completions -H 'Content-Type: application/json'{key} "
        f"-d {shlex.quote(json.dumps(body))}\n"
    )


def _check_port(host: str, port: int) -> None:
    """Raise ConfigError for a port in use; Serve would wait for it forever."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"port={port}: {error.strerror}; choose another --port") from None


def _without_engine(args: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in args.items() if key != "engine_loop"}


@contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C and SIGTERM set while the body runs."""
    before = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)}
    stop = threading.Event()
    _take_signals(stop)
    try:
        yield stop
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


def _take_signals(stop: threading.Event) -> None:
    def handle(*_: object) -> None:
        if stop.is_set():  # second signal: do not wait for running requests
            raise KeyboardInterrupt
        stop.set()

    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, handle)
