"""As many replicas as the requests ask for, whatever number of calls brought them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from serve_spec.serving.autoscaling import NUM_REQUESTS, replicas_for_requests

DEPLOYMENT = DeploymentID(name="EngineReplica", app_name="serve_spec")


def context(reported: list[float] | None, target: float = 48, now: int = 2) -> AutoscalingContext:
    """What Serve would tell the policy; `reported`: requests by replica, None before any report."""
    replicas = [ReplicaID(str(i), deployment_id=DEPLOYMENT) for i in range(len(reported or []))]
    by_replica = dict(zip(replicas, reported or [], strict=True))
    return AutoscalingContext(
        deployment_id=DEPLOYMENT, deployment_name=DEPLOYMENT.name, app_name=DEPLOYMENT.app_name,
        current_num_replicas=now, target_num_replicas=now, running_replicas=replicas,
        total_num_requests=1.0, total_queued_requests=0.0,
        aggregated_metrics={} if reported is None else {NUM_REQUESTS: by_replica}, raw_metrics={},
        capacity_adjusted_min_replicas=1, capacity_adjusted_max_replicas=64, policy_state={},
        last_scale_up_time=None, last_scale_down_time=None, current_time=0.0,
        config=AutoscalingConfig(max_replicas=64, target_ongoing_requests=target),
    )  # fmt: skip


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=16), st.floats(1, 100))
def test_each_replica_gets_its_target_however_the_requests_lie(
    reported: list[float], target: float
) -> None:
    wanted, _ = replicas_for_requests(context(reported, target))
    assert wanted * target == pytest.approx(sum(reported))


def test_serves_own_count_of_calls_changes_nothing() -> None:
    few_calls = context([100.0, 44.0])
    assert few_calls.total_num_requests == 1.0
    assert replicas_for_requests(few_calls)[0] == 3


@pytest.mark.parametrize("now", [1, 4])
def test_without_a_report_nothing_changes(now: int) -> None:
    assert replicas_for_requests(context(None, now=now))[0] == now


def test_without_requests_none_are_asked_for() -> None:
    assert replicas_for_requests(context([0.0, 0.0]))[0] == 0
