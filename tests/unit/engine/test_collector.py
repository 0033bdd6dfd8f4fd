"""The figures of the collector follow from the steps that it observed."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_spec.core.record import StepTimes
from serve_spec.core.round import RoundNotes
from serve_spec.engine.collector import SPEED_ROUNDS, MetricsCollector
from tests.helpers.rounds import verified_round


def decode_round(
    num_steps=0,
    correct=0,
    rows=1,
    *,
    step_ms=10.0,
    draft_ms=None,
    verify_ms=5.0,
    idle_ms=0.0,
    **fields,
):
    """`rows` requests of `num_steps` drafts each, `correct` of them kept in each."""
    times = StepTimes(num_steps if draft_ms is None else draft_ms, verify_ms, step_ms, idle_ms)
    return verified_round([correct] * rows, rows, num_steps, times=times, **fields)


PREFILL = decode_round(rows=0, num_prefill_tokens=100)


def fed(*rounds, **window):
    collector = MetricsCollector(**window)
    for stats in rounds:
        collector.observe(stats)
    return collector


def view(collector):
    shown = collector.snapshot()
    assert json.loads(json.dumps(shown)) == shown, "the snapshot must survive JSON"
    return shown


def test_before_the_first_round_everything_is_unknown_and_nothing_fails():
    shown = view(MetricsCollector())
    assert shown["effective_speedup"] is None
    assert shown["by_batch_size"] == {}
    for span in ("window", "since_start"):
        assert shown[span]["rounds"] == 0
        assert shown[span]["accept_rate"] is None
        assert shown[span]["tokens_per_step"] is None
    assert MetricsCollector().speedup(0) is None
    assert MetricsCollector().speedup(4) is None


def test_means_weigh_drafts_and_rows_alike_and_medians_are_over_rounds():
    shown = view(fed(decode_round(2, 2, rows=10), decode_round(2, 0), decode_round(2, 1)))
    window = shown["window"]
    assert window["accept_rate"] == pytest.approx(21 / 24)
    assert window["accept_rate_p50"] == 0.5
    assert window["tokens_per_step"] == pytest.approx(33 / 12)
    assert window["tokens_per_step_p50"] == 2.0
    assert shown["since_start"]["accept_rate"] == window["accept_rate"]


def test_times_are_by_depth_and_of_rounds_without_prompts_alone():
    slow_prompt = decode_round(3, 1, num_prefill_tokens=50, verify_ms=500.0, step_ms=900.0)
    late = decode_round(3, 2, verify_ms=8.0, idle_ms=2.0)
    shown = view(fed(decode_round(3, 1), late, PREFILL, slow_prompt))
    assert shown["window"]["by_num_steps"] == {
        "3": {
            "rounds": 2,
            "draft_ms": {"mean": 3.0, "p50": 3.0},
            "verify_ms": {"mean": 6.5, "p50": 6.5},
            "step_ms": {"mean": 10.0, "p50": 10.0},
        }
    }
    for span in ("window", "since_start"):
        assert shown[span]["rounds"] == 3, "its tokens count all the same"
        assert shown[span]["overhead_ratio"] == pytest.approx(6 / 13, abs=1e-4)
        assert shown[span]["host_share"] == pytest.approx(1 / 20)
        assert shown[span]["idle_share"] == pytest.approx(2 / 20)


def test_a_step_without_times_leaves_the_times_of_the_others_alone():
    """Rates of acceptance count it."""
    timed = decode_round(3, 1)
    before, after = view(fed(timed)), view(fed(timed, replace(timed, times=None)))
    assert after["since_start"]["rounds"] == 2
    for known in ("busy_s", "overhead_ratio", "host_share", "accept_rate"):
        assert after["since_start"][known] == before["since_start"][known]
    assert after["by_batch_size"] == before["by_batch_size"]
    assert after["window"]["by_num_steps"] == before["window"]["by_num_steps"]


def test_stages_that_overlap_leave_no_negative_share_to_the_host():
    shown = view(fed(decode_round(3, 1, draft_ms=8.0, verify_ms=8.0)))
    assert shown["window"]["host_share"] == 0.0


def test_speedup_is_unknown_until_drafting_and_plain_rounds_of_a_size_were_measured():
    collector = fed(decode_round(3, 2), decode_round(rows=8))
    assert collector.speedup(1) is None
    assert collector.speedup(8) is None
    assert view(collector)["effective_speedup"] is None
    # 3 tokens a round, drafting 3 ms and verification 5.
    assert view(collector)["estimated_speedup"] == pytest.approx(3 / (1 + 3 / 5))
    collector.observe(decode_round(num_prefill_tokens=7))
    assert collector.speedup(1) is None, "a round with a prompt is no measure of plain decoding"
    collector.observe(decode_round(step_ms=5.0))
    assert collector.speedup(1) == pytest.approx(3 / 2), "3 tokens in 10 ms against 1 in 5"
    assert view(collector)["effective_speedup"] == pytest.approx(3 / 2)


def test_a_higher_depth_in_which_no_row_drafted_is_neither_plain_nor_drafting():
    undrafted = decode_round(num_steps=3, num_draft_tokens=0)
    assert view(fed(undrafted))["by_batch_size"]["1"]["tokens_per_ms"] == {}
    assert fed(undrafted, decode_round(3, 2)).speedup(1) is None


def test_speeds_are_per_row_so_that_sizes_of_one_bucket_compare():
    collector = fed(decode_round(rows=4), decode_round(3, 1, rows=7))
    assert collector.speedup(5) == pytest.approx(2.0)
    shown = view(collector)["by_batch_size"]["4"]
    assert shown == {"effective_speedup": 2.0, "tokens_per_ms": {"0": 0.4, "3": 1.4}}


def test_the_speedup_of_all_is_the_time_saved_over_the_whole_window():
    """Batch 1: 30 ms of plain rounds done in 10. Batch 8: 10 ms of plain rounds done in 20."""
    collector = fed(
        decode_round(), decode_round(rows=8), decode_round(3, 2), decode_round(3, 0, 8, step_ms=20)
    )
    assert view(collector)["effective_speedup"] == pytest.approx(40 / 30, abs=1e-4)


def test_an_old_speed_is_forgotten():
    slow = [decode_round(3, 2, step_ms=100.0)] * 50
    fast = [decode_round(3, 2)] * SPEED_ROUNDS
    assert fed(decode_round(), *slow, *fast).speedup(1) == pytest.approx(3.0)


def test_shares_of_probes_and_the_error_of_predictions_are_shown():
    collector = fed(
        decode_round(3, 1, notes=RoundNotes(is_probe=True)),
        decode_round(3, 1, notes=RoundNotes(predicted_ms=8.0)),
        decode_round(3, 1, notes=RoundNotes(predicted_ms=12.0)),
        decode_round(3, 1, notes=RoundNotes(predicted_ms=1.0), num_prefill_tokens=9),
    )
    window = view(collector)["window"]
    assert window["probe_share"] == 0.25
    assert window["measured_to_predicted_ms"] == 1.0


def test_expected_and_observed_drafts_are_of_the_same_rounds():
    collector = fed(
        decode_round(3, 2, rows=4, notes=RoundNotes(expected_drafts=10.0)),
        decode_round(3, 3, rows=4),
        decode_round(3, 1, rows=4, notes=RoundNotes(expected_drafts=2.0), num_stale_seqs=4),
    )
    for span in ("window", "since_start"):
        shown = view(collector)[span]
        assert shown["expected_correct_drafts"] == 11.0
        assert shown["observed_correct_drafts"] == 12
        assert shown["observed_to_expected_drafts"] == pytest.approx(12 / 11, rel=1e-4)


def test_budgets_and_the_drafts_they_leave_out_are_shown_by_position():
    cut = decode_round(
        steps_per_req=[3, 0], num_steps=3, rows=2, correct=0, drafted_per_req=[3, 3], budget=3
    )
    collector = fed(decode_round(3, 1), cut)
    assert view(collector)["draft_budget"] == 3
    for span in ("window", "since_start"):
        shown = view(collector)[span]
        assert (shown["budget_share"], shown["mean_budget"]) == (0.5, 3.0)
        assert shown["unverified_drafts"] == 3
        assert [tuple(position.values()) for position in shown["positions"]] == [
            # position, proposed, verified, reached, accepted, accept_rate
            (1, 3, 2, 2, 1, 0.5),
            (2, 3, 2, 1, 0, 0.0),
            (3, 3, 2, 0, 0, None),
        ]
    collector.observe(decode_round(3, 1))
    assert view(collector)["draft_budget"] is None, "every draft of the last round was verified"


ROUNDS = st.builds(
    decode_round,
    num_steps=st.integers(2, 3),
    correct=st.integers(0, 2),
    rows=st.integers(0, 20),
    step_ms=st.integers(1, 1000).map(float),
    num_prefill_tokens=st.integers(0, 1),
)


@settings(max_examples=50)
@given(st.lists(ROUNDS, max_size=40), st.integers(1, 10), st.integers(1, 40).map(lambda n: n / 4))
def test_the_window_holds_the_last_rounds_within_both_of_its_bounds(
    rounds, window_rounds, window_s
):
    window = view(fed(*rounds, window_rounds=window_rounds, window_s=window_s))["window"]
    age_ms, recent = 0.0, []
    for stats in reversed(rounds):
        if age_ms > window_s * 1e3:
            break
        recent += [stats] * bool(stats.batch_size)
        age_ms += stats.step_ms
    recent = recent[:window_rounds]
    assert window["rounds"] == len(recent)
    tokens, rows = (sum(getattr(s, n) for s in recent) for n in ("num_output_tokens", "batch_size"))
    assert window["tokens_per_step"] == (pytest.approx(tokens / rows, rel=1e-4) if rows else None)


def test_memory_does_not_grow_with_the_number_of_rounds():
    collector = MetricsCollector(window_rounds=16, window_s=1e9)
    for i in range(3000):
        collector.observe(decode_round(i % 4, 0, rows=1 + i % 64))
    assert len(collector._window) == 16
    sizes = [
        len(speed._rounds)
        for bucket in collector._buckets.values()
        for speed in (bucket.drafting, *bucket.by_shape.values())
    ]
    assert len(collector._buckets) == 7
    assert max(sizes) == SPEED_ROUNDS
