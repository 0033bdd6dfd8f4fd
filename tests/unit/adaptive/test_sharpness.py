"""The sharpness of drafts: found by trying, at a bounded price, and left alone once found."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.adaptive import AdaptiveController, PolicySettings
from serve_spec.adaptive.sharpness import PROBE_EVERY_ROUNDS, SHARPNESSES, SharpnessPolicy
from serve_spec.config import SpeculativeConfig
from serve_spec.core.round import DRAFT_SHARPNESS
from tests.helpers.rounds import decode_batch, verified_round

START = SHARPNESSES[1]
STEPS = 4


def run(
    policy: SharpnessPolicy,
    rates: Callable[[int], Mapping[float, float]],
    num_rounds: int,
    batch_size: int = 64,
    seed: int = 0,
) -> list[float]:
    """What the policy chose in rounds whose drafts are kept with the chances of each sharpness."""
    rng = random.Random(seed)
    chosen = []
    for number in range(num_rounds):
        sharpness = policy.choose()
        chance = rates(number)[sharpness]
        correct = [_kept(rng, chance) for _ in range(batch_size)]
        policy.observe(sharpness, [(STEPS, kept) for kept in correct])
        chosen.append(sharpness)
    return chosen


def _kept(rng: random.Random, chance: float) -> int:
    count = 0
    while count < STEPS and rng.random() < chance:
        count += 1
    return count


@pytest.mark.parametrize("best", SHARPNESSES)
def test_it_comes_to_the_best_sharpness_and_stays(best: float) -> None:
    """Three in a hundred better is found within 4,000 rounds of 64 rows."""
    rates = {choice: 0.55 if choice == best else 0.52 for choice in SHARPNESSES}
    policy = SharpnessPolicy()
    chosen = run(policy, lambda _: rates, 4000)
    assert policy.best == best
    assert policy.num_switches == (best != START)
    tail = chosen[-PROBE_EVERY_ROUNDS * 20 :]
    assert tail.count(best) == PROBE_EVERY_ROUNDS * 20 - 20


@pytest.mark.parametrize("batch_size", [1, 8, 64])
def test_alike_they_are_left_alone(batch_size: int) -> None:
    policy = SharpnessPolicy()
    run(policy, lambda _: dict.fromkeys(SHARPNESSES, 0.5), 4000, batch_size)
    assert (policy.best, policy.num_switches) == (START, 0)


def test_traffic_that_changes_for_all_of_them_alike_is_no_difference() -> None:
    policy = SharpnessPolicy()
    run(policy, lambda n: dict.fromkeys(SHARPNESSES, 0.8 if n // 400 % 2 else 0.3), 4000)
    assert (policy.best, policy.num_switches) == (START, 0)


def test_it_follows_when_another_becomes_the_best() -> None:
    before, after = {0.7: 0.6, START: 0.5, 1.0: 0.5}, {0.7: 0.4, START: 0.5, 1.0: 0.5}
    policy = SharpnessPolicy()
    run(policy, lambda _: before, 1500)
    assert policy.best == 0.7
    run(policy, lambda _: after, 3000, seed=1)
    assert policy.best != 0.7


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=4), max_size=200
    ).map(lambda rounds: [[(k, min(k, c)) for k, c in rows] for rows in rounds])
)
def test_probes_never_exceed_their_share_of_the_rounds(
    rounds: list[list[tuple[int, int]]],
) -> None:
    policy = SharpnessPolicy()
    for number, rows in enumerate(rounds, start=1):
        before = policy.best
        sharpness = policy.choose()
        assert sharpness in SHARPNESSES
        policy.observe(sharpness, rows)
        assert policy.num_probes * PROBE_EVERY_ROUNDS <= number
        assert sharpness == before or number % PROBE_EVERY_ROUNDS == 0


def controller(**settings: object) -> AdaptiveController:
    config = SpeculativeConfig(
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path="asset:tiny/eagle3",
        speculative_adaptive=False,
        **settings,
    )
    return AdaptiveController(PolicySettings.of(config))


def test_only_rounds_that_draft_for_sampled_rows_try_anything() -> None:
    learning = controller()
    for _ in range(3 * PROBE_EVERY_ROUNDS):
        greedy = learning.choose_steps(decode_batch(4))
        assert greedy.draft_sharpness == DRAFT_SHARPNESS
    sampled = decode_batch(4, sampled=True)
    chosen = [learning.choose_steps(sampled).draft_sharpness for _ in range(PROBE_EVERY_ROUNDS)]
    assert len(set(chosen)) == 2


@pytest.mark.parametrize(
    ("is_sampled", "is_from_text"), [(True, False), (False, False), (True, True)]
)
def test_only_what_a_model_drafts_for_sampled_rows_is_learned_from(
    is_sampled: bool, is_from_text: bool
) -> None:
    """Every probe keeps all its drafts, every other round none: telling, if the rows sample."""
    learning = controller()
    for _ in range(100 * PROBE_EVERY_ROUNDS):
        sharpness = learning.choose_steps(decode_batch(2, sampled=True)).draft_sharpness
        told = verified_round(
            [3 if sharpness == 1.0 else 0, 3],
            2,
            3,
            draft_sharpness=sharpness,
            is_sampled=[is_sampled, False],
            is_from_text=[is_from_text, False],
        )
        learning.on_verify_complete(told)
    snapshot = learning.snapshot()["draft_sharpness"]
    assert isinstance(snapshot, dict)
    assert snapshot["best"] == (1.0 if is_sampled and not is_from_text else DRAFT_SHARPNESS)
    # The other row keeps everything, and of its drafts alone the counters hear then.
    accept_rate = learning.snapshot()["accept_rate"]
    assert isinstance(accept_rate, float)
    assert (accept_rate == 1.0) == is_from_text


def test_a_sharpness_that_is_given_is_what_every_round_drafts_at() -> None:
    fixed = controller(speculative_draft_sharpness=0.6)
    sampled = decode_batch(4, sampled=True)
    chosen = {fixed.choose_steps(sampled).draft_sharpness for _ in range(2 * PROBE_EVERY_ROUNDS)}
    assert chosen == {0.6}
