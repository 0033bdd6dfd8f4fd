"""What one round reports."""

from dataclasses import replace

import pytest

from serve_spec.core.draft import DraftShape
from serve_spec.core.record import StepTimes
from serve_spec.core.round import RoundNotes
from serve_spec.metrics import (
    BUDGET_ROUNDS,
    DRAFT_BUDGET,
    EXPECTED_DRAFTS,
    GRAMMAR_DRAFTS,
    GRAMMAR_TOKENS,
    MEASURED_MS,
    METRICS,
    OBSERVED_DRAFTS,
    OUTPUT_TOKENS,
    OVERHEAD,
    PREDICTED_GOODPUT,
    PREDICTED_MS,
    UNVERIFIED_DRAFTS,
    batch_size_bucket,
    readings,
)
from tests.helpers.rounds import verified_round
from tests.serving import fake_engine

ROUND = replace(
    fake_engine.ROUND,
    num_prefill_tokens=5,
    num_prefix_query_tokens=9,
    num_prefix_hit_tokens=4,
    grammar_drafts=((2, 1),),
    num_grammar_drafts=2,
    num_grammar_tokens=1,
    notes=replace(fake_engine.ROUND.notes, predicted_ms=None),
)
# Times of rounds are observed only if no prompt shared the step.
PURE = replace(ROUND, num_prefill_tokens=0, notes=replace(ROUND.notes, predicted_ms=3.5))
IDLE = verified_round([], batch_size=0, num_steps=0, times=StepTimes(0.0, 2.0, 4.0))


def test_names_are_unique_and_say_their_unit():
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert metric.name.startswith("serve_spec_")
        assert not metric.name.endswith(("_total", "_bucket", "_count", "_sum")), "exporters do"
        assert metric.help.endswith(".")
        assert (metric.kind in ("histogram", "distribution")) == bool(metric.buckets)
        assert all(bound > 0 for bound in metric.buckets), "Ray refuses a bound of zero"


def test_full_rounds_with_and_without_prompts_feed_every_metric_with_its_labels():
    found = [*readings(ROUND), *readings(PURE)]
    # Those of snapshots, requests and routers are declared after them.
    assert {reading.metric for reading in found} == set(METRICS[: METRICS.index(PREDICTED_GOODPUT)])
    for reading in found:
        assert set(reading.labels) == set(reading.metric.labels)


def test_rows_are_counted_by_the_tokens_they_emitted():
    record = replace(ROUND, accept_lengths=(4, 2, 4))
    found = {
        reading.labels["accept_length"]: reading.value
        for reading in readings(record)
        if reading.metric.name == "serve_spec_accept_length_requests"
    }
    assert found == {"4": 2, "2": 1}


def test_a_counter_is_never_given_zero():
    plain = verified_round([0, 0], batch_size=2, num_steps=0, times=ROUND.times)
    for record in (ROUND, PURE, IDLE, plain):
        for reading in readings(record):
            assert reading.metric.kind != "counter" or reading.value > 0


def test_a_round_that_decodes_nothing_leaves_depth_and_batch_size_alone():
    names = {reading.metric.name for reading in readings(IDLE)}
    assert names == {
        "serve_spec_step_ms",
        "serve_spec_running_seqs",
        "serve_spec_waiting_seqs",
        "serve_spec_kv_usage_ratio",
        "serve_spec_kv_pages",
    }


def values(record, *metrics):
    """The readings of these metrics, in the order asked for."""
    found = {reading.metric: reading.value for reading in readings(record)}
    return [found[metric] for metric in metrics if metric in found]


def by_position(record, metric):
    name = f"serve_spec_position_{metric}_tokens"
    return {r.labels["position"]: r.value for r in readings(record) if r.metric.name == name}


def test_drafts_outside_the_budget_are_proposed_and_not_verified():
    """Of 4, 3 and 2 drafts, 3, 1 and 0 are verified; 2, 1 and 0 accepted."""
    record = replace(
        ROUND,
        drafted_per_req=(4, 3, 2),
        steps_per_req=(3, 1, 0),
        correct_per_req=(2, 1, 0),
        budget=4,
    )
    assert by_position(record, "proposed") == {"1": 3, "2": 3, "3": 2, "4": 1}
    assert by_position(record, "drafted") == {"1": 2, "2": 1, "3": 1}
    assert by_position(record, "reached") == {"1": 2, "2": 1, "3": 1}
    assert by_position(record, "accepted") == {"1": 2, "2": 1}
    assert values(record, UNVERIFIED_DRAFTS, DRAFT_BUDGET, BUDGET_ROUNDS) == [5, 4, 1]
    every = replace(record, budget=None, drafted_per_req=())
    assert by_position(every, "proposed") == by_position(every, "drafted")
    assert values(every, UNVERIFIED_DRAFTS, DRAFT_BUDGET, BUDGET_ROUNDS) == []


def test_levels_of_a_tree_are_not_counted_by_its_drafts():
    tree = replace(ROUND, shape=DraftShape(2, 6, 3), steps_per_req=(2, 2), drafted_per_req=(6, 6))
    assert by_position(tree, "proposed") == by_position(tree, "drafted") == {"1": 2, "2": 2}
    assert values(replace(tree, num_draft_tokens=9, budget=9), UNVERIFIED_DRAFTS) == [3]


def test_grammar_drafts_count_apart_from_others():
    forced = replace(
        PURE, grammar_drafts=[(5, 4), (3, 0)], num_grammar_drafts=8, num_grammar_tokens=4
    )
    plain = replace(PURE, grammar_drafts=(), num_grammar_drafts=0, num_grammar_tokens=0)
    names = GRAMMAR_DRAFTS, GRAMMAR_TOKENS
    assert values(forced, *names) == [8, 4]
    others = [
        [r for r in readings(record) if r.metric not in names and r.metric is not OUTPUT_TOKENS]
        for record in (forced, plain)
    ]
    assert others[0] == others[1]
    assert values(forced, OUTPUT_TOKENS)[0] == values(plain, OUTPUT_TOKENS)[0] + 4


def test_expected_drafts_are_compared_with_those_of_the_same_requests():
    """Two of four planned requests ended meanwhile, so half of the expected drafts count."""
    expected = replace(PURE, num_stale_seqs=2, notes=RoundNotes(expected_drafts=5.0))
    assert values(expected, EXPECTED_DRAFTS, OBSERVED_DRAFTS) == [2.5, 4]
    silent = replace(expected, notes=RoundNotes())
    assert values(silent, EXPECTED_DRAFTS, OBSERVED_DRAFTS) == []


@pytest.mark.parametrize(("batch_size", "bucket"), [(1, 1), (2, 2), (3, 2), (8, 8), (255, 128)])
def test_a_bucket_is_the_power_of_two_at_or_below(batch_size, bucket):
    assert batch_size_bucket(batch_size) == bucket
    found = readings(replace(PURE, accept_lengths=[1] * batch_size))
    labels = {r.labels["batch_size"] for r in found if "batch_size" in r.labels}
    assert labels == {str(bucket)}


def test_a_prompt_in_the_round_hides_what_its_time_would_say():
    names = OVERHEAD, PREDICTED_MS, MEASURED_MS
    assert values(PURE, *names) == pytest.approx([1 / 2, 3.5, 4.0])
    assert values(replace(PURE, notes=RoundNotes()), *names) == pytest.approx([1 / 2])
    for other in (ROUND, replace(PURE, num_prefill_tokens=1), IDLE):
        assert values(other, *names) == []
    for verify_ms in (0.0, 2.0):
        plain = replace(PURE, times=StepTimes(0.0, verify_ms, 4.0))
        assert plain.overhead_ratio == 0.0, "a round without drafts has none"
