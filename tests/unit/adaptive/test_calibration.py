"""Laws of how shares of drafts become chances."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulator import admitted
from serve_spec.adaptive.drafts import DraftCalibration, logits
from serve_spec.core.round import AS_DRAWN, FROM_TEXT, GREEDY, SAMPLED
from serve_spec.ops.admission import admit_drafts

DEPTH = 4


def outcomes(rng, weight, bias, num=512):
    """Return shares [num, DEPTH], drafts verified and drafts accepted."""
    shares = np.log(rng.uniform(0.02, 0.98, (num, DEPTH)))
    chances = 1 / (1 + np.exp(-(weight * logits(shares) + bias)))
    correct = np.cumprod(rng.random((num, DEPTH)) < chances, axis=1).sum(axis=1)
    return shares, np.full(num, DEPTH), correct


def test_a_share_is_the_chance_before_anything_is_known():
    shares = np.log(np.array([[0.9, 0.5, 0.1, 0.01]]))
    chances = DraftCalibration(DEPTH).chances(shares, np.array([SAMPLED]))
    assert chances == pytest.approx(np.exp(shares), rel=1e-3)


@pytest.mark.parametrize(("weight", "bias"), [(1.0, 0.0), (0.6, 0.8), (1.5, -1.0)])
def test_the_pairs_that_made_the_outcomes_are_found(weight, bias):
    rng, fitted = np.random.default_rng(0), DraftCalibration(DEPTH)
    for _ in range(40):
        shares, verified, correct = outcomes(rng, weight, bias)
        fitted.learn(shares, np.full(len(shares), GREEDY), verified, correct)
    first = fitted.pairs([0.5])[GREEDY][0]
    assert first == pytest.approx((weight, bias), abs=0.2)


def test_one_kind_teaches_the_other_nothing():
    fitted = DraftCalibration(DEPTH)
    shares, verified, correct = outcomes(np.random.default_rng(1), 0.5, 1.0)
    fitted.learn(shares, np.full(len(shares), GREEDY), verified, correct)
    assert fitted.pairs([0.5])[SAMPLED] == AS_DRAWN[SAMPLED] * DEPTH


def test_drafts_that_were_not_verified_or_not_reached_do_not_count():
    fitted = DraftCalibration(DEPTH)
    shares = np.log(np.full((64, DEPTH), 0.5))
    fitted.learn(shares, np.zeros(64, int), np.full(64, 2), np.zeros(64, int))
    first, *others = fitted.snapshot()
    assert first["trials"] == pytest.approx(64, rel=0.01)
    assert not others


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from([0.0, -0.5, -100.0, float("nan"), float("-inf")]), min_size=4))
def test_no_share_breaks_the_fit(row):
    fitted = DraftCalibration(DEPTH)
    shares = np.array([row[:DEPTH]] * 8)
    for correct in (0, DEPTH):
        fitted.learn(shares, np.zeros(8, int), np.full(8, DEPTH), np.full(8, correct))
    chances = fitted.chances(shares, np.zeros(8, int))
    assert np.isfinite(fitted.pairs([0.5])[GREEDY]).all()
    assert ((chances >= 0) & (chances <= 1)).all()
    assert not chances[~(shares > -np.inf)].any()


def test_texts_are_taken_at_their_rates():
    weight, bias = DraftCalibration(DEPTH).pairs([0.8])[FROM_TEXT][0]
    assert weight == 0
    assert 1 / (1 + np.exp(-bias)) == pytest.approx(0.8, abs=1e-4)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 40), st.integers(0, 1000))
def test_the_simulator_admits_what_the_device_admits(budget, seed):
    rng = np.random.default_rng(seed)
    shares = np.log(rng.uniform(0.01, 0.99, (8, DEPTH)))
    drafted, kinds = rng.integers(0, DEPTH + 1, 8), rng.integers(0, 2, 8)
    calibration = (((0.8, 0.3), (1.1, -0.2)), ((1.0, 0.0),), ((1.0, 0.0),))
    mine = admitted(shares, drafted, kinds, calibration, budget)
    padded = [[*kind, *kind[-1:] * DEPTH][:DEPTH] for kind in calibration]
    device = admit_drafts(
        torch.tensor(shares, dtype=torch.float32),
        torch.tensor(drafted + 1, dtype=torch.int32),
        torch.full((8,), DEPTH, dtype=torch.int32),
        torch.tensor(kinds, dtype=torch.int32),
        torch.tensor(padded, dtype=torch.float32),
        torch.tensor([budget], dtype=torch.int32),
    )
    assert (device.query_lens - 1).tolist() == mine.tolist()
