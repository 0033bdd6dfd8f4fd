"""`GET /metrics`: our metrics of all nodes, as Prometheus reads them, from one address.

Ray serves every node's metrics, its own included, at a port of that node. This is for whoever can
reach the router only; who scrapes the nodes needs it not.
"""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Iterable

import ray

from serve_spec.log import get_logger

logger = get_logger(__name__)

_PREFIX = "ray_serve_spec_"
_ANSWER_WITHIN_S = 2.0


async def fleet_metrics() -> str:
    """What every living node exports of ours; a node that does not answer is left out."""
    nodes = await asyncio.to_thread(ray.nodes)
    urls = [
        f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        for node in nodes
        if node["Alive"]
    ]
    return ours(await asyncio.gather(*(asyncio.to_thread(_read, url) for url in urls)))


def ours(expositions: Iterable[str]) -> str:
    """Our metrics of several expositions as one: each metric's samples stand together."""
    comments: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for text in expositions:
        name = ""
        for line in text.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                name = line.split(" ", 3)[2]
                known = comments.setdefault(name, [])
                if line[:7] not in {comment[:7] for comment in known}:
                    known.append(line)
            else:
                samples.setdefault(name, []).append(line)
    return "".join(
        f"{line}\n"
        for name, lines in samples.items()
        if name.startswith(_PREFIX)
        for line in (*comments[name], *lines)
    )


def _read(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=_ANSWER_WITHIN_S) as answer:
            text: str = answer.read().decode()
    except OSError as error:
        logger.warning("no metrics of one node: %s: %r", url, error)
        return ""
    return text
