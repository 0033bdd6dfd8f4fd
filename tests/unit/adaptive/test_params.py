"""Routing by batch size, as documented."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.adaptive import AdaptiveSpeculativeParams
from serve_spec.config import ConfigError
from serve_spec.config.adaptive_file import PRESETS

AT_ONCE = {"ema_alpha": 1.0, "warmup_batches": 0, "update_interval": 1}


def fixed(**slots: int) -> AdaptiveSpeculativeParams:
    """Slots with one tier each, so that the tier tells the slot: fixed(_4=2) is {"4": [2]}."""
    config = {key.strip("_"): {"candidate_steps": [step]} for key, step in slots.items()}
    return AdaptiveSpeculativeParams(1, config)


@pytest.mark.parametrize(
    ("batch_size", "steps"), [(0, 1), (1, 1), (3, 1), (4, 1), (7, 1), (8, 2), (31, 2), (32, 3)]
)
def test_a_batch_goes_to_the_largest_slot_not_above_it_or_to_the_first(
    batch_size: int, steps: int
) -> None:
    params = fixed(_4=1, _32=3, _8=2)
    assert params.get_steps_for_batch(batch_size) == steps


@pytest.mark.parametrize(
    ("batch_size", "steps"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3), (16, 3), (17, 3), (100, 9)]
)
def test_a_batch_is_padded_to_the_next_captured_size_and_beyond_the_last_counts_itself(
    batch_size: int, steps: int
) -> None:
    params = fixed(_1=1, _8=2, _16=3, _64=9)
    params.set_cuda_graph_bs([16, 4, 8])
    assert params.get_steps_for_batch(batch_size) == steps


def test_forgetting_the_captured_sizes_ends_the_padding() -> None:
    params = fixed(_1=1, _8=2)
    params.set_cuda_graph_bs([8])
    assert params.get_steps_for_batch(5) == 2
    params.set_cuda_graph_bs(None)
    assert params.get_steps_for_batch(5) == 1


def test_the_captured_sizes_of_a_step_are_those_whose_slot_can_reach_it() -> None:
    params = AdaptiveSpeculativeParams(3)
    assert params.cuda_graph_bs_for_step(3) is None
    params.set_cuda_graph_bs([1, 2, 4, 8, 16, 32, 64])
    assert params.cuda_graph_bs_for_step(7) == [1, 2, 4]
    assert params.cuda_graph_bs_for_step(3) == [1, 2, 4, 8, 16]
    assert params.cuda_graph_bs_for_step(1) == [1, 2, 4, 8, 16, 32, 64]
    assert params.cuda_graph_bs_for_step(5) == []


def test_without_a_file_the_conservative_preset_rules() -> None:
    slots = AdaptiveSpeculativeParams(7).slots
    shape = {k: (s.candidate_steps, s.config.down_hysteresis) for k, s in slots.items()}
    assert shape == {1: ([1, 3, 7], -0.25), 8: ([1, 3], 0.0), 32: ([1], 0.0)}


def test_the_aggressive_preset_is_the_documented_one() -> None:
    slots = AdaptiveSpeculativeParams(7, PRESETS["aggressive"]).slots
    assert {k: (s.candidate_steps, s.config.ceiling_coeff) for k, s in slots.items()} == {
        1: ([1, 3, 7], 0.0),
        8: ([1, 3, 7], 3.0),
        64: ([1, 3], 1.67),
        128: ([1, 3], 1.2),
    }
    assert {s.config.down_hysteresis for s in slots.values()} == {-0.25}


def test_the_candidates_of_the_whole_are_the_union_over_slots() -> None:
    params = AdaptiveSpeculativeParams(
        1, {"1": {"candidate_steps": [7, 3]}, "8": {"candidate_steps": [0, 3]}}
    )
    assert params.candidate_steps == [0, 3, 7]


def test_a_path_is_read_and_a_bad_one_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"candidate_steps": [2, 5]}))
    assert AdaptiveSpeculativeParams(3, str(file)).candidate_steps == [2, 5]
    with pytest.raises(ConfigError, match=r"none\.json"):
        AdaptiveSpeculativeParams(3, tmp_path / "none.json")


def test_a_verified_round_teaches_the_slot_of_its_batch_alone() -> None:
    params = AdaptiveSpeculativeParams(1, {**PRESETS["conservative"], **AT_ONCE})
    assert params.on_verify_complete([1, 1], 2) == 3
    assert [params.get_steps_for_batch(bs) for bs in (2, 8, 32)] == [3, 1, 1]
    assert params.on_verify_complete([1, 1], 40) is None


@given(
    keys=st.sets(st.integers(1, 64), min_size=1, max_size=4),
    captured=st.none() | st.lists(st.integers(1, 80), max_size=5),
    batch_size=st.integers(1, 100),
)
def test_every_batch_is_given_a_candidate_of_the_slot_that_reaches_it(
    keys: set[int], captured: list[int] | None, batch_size: int
) -> None:
    params = AdaptiveSpeculativeParams(3, {str(key): {"candidate_steps": [key]} for key in keys})
    params.set_cuda_graph_bs(captured)
    steps = params.get_steps_for_batch(batch_size)
    key = params.slot_key(batch_size)
    assert steps in params.slots[key].candidate_steps
    reached = params.cuda_graph_bs_for_step(steps)
    if captured and batch_size in captured:
        assert reached is not None
        assert batch_size in reached
