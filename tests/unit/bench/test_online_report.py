"""Figures of `bench online`: percentiles, speed, goodput and fractions, by their definitions."""

import json
import math
from collections import Counter
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_spec.bench.online.load import LoadRun, Served
from serve_spec.bench.online.report import (
    HTTP,
    OFFLINE,
    Objective,
    add_texts,
    against_offline,
    fleet_course,
    is_forced,
    measure,
    percentiles_ms,
    tables,
)

TIMES = st.floats(0, 100)


def answer(due=0.0, first=0.1, gap=0.05, chunks=3, **rest):
    """Chunks of two tokens, the first after `first` seconds."""
    times = tuple(due + first + gap * number for number in range(chunks))
    whole = Served(due, due, times[-1], times, "text", 2 * chunks, 10)
    return replace(whole, **rest)


def failed(error, due=0.0):
    return Served(due, due, due + 1, error=error)


def figures(*runs, objective=None, side=HTTP):
    texts = {}
    add_texts(texts, runs)
    return measure("load", side, runs, objective or Objective(), texts)


@given(st.lists(TIMES, min_size=1, max_size=60))
def test_percentiles_interpolate_between_neighbours_in_order(seconds):
    found = percentiles_ms(seconds)
    assert found is not None
    ordered = np.sort(seconds) * 1e3
    for name, fraction in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        place = fraction * (len(ordered) - 1)
        low, high = ordered[int(place)], ordered[min(int(place) + 1, len(ordered) - 1)]
        assert found[name] == pytest.approx(low + (high - low) * (place % 1), abs=1e-3)
    assert found["mean"] == pytest.approx(ordered.mean(), abs=1e-3)
    assert found["max"] == pytest.approx(ordered[-1], abs=1e-3)
    assert percentiles_ms([]) is None


answers = st.builds(
    answer, TIMES, st.floats(0.001, 2), st.floats(0.0, 1), st.integers(1, 9)
) | st.builds(failed, st.sampled_from(["429", "500", "disconnected"]), TIMES)


limits = st.just(math.inf) | st.floats(1, 2000)


@settings(max_examples=60)
@given(st.lists(answers, min_size=1, max_size=20), limits, limits, limits)
def test_goodput_counts_what_met_every_limit_of_everything_that_was_asked(
    served, ttft_ms, tpot_ms, e2el_ms
):
    bounds = [("ttft", 0.1), ("ttft", ttft_ms), ("tpot", tpot_ms), ("e2el", e2el_ms)]
    found = figures(LoadRun(served), objective=Objective.of(bounds))
    whole = [s for s in served if s.error is None]
    met = [
        s
        for s in whole
        if (s.chunk_s[0] - s.due_s) * 1e3 <= ttft_ms
        and (s.chunk_s[-1] - s.chunk_s[0]) / (s.num_tokens - 1) * 1e3 <= tpot_ms
        and (s.chunk_s[-1] - s.due_s) * 1e3 <= e2el_ms
    ]
    seconds = max(s.ended_s for s in served) - min(s.due_s for s in served)
    assert found["goodput_share"] == pytest.approx(len(met) / len(served))
    speed = sum(s.num_tokens for s in met) / seconds
    assert found["goodput_tokens_per_second"] == pytest.approx(speed)
    assert found["goodput_requests_per_second"] == pytest.approx(len(met) / seconds)
    assert found["goodput_tokens_per_second"] <= found["tokens_per_second"] * (1 + 1e-9)
    assert (found["num_requests"], found["num_texts"]) == (len(served), len(whole))
    assert found["errors"] == Counter(s.error for s in served if s.error is not None)


def test_speed_is_the_median_of_repetitions_and_latencies_are_pooled():
    runs = [LoadRun([answer(first=first)]) for first in (0.1, 0.9, 0.3)]
    found = figures(*runs)
    assert found["tokens_per_second"] == pytest.approx(6 / 0.4)
    assert found["tokens_per_second_low"] == pytest.approx(6 / 1.0)
    assert found["tokens_per_second_high"] == pytest.approx(6 / 0.2)
    assert (found["ttft_ms"]["p50"], found["ttft_ms"]["mean"]) == (300.0, pytest.approx(433.333))


def test_time_per_token_is_not_time_per_chunk():
    found = figures(LoadRun([answer(gap=0.05, chunks=3)]))
    assert found["tpot_ms"]["p50"] == pytest.approx(100 / 5)
    assert found["chunk_gap_ms"]["p50"] == pytest.approx(50)
    assert found["tokens_per_chunk"] == 2
    single = LoadRun([answer(chunks=1, num_tokens=1)])
    found = figures(single, objective=Objective(tpot_ms=1e-6))
    assert (found["tpot_ms"], found["goodput_share"]) == (None, 1.0), (
        "a single token meets any limit"
    )
    two = LoadRun([answer(first=0.1), answer(first=0.1001)])
    assert figures(two, objective=Objective(ttft_ms=100.0))["goodput_share"] == 0.5


def test_depths_are_means_over_rounds_not_over_requests():
    short = {"num_correct_drafts": 1, "rounds_by_num_steps": {"1": 1}}
    long = {"num_correct_drafts": 5, "rounds_by_num_steps": {"0": 1, "3": 2}}
    found = figures(LoadRun([answer(speculation=short), answer(speculation=long)]))
    assert found["rounds_by_num_steps"] == {"0": 1, "1": 1, "3": 2}
    assert (found["num_steps"], found["accept_length"]) == (7 / 4, 1 + 6 / 4)
    assert figures(LoadRun([answer()]))["accept_length"] is None


def test_forced_acceptance_is_noticed_by_any_answer():
    forced = answer(speculation={"synthetic_acceptance": True})
    assert is_forced(LoadRun([failed("429"), answer(), forced]))
    assert not is_forced(LoadRun([failed("429"), answer()]))


def test_a_text_is_compared_with_the_first_whole_one_of_its_request():
    runs = [
        LoadRun([failed("500"), answer(text="b")]),
        LoadRun([answer(text="a"), answer(text="c")]),
        LoadRun([answer(text="a"), answer(text="b")]),
    ]
    texts = {}
    add_texts(texts, runs)
    assert texts == {0: "a", 1: "b"}
    found = figures(*runs)
    assert (found["same_texts"], found["num_texts"]) == (4, 5)


def test_batch_sizes_are_means_of_a_replica_s_accounts_summed_over_replicas():
    accounts_of = {"a": [3, 5, None], "b": [1]}
    samples = [
        {"time_s": time, "replica": name, "batch_size": size, "num_steps": 2}
        for name, sizes in accounts_of.items()
        for time, size in enumerate(sizes)
    ]
    assert figures(LoadRun([answer()], samples))["batch_size"] == pytest.approx(4 + 1)
    assert figures(LoadRun([answer()]))["batch_size"] is None


def test_the_course_of_a_fleet_holds_the_latest_of_every_replica():
    def sample(time_s, replica, size):
        return {"time_s": time_s, "replica": replica, "batch_size": size}

    samples = [sample(1, "a", 3), sample(3, "a", 4), sample(2, "b", 7), sample(4, "b", None)]
    assert fleet_course(samples, "batch_size") == ([1, 2, 3], [[3], [3, 7], [4, 7]])
    assert fleet_course([], "batch_size") == ([], [])


def test_streams_that_decode_are_those_between_first_and_last_token():
    """Two streams of 0.1 s each within 0.4 s, and one that failed."""
    served = [answer(first=0.1), answer(due=0.1, first=0.2), failed("429", due=-0.6)]
    assert figures(LoadRun(served))["decoding_streams"] == pytest.approx(0.2 / 1.0)


def test_both_sides_of_a_load_are_compared():
    http = figures(LoadRun([answer(first=0.3)]))
    offline = figures(LoadRun([answer(first=0.1)]), side=OFFLINE)
    other = {**http, "load": "another load"}
    (row,) = against_offline([http, offline, other])
    assert row["tokens_per_second_over_offline"] == pytest.approx(0.2 / 0.4)
    assert row["added_ttft_ms_p50"] == pytest.approx(200)
    assert row["added_tpot_ms_p50"] == pytest.approx(0)


def test_a_load_that_was_refused_completely_still_has_its_row():
    refused = figures(LoadRun([failed("429"), failed("429"), failed("500")]))
    assert refused["errors"] == {"429": 2, "500": 1}
    assert (refused["ttft_ms"], refused["tokens_per_second"]) == (None, 0)
    offline = figures(LoadRun([answer()]), side=OFFLINE)
    found = json.loads(json.dumps([refused, offline]))
    shown = tables({"objective": asdict(Objective(ttft_ms=100))}, found)
    assert "2x 429 1x 500" in shown
    assert "TTFT <= 100 ms" in shown
