"""What one round reports."""

from __future__ import annotations

from dataclasses import replace

from serve_spec.metrics import METRICS, StepStats, readings

ROUND = StepStats(
    num_steps=3,
    batch_size=2,
    num_draft_tokens=6,
    num_correct_drafts=4,
    num_output_tokens=6,
    num_prefill_tokens=5,
    draft_ms=1.0,
    verify_ms=2.0,
    step_ms=4.0,
    num_running_seqs=3,
    num_waiting_seqs=1,
    num_used_pages=5,
    num_pages=20,
    switch_reason="gain",
    accept_lengths=(4, 2),
)
IDLE = replace(
    ROUND,
    num_steps=0,
    batch_size=0,
    num_draft_tokens=0,
    num_correct_drafts=0,
    num_output_tokens=0,
    num_prefill_tokens=0,
    draft_ms=0.0,
    switch_reason=None,
    accept_lengths=(),
)


def test_names_are_unique_and_say_their_unit() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert metric.name.startswith("serve_spec_")
        assert metric.help.endswith(".")
        assert (metric.kind == "histogram") == bool(metric.buckets)
        assert all(bound > 0 for bound in metric.buckets), "Ray refuses a bound of zero"


def test_a_full_round_feeds_every_metric_with_its_labels() -> None:
    found = list(readings(ROUND))
    assert {reading.metric for reading in found} == set(METRICS)
    for reading in found:
        assert set(reading.labels) == set(reading.metric.labels)


def test_a_counter_is_never_given_zero() -> None:
    for stats in (ROUND, IDLE, replace(ROUND, num_steps=0, num_draft_tokens=0)):
        for reading in readings(stats):
            assert reading.metric.kind != "counter" or reading.value > 0


def test_a_round_that_decodes_nothing_leaves_tier_and_batch_size_alone() -> None:
    names = {reading.metric.name for reading in readings(IDLE)}
    assert names == {
        "serve_spec_step_ms",
        "serve_spec_running_seqs",
        "serve_spec_waiting_seqs",
        "serve_spec_kv_usage_ratio",
    }
