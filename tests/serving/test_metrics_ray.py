"""What a real Ray exports, asked at the Prometheus endpoint of its node.

One application for all of it: a router, a replica, and a fake engine that reports rounds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from serve_spec.metrics import METRICS
from serve_spec.serving.ray_metrics import LABELS, exported_names
from tests.serving.cluster import eventually, local_serve
from tests.serving.texts import drafting

ENGINE = "tests.serving.reporting_engine:ReportingLoop"
COMPLETIONS = "/v1/completions"
# Of requests that are turned away at the door, or lose their replica, which this test does not do.
NOT_CAUSED = {"serve_spec_rejected_requests", "serve_spec_resumed_requests"}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    config = {
        **drafting(tmp_path_factory.mktemp("model")),
        "stats": {"push_interval_s": 0.2},
        "replica": {"graceful_shutdown_timeout_s": 1.0},
    }
    with local_serve(num_cpus=4) as url:
        from ray import serve

        from serve_spec.serving import build_app

        serve.run(build_app({"config": config, "engine_loop": ENGINE}), name="app")
        yield url


def exported() -> str:
    import ray

    (node,) = ray.nodes()
    port = node["MetricsExportPort"]
    return httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text


def test_every_metric_reaches_prometheus_under_the_names_we_say(url: str) -> None:
    answer = httpx.post(url + COMPLETIONS, json={"prompt": "a b", "max_tokens": 6})
    assert answer.status_code == 200
    wanted = {
        name
        for metric in METRICS
        if metric.name not in NOT_CAUSED
        for name in exported_names(metric)
    }

    def missing() -> set[str]:
        text = exported()
        return {name for name in wanted if not re.search(rf"^{name}{{", text, re.MULTILINE)}

    eventually(missing, lambda names: not names)
    text = exported()
    for line in text.splitlines():
        if line.startswith("ray_serve_spec_"):
            assert all(f'{label}="' in line for label in LABELS), line
    ours = httpx.get(url + "/metrics", timeout=30).text
    assert wanted <= {re.split(r"[{ ]", line)[0] for line in ours.splitlines()}
    assert "ray_serve_spec" in ours
    assert "ray_serve_deployment" not in ours
    # Named by rank: a replacement goes on with the series of the replica before it.
    assert 'deployment="EngineReplica"' in text
    assert re.search(r'ray_serve_spec_batch_size{[^}]*replica="0"', text)
    assert re.search(r'first_tokens_total{[^}]*measured_at="door"[^}]*} 1', text)


def test_the_page_and_its_figures_come_through_serve(url: str) -> None:
    assert "<title>serve_spec</title>" in httpx.get(url + "/").text
    status = eventually(
        lambda: httpx.get(url + "/status.json").json(), lambda s: bool(s["replicas"])
    )
    assert status["replicas"][0]["history"]["time_s"]
    assert Path(httpx.get(url + "/static/status.js").url.path).name == "status.js"
