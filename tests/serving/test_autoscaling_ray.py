"""Serve adds and removes replicas as the shipped deployment asks for, on a real Ray."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from serve_spec.serving.deploy_file import APP_IMPORT_PATH
from tests.serving.cluster import ROOT, eventually, local_serve
from tests.serving.reporting_engine import RATES
from tests.serving.texts import drafting

SHIPPED = ROOT / "deploy/four-replicas.yaml"
QUICK = {
    "min_replicas": 1,
    "max_replicas": 2,
    "target_ongoing_requests": 2,
    "upscale_delay_s": 0.5,
    "downscale_delay_s": 0.5,
    "look_back_period_s": 2.0,
}
WITHIN_S = 120


def shipped_autoscaling() -> dict[str, Any]:
    """That of the shipped file, for a small and hasty fleet."""
    (app,) = yaml.safe_load(SHIPPED.read_text())["applications"]
    (engines,) = (d for d in app["deployments"] if d["name"] == "EngineReplica")
    return {**engines["autoscaling_config"], **QUICK}


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx.Client]:
    monkeypatch.setenv("RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S", "0.5")
    config = {
        **drafting(tmp_path),
        "stats": {"push_interval_s": 0.2, "stale_after_s": 2.0},
        "replica": {"num_replicas": 2, "graceful_shutdown_timeout_s": 1.0},
    }
    app = {
        "name": "growing",
        "import_path": APP_IMPORT_PATH,
        "args": {"config": config, "engine_loop": "tests.serving.reporting_engine:ReportingLoop"},
        "deployments": [
            {
                "name": "EngineReplica",
                "num_replicas": "auto",
                "autoscaling_config": shipped_autoscaling(),
            }
        ],
    }
    with local_serve(num_cpus=4) as url, httpx.Client(base_url=url, timeout=60) as client:
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        serve_client = _get_global_client()
        serve_client.deploy_apps(ServeDeploySchema.model_validate({"applications": [app]}))
        eventually(lambda: client.get("/health").status_code, lambda said: said == 200, WITHIN_S)
        yield client


def test_replicas_come_and_go_with_the_requests_and_start_from_what_the_fleet_knows(
    client: httpx.Client,
) -> None:
    def started_from() -> list[Any]:
        states = client.get("/server_info").json()["internal_states"]
        return [state["started_from"] for state in states if not state["stale"]]

    client.post("/v1/completions", json={"prompt": "a b"}).raise_for_status()
    eventually(started_from, lambda found: found == [None])
    # Two calls with four requests: Serve's own policy would count two, and two are the target.
    held = {"prompt": ["hold on"] * 4, "max_tokens": 9, "stream": True}
    with client.stream("POST", "/v1/completions", json=held) as answer:
        lines = answer.iter_lines()  # kept: a generator that nobody holds closes the stream
        assert "hold on" in next(lines)
        found = eventually(started_from, lambda found: len(found) == 2, WITHIN_S)
        assert sorted(map(repr, found)) == sorted([repr(None), repr(RATES)])
    eventually(lambda: len(started_from()), lambda number: number == 1, WITHIN_S)
