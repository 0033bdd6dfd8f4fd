"""As many replicas as the requests ask for, whatever number of calls brought them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.serving.autoscaling import NUM_REQUESTS, replicas_for_requests


def wanted(metrics, target=48, now=2):
    """Replicas that the policy asks for, by what Serve tells it."""
    config = SimpleNamespace(get_target_ongoing_requests=lambda: target)
    context: Any = SimpleNamespace(
        aggregated_metrics=metrics, config=config, target_num_replicas=now, total_num_requests=1.0
    )
    return replicas_for_requests(context)[0]


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=16), st.floats(1, 100))
def test_each_replica_gets_its_target_however_the_requests_lie(reported, target):
    by_replica = {f"r{i}": number for i, number in enumerate(reported)}
    assert wanted({NUM_REQUESTS: by_replica}, target) * target == pytest.approx(sum(reported))


@pytest.mark.parametrize("now", [1, 4])
def test_without_a_report_nothing_changes(now):
    assert wanted({}, now=now) == now
