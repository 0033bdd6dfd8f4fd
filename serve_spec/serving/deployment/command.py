"""`serve-spec serve MODEL`: serve a model with Ray Serve until Ctrl-C.

MODEL is a hub id, a checkpoint's folder, a GGUF file, asset:NAME, a configuration (such as
configs/tiny.yaml) or a Serve config (such as deploy/tiny.yaml), whose unknown keys are errors,
although Ray would ignore them.
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
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from serve_spec.config import ConfigError, RouterConfig, ServeSpecConfig
from serve_spec.config.base import parse_yaml, read_text, unknown_key
from serve_spec.config.flags import add_flags, add_model, flags_named, read_flags
from serve_spec.config.root import is_file, leaf_sections
from serve_spec.config.speculative import parse_update
from serve_spec.core.errors import CheckpointError
from serve_spec.serving.processes import exit_now, holder_of_port, stop_signals, take_signals

APP_IMPORT_PATH = "serve_spec.serving:build_app"
_OUR_IMPORT_PATHS = (
    APP_IMPORT_PATH,
    "serve_spec.serving:build_openai_app",
    "serve_spec.serving:application",
)
APP_NAME = "serve_spec"
ENGINES = "EngineReplica"
"""The deployment whose `user_config` holds policy settings."""
_CODE: dict[str, Any] = {"prompt": "class Stack:\n    def __init__(self):"}
_CHAT = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}


def read_deployment(
    source: str | Path, overrides: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the Serve config for `source`, or raise ConfigError.

    source: a Serve config, or what becomes a single application: a serve_spec configuration or the
        name of a checkpoint.
    overrides: leaf keys for every application of ours.
    """
    args: dict[str, Any]
    if not is_file(source):
        is_folder = Path(source).expanduser().exists()
        args = {"model": os.path.abspath(Path(source).expanduser()) if is_folder else str(source)}
    else:
        file = Path(source)
        given = parse_yaml(read_text(file), str(file))
        if not isinstance(given, dict):
            raise ConfigError(
                f"{file}: not a mapping; give a Serve config or a serve_spec configuration"
            )
        if "applications" in given:
            check_deployment(given)
            _override(given, overrides or {})
            return given
        args = {"config": str(file.absolute())}
    app = {
        "name": APP_NAME,
        "route_prefix": "/",
        "import_path": APP_IMPORT_PATH,
        "args": {**args, **(overrides or {})},
    }
    return {"applications": [app]}


def _override(deployment: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    for app in _our_apps(deployment) if overrides else ():
        if app["import_path"] == APP_IMPORT_PATH:
            app["args"] = {**app.get("args", {}), **overrides}
        elif others := overrides.keys() - {"host", "port"}:
            fix = f"{app['import_path']} takes no keys; set it in the Serve file"
            raise ConfigError(f"{min(others)}={overrides[min(others)]!r}: {fix}")


def _our_apps(deployment: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [app for app in deployment["applications"] if app["import_path"] in _OUR_IMPORT_PATHS]


def check_deployment(given: Mapping[str, Any]) -> None:
    """Raise ConfigError unless a Serve config has valid keys, values and policy settings."""
    from ray.serve.schema import ServeDeploySchema  # Ray takes seconds to import, --help none

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
        is_ours = app["import_path"] in _OUR_IMPORT_PATHS
        deployments = app.get("deployments", []) if is_ours else []
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
_END_WITHIN_S = 10.0
"""How long Ray may take to end after the last request."""
_OTHERS_DRAIN_S = 3600.0
"""How long applications that are not ours may take to end their requests."""
_VITAL = ("gcs_server", "raylet")
# By default, glibc keeps what requests of many sizes freed in an arena of each thread.
_FLAT_MEMORY = {"MALLOC_ARENA_MAX": "2"}


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
    def drain_s(self) -> float:
        """How long running requests may take after the order to end."""
        return max(
            (c.replica.graceful_shutdown_timeout_s for c in self.configs), default=_OTHERS_DRAIN_S
        )

    @property
    def num_cpus(self) -> int:
        """Logical CPUs that Ray needs to place every replica."""
        needed = sum(c.replica.num_cpus * c.replica.num_replicas for c in self.configs)
        return max(os.cpu_count() or 1, math.ceil(needed))


def main(argv: list[str]) -> int:
    """Run the command; return 0, 1 if the application does not start, 2 for invalid input."""
    parser = _parser()
    args = parser.parse_args(argv)
    # Ray reports usage statistics by default.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Serve's log stays in Ray's log folder; warnings of serve_spec are shown.
    os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
    try:
        overrides = read_flags(args)
        if args.config is None:
            parser.error("give a MODEL: a hub id, a folder, asset:tiny, or a file")
        with flags_named(args):
            plan = read_plan(args.config, overrides)
        if args.address is None:
            _check_port(plan.host, plan.port)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        with flags_named(args):
            plan = _checked(plan)
    except (ConfigError, CheckpointError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    if plan.is_open_to_all:
        print(
            f"warning: host={plan.host!r}: every machine that reaches it can use the server; set "
            "router.api_keys, or listen on 127.0.0.1",
            file=sys.stderr,
        )
    prepare_environment(plan)
    with stop_signals() as stop:
        return _serve(plan, stop, args.address, dashboard=args.dashboard)


def read_plan(source: str | Path, overrides: Mapping[str, Any] | None = None) -> Plan:
    """Return the plan for a file or checkpoint, or raise ConfigError; `overrides`: leaf keys."""
    # Ray takes a second to import, so the arguments are checked first.
    from serve_spec.serving.deployment.app import config_of

    overrides = overrides or {}
    deployment = read_deployment(source, overrides)
    ours = _our_apps(deployment)
    configs = tuple(map(config_of, ours))
    for app, config in zip(ours, configs, strict=True):
        # With absolute paths, because Serve may build the app in another directory.
        if overrides and app["import_path"] == APP_IMPORT_PATH:
            app["args"] = {**app["args"], **_resolved(config, overrides)}
    router = configs[0].router if configs else RouterConfig()
    http = {"host": router.host, "port": router.port, **deployment.get("http_options", {})}
    http |= {key: overrides[key] for key in ("host", "port") if key in overrides}
    deployment = {**deployment, "http_options": http}
    prefix = ours[0].get("route_prefix", "/") if ours else "/"
    return Plan(deployment, configs, http["host"], http["port"], prefix)


def _resolved(config: ServeSpecConfig, keys: Collection[str]) -> dict[str, Any]:
    """Return the validated values of leaf keys, as in JSON."""
    sections = config.model_dump(mode="json")
    return {key: sections[section][key] for key, section in leaf_sections().items() if key in keys}


def _checked(plan: Plan) -> Plan:
    """Download and check every checkpoint; raise as `check_model`."""
    configs = []
    for config in plan.configs:
        with _timed(f"finding and checking {config.model.path}"):
            configs.append(config.download())
            check_model(configs[-1])
    return replace(plan, configs=tuple(configs))


def check_model(config: ServeSpecConfig) -> None:
    """Raise what loading checkpoints and chat template would raise; reads no weights."""
    from serve_spec.engine.check import check_checkpoints  # takes seconds to import
    from serve_spec.serving.protocols.chat_template import ChatTemplate

    check_checkpoints(config)
    ChatTemplate.from_folder(config.model.tokenizer_folder, config.model.chat_template)


@contextmanager
def _timed(what: str) -> Iterator[None]:
    """Print what the body does, and how long it took."""
    began = time.monotonic()
    print(f"{what} ...", flush=True)
    yield
    print(f"{what}: done in {time.monotonic() - began:.1f} s", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="serve-spec serve",
        usage="serve-spec serve MODEL [options]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model(parser, positional=True, default=None)
    parser.add_argument(
        "--address",
        default=os.environ.get("RAY_ADDRESS"),
        help="address of a running Ray cluster (default: $RAY_ADDRESS, else a new local cluster)",
    )
    parser.add_argument("--dashboard", action="store_true", help="start the Ray dashboard")
    add_flags(parser)
    return parser


def prepare_environment(plan: Plan) -> None:
    """Set Serve's environment variables that are not set; a running cluster keeps its own."""
    from serve_spec.serving.proxy.settings import (
        CALLBACK,
        CALLBACK_VARIABLE,
        HEADER_TIMEOUT_VARIABLE,
        own_settings,
    )

    router = plan.configs[0].router if plan.configs else RouterConfig()
    settings = {**own_settings(router), CALLBACK_VARIABLE: CALLBACK, **_FLAT_MEMORY}
    for name, value in settings.items():
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
    try:
        with _timed("starting Ray"):
            size = size if own_cluster else {}
            ray.init(address or "local", logging_level=logging.ERROR, **size)
    except ConnectionError as error:
        print(f"address={address!r}: {error}", file=sys.stderr)
        return 1
    take_signals(stop)  # `ray.init` replaces the handler for SIGTERM
    has_ended = threading.Event()
    if own_cluster:
        threading.Thread(target=_watch_ray, args=(stop, has_ended), daemon=True).start()
    try:
        status = _run(plan, stop)
        _exit_after(plan.drain_s + 2 * _END_WITHIN_S, status)
        with redirect_stdout(io.StringIO()):
            _remove(plan)
    finally:
        has_ended.set()
    # Ray prints the end of its own controller as a failed task.
    with redirect_stdout(io.StringIO()):
        _exit_after(_END_WITHIN_S, status)
        if own_cluster:
            serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()
    return status


def _run(plan: Plan, stop: threading.Event) -> int:
    """Serve until `stop` is set; return 1 if an application does not start."""
    try:
        with _timed("starting the replicas"):
            _deploy(plan, stop)
    except StartFailed as error:
        print(error, file=sys.stderr)
        return 1
    if not stop.is_set():
        print(announcement(plan), flush=True)
        stop.wait()
    print("shutting down ...", flush=True)
    return 0


def _watch_ray(stop: threading.Event, has_ended: threading.Event) -> None:
    """Exit if a process of Ray ends that the others cannot do without.

    Calls of Ray's that wait for it would block the main thread for a minute, and abort.
    """
    from ray._private import worker

    node: Any = worker._global_node
    while not has_ended.wait(_POLL_S):
        for name, process in node.dead_processes():
            if name in _VITAL and not has_ended.is_set():
                why = f"Ray's {name} has ended ({_cause(process.returncode)}); so does the server"
                exit_now(0 if stop.is_set() else 1, why)


def _cause(status: int) -> str:
    return f"status {status}" if status >= 0 else signal.Signals(-status).name


def _exit_after(timeout_s: float, status: int) -> None:
    """End this process if it has not ended in time, such as in a call of Ray's."""
    timer = threading.Timer(
        timeout_s, exit_now, (status, "Ray does not end; its processes are killed")
    )
    timer.daemon = True
    timer.start()


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
    client = serve_start(
        http_options=schema.http_options.model_dump(), proxy_location=schema.proxy_location
    )
    client.deploy_apps(schema)
    names = {app.name for app in schema.applications}
    printed: set[str] = set()
    while not stop.wait(_POLL_S):
        apps = serve.status().applications
        _print_news([apps[name] for name in names & apps.keys()], printed)
        for name in names & apps.keys():
            if apps[name].status == "DEPLOY_FAILED":
                raise StartFailed(f"application {name!r} failed to start:\n{_reasons(apps[name])}")
        running = [name for name in names & apps.keys() if apps[name].status == "RUNNING"]
        # Applications of others may not have /health.
        if len(running) == len(names) and (not plan.configs or _answers(f"{plan.url}/health")):
            return


def _print_news(apps: Iterable[Any], printed: set[str]) -> None:
    """Print what Serve says of the deployments, such as missing GPUs, once."""
    for deployment in (d for app in apps for d in app.deployments.values()):
        news = deployment.message.partition("\n")[0]
        if news and news not in printed:
            printed.add(news)
            print(news, flush=True)


def _reasons(app: Any) -> str:
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
    from serve_spec.serving.protocols.chat_template import ChatTemplate

    if not plan.configs:
        return f"ready: {plan.url}"
    config = plan.configs[0]
    folder, file = config.model.tokenizer_folder, config.model.chat_template
    path, asked = "chat/completions", _CHAT
    if ChatTemplate.from_folder(folder, file).is_plain:
        path, asked = "completions", _CODE
    body = {"model": config.model.names[0], **asked, "max_tokens": 64, "temperature": 0}
    key = " -H 'Authorization: Bearer YOUR_API_KEY'" if config.router.api_keys else ""
    return (
        f"\nready: {config.model.names[0]} at {plan.url}   (Ctrl-C stops it)\n\n"
        f"curl -N {plan.url}/v1/{path} -H 'Content-Type: application/json'{key} "
        f"-d {shlex.quote(json.dumps({**body, 'stream': True}))}\n"
    )


def _check_port(host: str, port: int) -> None:
    """Raise ConfigError for a port in use; Serve would wait for it forever."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            holder = holder_of_port(port)
            why = f"{error.strerror}{f' by {holder}' if holder else ''}"
            raise ConfigError(f"port={port}: {why}; choose another --port") from None
