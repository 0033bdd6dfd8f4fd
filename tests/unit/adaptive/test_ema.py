"""What serving adds around the documented rule: dwell and probe back-off, by withholding only."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from serve_spec.adaptive import AdaptiveStepSlot, Reason
from serve_spec.adaptive.ema import (
    DEFAULT_DWELL_ROUNDS,
    LAST_PROBE_WAIT_ROUNDS,
    GuardedSlot,
)


def guarded(
    candidate_steps: list[int],
    initial_steps: int,
    min_dwell_rounds: int = DEFAULT_DWELL_ROUNDS,
    **config: float,
) -> GuardedSlot:
    slot = AdaptiveStepSlot(initial_steps, {"candidate_steps": candidate_steps, **config})
    return GuardedSlot(slot, min_dwell_rounds)


def shown(target: GuardedSlot, name: str) -> int:
    figure = target.snapshot()[name]
    assert isinstance(figure, int)
    return figure


def waits_at_zero(target: GuardedSlot, kept: float, num_probes: int) -> list[int]:
    """Rounds at tier 0 before each of the next probes; every draft is kept with share `kept`."""
    waits = []
    rounds = 0
    while len(waits) < num_probes:
        at_zero = target.slot.current_steps == 0
        rounds = rounds + 1 if at_zero else 0
        target.update([round(kept * target.slot.current_steps)] * 2)
        if at_zero and target.slot.current_steps > 0:
            waits.append(rounds)
    return waits


def test_each_bad_probe_doubles_the_wait_from_5_to_640_rounds() -> None:
    slot = guarded([0, 1], 1, min_dwell_rounds=0)
    waits = waits_at_zero(slot, kept=0.0, num_probes=10)
    assert waits == [5, 10, 20, 40, 80, 160, 320, 640, 640, 640]


def test_by_default_no_probe_undercuts_the_dwell_either() -> None:
    slot = guarded([0, 1], 1)
    waits = waits_at_zero(slot, kept=0.0, num_probes=9)
    # Decisions fall on every fifth round: the first after both waits is the tenth.
    assert waits == [10, 10, 20, 40, 80, 160, 320, 640, 640]


def test_a_good_probe_resets_the_wait() -> None:
    slot = guarded([0, 1], 1, min_dwell_rounds=0)
    waits_at_zero(slot, kept=0.0, num_probes=5)
    assert shown(slot, "probe_wait_rounds") == 80
    while slot.is_probing:
        slot.update([1, 1])
    assert slot.slot.current_steps == 1
    assert shown(slot, "probe_wait_rounds") == 5
    assert waits_at_zero(slot, kept=0.0, num_probes=2) == [5, 10]


def test_with_hopeless_drafts_probes_are_a_small_share_of_all_rounds() -> None:
    documented = AdaptiveStepSlot(1, {"candidate_steps": [0, 1]})
    slot = guarded([0, 1], 1)
    drafting = 0
    for _ in range(5000):
        drafting += documented.current_steps > 0
        documented.update([0, 0])
        slot.update([0, 0])
    assert drafting > 2400, "the documented rule spends half of all rounds on probes"
    assert shown(slot, "num_probe_rounds") < 150


def test_a_tier_is_kept_for_at_least_the_dwell() -> None:
    # Rows that keep everything, then nothing: the average swings across every threshold.
    slot = guarded([1, 3, 7], 3, ema_alpha=1.0, warmup_batches=0, update_interval=1)
    switches = []
    for n in range(400):
        kept = slot.slot.current_steps if n % 2 else 0
        if slot.update([kept] * 2):
            switches.append(n)
    gaps = [b - a for a, b in pairwise([-1, *switches])]
    assert len(switches) > 10, "the input must make the slot want to move"
    assert min(gaps) == DEFAULT_DWELL_ROUNDS


def test_without_dwell_and_tier_zero_the_guard_changes_nothing() -> None:
    slot = guarded([1, 3, 7], 3, min_dwell_rounds=0)
    documented = AdaptiveStepSlot(3, {"candidate_steps": [1, 3, 7]})
    for n in range(200):
        kept = [(n * 7 + row) % (documented.current_steps + 1) for row in range(3)]
        assert slot.update(kept) == documented.update(kept)
        assert slot.slot.current_steps == documented.current_steps
        assert slot.slot.ema_accept_len == documented.ema_accept_len


@given(
    ladder=st.lists(st.integers(0, 8), min_size=1, max_size=4),
    dwell=st.integers(0, 12),
    shares=st.lists(st.lists(st.floats(0, 1), max_size=3), max_size=120),
)
def test_the_guard_withholds_decisions_and_never_adds_one(
    ladder: list[int], dwell: int, shares: list[list[float]]
) -> None:
    slot = guarded(ladder, 3, dwell, warmup_batches=2, update_interval=3)
    for row in shares:
        before = slot.slot.current_steps
        young = shown(slot, "rounds_at_tier") + 1 < dwell
        changed = slot.update([round(share * before) for share in row])
        assert changed == (slot.slot.current_steps != before)
        is_due = (slot.slot.batch_count - 2) % 3 == 0 and slot.slot.batch_count > 2
        assert not changed or (is_due and not young)
        assert slot.slot.current_steps in ladder
        assert shown(slot, "probe_wait_rounds") <= LAST_PROBE_WAIT_ROUNDS


def test_every_decision_says_why() -> None:
    slot = guarded([0, 1, 3], 1, min_dwell_rounds=8)
    reasons = [slot.reason]
    for n in range(200):
        slot.update([slot.slot.current_steps if n < 20 else 0] * 2)
        if slot.reason != reasons[-1]:
            reasons.append(slot.reason)
    assert reasons[:7] == [
        Reason.WARM_UP,
        Reason.GAIN,  # everything is kept: 1→3
        Reason.DWELL,
        Reason.STEADY,
        Reason.LOSS,  # nothing is kept: down to 0
        Reason.DWELL,
        Reason.PROBE,
    ]
    assert Reason.BACK_OFF in reasons
