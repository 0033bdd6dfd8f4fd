"""How the engine uses a policy: it asks for a depth, reports rounds and changes settings."""

import json
from dataclasses import replace

import pytest

from serve_spec.adaptive import AdaptiveController, PolicySettings
from serve_spec.adaptive.controller import FALLBACK_ROUNDS
from serve_spec.adaptive.goodput import GoodputPolicy
from serve_spec.config import ConfigError, SpeculativeConfig
from serve_spec.config.adaptive_file import load_slots
from serve_spec.core.draft import DraftShape
from serve_spec.core.round import Reason
from tests.helpers.rounds import decode_batch, verified_round
from tests.helpers.simulated_costs import GPU_8B, recorded_table

EAGER = {"ema_alpha": 1.0, "warmup_batches": 0, "update_interval": 1}
TWO_SLOTS = {**EAGER, "1": {"candidate_steps": [1, 3, 7]}, "8": {"candidate_steps": [1, 3]}}


def controller(config, num_steps=3, min_dwell_rounds=0):
    return AdaptiveController(
        PolicySettings(
            DraftShape.chain(num_steps),
            strategy="ema",
            slots=load_slots(config),
            min_dwell_rounds=min_dwell_rounds,
        )
    )


def depths(chooses):
    return tuple(shape.depth for shape in chooses.shapes if shape.is_chain)


def play(target, batch_size, kept):
    """Run a round in which each request keeps `kept(num_steps)` drafts; return its depth."""
    steps = choose(target, batch_size)
    observe(target, [kept(steps)] * batch_size, batch_size, steps)
    return steps


def choose(target, batch_size):
    return target.choose_steps(decode_batch(batch_size)).shape.depth


def observe(target, correct, batch_size, num_steps):
    target.on_verify_complete(verified_round(correct, batch_size, num_steps))


def everything(num_steps):
    return num_steps


def nothing(num_steps):
    return 0


def slot(target, key):
    return target.snapshot()["slots"][key]


@pytest.mark.parametrize("strategy", ["ema", "per_request", "goodput"])
@pytest.mark.parametrize("most", [1, 2, 4, 5, 8, 20])
def test_no_strategy_goes_deeper_by_itself_than_drafts_can_be(strategy, most):
    free, bound = (
        PolicySettings(
            DraftShape.chain(1), strategy=strategy, tree=DraftShape(3, 6, 2), max_steps=max_steps
        )
        for max_steps in (None, most)
    )
    assert bound.max_depth == min(most, free.max_depth)
    assert all(tree.depth <= most for tree in bound.trees)
    if strategy == "ema":
        assert set(depths(bound)) == {min(k, most) for k in depths(free)}


@pytest.mark.parametrize(
    ("correct", "num_steps"), [([0, 0], 0), ([3, 3], 3), ([7, 7], 7), ([], 1)], ids=str
)
def test_a_stale_result_or_one_without_requests_changes_neither_average_nor_count(
    correct, num_steps
):
    """The slot moved from 3 to 1; a round at 3 was under way."""
    made = controller(TWO_SLOTS)
    observe(made, [0, 0], 2, 3)
    before = slot(made, "1")
    assert before["current_steps"] == 1
    observe(made, correct, 2, num_steps)
    assert slot(made, "1") == before


def test_a_request_that_could_not_draft_the_whole_depth_is_no_failure_of_it():
    """Near its end, or capped by its request: all it drafted was kept, and reads as almost none."""
    made = controller(TWO_SLOTS, num_steps=7)
    whole, cut = [7] * 2, [1] * 5
    for _ in range(3):
        made.on_verify_complete(verified_round(whole + cut, 7, 7, steps_per_req=whole + cut))
    assert slot(made, "1")["ema_accept_len"] == 7.0
    assert choose(made, 7) == 7
    before = slot(made, "1")
    made.on_verify_complete(verified_round(cut, 7, 7, steps_per_req=cut))
    assert slot(made, "1") == before, "a round of such requests alone is not observed"


@pytest.mark.parametrize("strategy", ["ema", "per_request"])
def test_drafts_found_in_texts_do_not_count_for_the_model_that_drafts_beside_them(strategy):
    """All kept: alone they would raise what the model's, all lost, lower."""
    settings = PolicySettings(
        DraftShape.chain(3), strategy=strategy, slots=load_slots(TWO_SLOTS), min_dwell_rounds=0
    )
    made, without = AdaptiveController(settings), AdaptiveController(settings)
    for _ in range(3):
        steps = made.choose_steps(decode_batch(4))
        without.choose_steps(decode_batch(4))
        steps_per_req = list(steps.steps_per_req or [steps.shape.depth] * 4)
        kept = [0, 0, *steps_per_req[2:]]
        both = verified_round(kept, 4, steps.shape.depth, steps_per_req=steps_per_req)
        made.on_verify_complete(replace(both, is_ngram=[False, False, True, True]))
        plain = [*steps_per_req[:2], 0, 0]
        without.on_verify_complete(
            verified_round([0] * 4, 4, steps.shape.depth, steps_per_req=plain)
        )
    assert made.snapshot() == without.snapshot()


def test_switches_are_counted_by_reason():
    made = controller({**TWO_SLOTS, "8": {"candidate_steps": [0, 3]}})
    for batch_size, kept in [
        (2, everything),  # 3, and then up
        (2, nothing),  # 7, and then down to 1
        (2, nothing),  # 1
        (8, nothing),  # 3: another slot, and then down to 0
        (8, nothing),  # 0
    ]:
        play(made, batch_size, kept)
    assert made.snapshot()["switches"] == {"gain": 1, "loss": 2, "range": 1}
    while play(made, 8, nothing) == 0:
        pass
    snapshot = json.loads(json.dumps(made.snapshot()))
    assert snapshot["switches"] == {"gain": 1, "loss": 2, "range": 1, "probe": 1}
    assert sum(snapshot["rounds_by_reason"].values()) == made.num_rounds
    assert snapshot["rounds_by_reason"]["probe"] == 1
    assert snapshot["decision"].startswith("depth 3: ")
    assert (snapshot["slot"], snapshot["last_reason"]) == ("8", "probe")
    assert (snapshot["speculative_num_steps"], snapshot["slots"]["8"]["current_steps"]) == (3, 0)


def test_rounds_in_which_no_request_may_draft_have_a_reason_of_their_own():
    for strategy in ("static", "ema", "goodput"):
        settings = PolicySettings(DraftShape.chain(3), strategy=strategy)
        made = AdaptiveController(settings, recorded_table(GPU_8B))
        choose(made, 4)
        made.choose_steps(replace(decode_batch(4), max_steps=[0] * 4))
        assert made.snapshot()["last_reason"] == "limit"
        assert made.snapshot()["rounds_by_reason"]["limit"] == 1
        choose(made, 4)
        assert made.snapshot()["last_reason"] != "limit"


def test_a_batch_that_changes_slot_takes_its_depth_at_once_and_an_empty_one_decides_nothing():
    made = controller(TWO_SLOTS, num_steps=7, min_dwell_rounds=8)
    rounds = [(choose(made, bs), made.switch_reason) for bs in (7, 8, 9, 7)]
    assert rounds == [(7, None), (3, Reason.RANGE), (3, None), (7, Reason.RANGE)]
    counts = made.snapshot()
    assert counts["switches"] == {"range": 2}
    assert made.choose_steps(decode_batch(0)).shape.depth == 0
    assert made.switch_reason is None
    assert made.snapshot() == counts
    assert choose(made, 7) == 7


def test_a_live_change_replaces_the_policy_and_keeps_depth_and_counts():
    made = controller(TWO_SLOTS)
    play(made, 2, everything)
    play(made, 2, everything)
    made.reconfigure({"speculative_adaptive_config": {"candidate_steps": [3, 7]}})
    assert choose(made, 2) == 7
    assert made.snapshot()["rounds_by_num_steps"] == {"3": 1, "7": 2}
    made.reconfigure({"speculative_adaptive_strategy": "static", "speculative_num_steps": 3})
    assert {play(made, 2, everything) for _ in range(30)} == {3}
    assert made.snapshot()["switches"] == {"gain": 1, "reconfigured": 1}
    made.reconfigure({"speculative_adaptive_config": None})
    assert slot(made, "32")["candidate_steps"] == [1]


def test_a_live_change_applies_to_the_configuration_whatever_was_changed_before():
    """A replica that starts later must do what those do that went through every change."""
    changes = [
        {"speculative_adaptive": False, "speculative_num_steps": 7},
        {"speculative_adaptive_config": {"candidate_steps": [3, 7]}},
        {"min_dwell_rounds": 40},
        {},
    ]
    made = controller(TWO_SLOTS)
    for change in changes:
        newcomer = controller(TWO_SLOTS)
        made.reconfigure(change)
        newcomer.reconfigure(change)
        assert made.snapshot() == newcomer.snapshot()


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (
            {"min_dwell_rounds": 0, "speculative_adaptive_config": {"candidate_steps": [1, 5]}},
            "drafts of 5: not built at start; use some of 0, 1, 3, 7",
        ),
        ({"speculative_adaptive": False, "speculative_num_steps": 2}, "drafts of 2: not built"),
        ({"min_dwell_rounds": 0, "page_size": 3}, "page_size: unknown key"),
        ({"speculative_adaptive_strategy": "goodput"}, "drafts of 2, 4, 5, 6: not"),
    ],
)
def test_an_invalid_live_change_is_refused_as_a_whole(settings, complaint):
    made, untouched = controller(TWO_SLOTS), controller(TWO_SLOTS)
    with pytest.raises(ConfigError, match=complaint):
        made.reconfigure(settings)
    for n in range(60):
        kept = everything if n % 7 else nothing
        assert play(made, 1 + n % 9, kept) == play(untouched, 1 + n % 9, kept)
    assert made.snapshot() == untouched.snapshot()


def test_a_live_change_cannot_start_to_draft_without_a_draft_model():
    made = AdaptiveController(PolicySettings.of(SpeculativeConfig()))
    with pytest.raises(ConfigError, match="use some of 0 "):
        made.reconfigure({"speculative_adaptive": True})


def test_rates_of_the_fleet_are_what_the_policy_expects_of_unseen_drafts():
    """Also after a live change. Useless ones are refused; a policy without rates ignores them."""

    def rates():
        positions = target.snapshot()["acceptance"]["positions"]
        return [position["accept_rate"] for position in positions]

    settings = PolicySettings(DraftShape.chain(3))
    target = AdaptiveController(settings, recorded_table(GPU_8B, (1, 2, 4, 8)))
    known = [0.9, 0.5, 0.4, 0.3, 0.3, 0.3, 0.3]
    target.start_from(known)
    assert rates() == pytest.approx(known)
    target.reconfigure({"min_dwell_rounds": 2})
    assert rates() == pytest.approx(known)
    for useless in ([0.5], [0.5] * 6 + [1.5], [0.0] * 7):
        with pytest.raises(ValueError, match="prior_rates"):
            target.start_from(useless)
        assert rates() == pytest.approx(known)
    without_rates = controller(TWO_SLOTS)
    without_rates.start_from([0.9] * 3)
    assert choose(without_rates, 4) == 3


@pytest.mark.parametrize("method", ["choose", "observe"])
def test_a_policy_that_fails_is_off_for_a_while_and_then_built_anew(monkeypatch, method):
    def fail(*args):
        raise RuntimeError("defect")

    warnings = []
    settings = PolicySettings(DraftShape.chain(3), min_dwell_rounds=0)
    target = AdaptiveController(settings, recorded_table(GPU_8B), warnings.append)
    with monkeypatch.context() as patch:
        patch.setattr(GoodputPolicy, method, fail)
        play(target, 2, everything)
        assert {play(target, 2, everything) for _ in range(FALLBACK_ROUNDS - 2)} == {0}
    assert "RuntimeError('defect')" in warnings[0]
    assert {play(target, 2, everything) for _ in range(9)} != {0}
    assert target.snapshot()["fallback"] is None


@pytest.mark.parametrize(("num_steps", "most"), [(0, None), (1, 31), (3, 31), (7, 7), (8, None)])
def test_batches_of_a_depth_end_where_the_next_slots_are_less_deep(num_steps, most):
    slots = {str(key): {"candidate_steps": k} for key, k in ((1, [7]), (8, [1, 3]), (32, [0]))}
    settings = PolicySettings(DraftShape.chain(3), slots=load_slots(slots))
    assert settings.largest_batch(DraftShape.chain(num_steps)) == most
    assert replace(settings, adaptive=False).largest_batch(DraftShape.chain(num_steps)) is None


@pytest.mark.parametrize("strategy", ["static", "per_request", "goodput", "ema"])
def test_accepted_drafts_are_averaged_by_slot_under_every_strategy(strategy):
    slots = load_slots({"ema_alpha": 0.5, **{key: {"candidate_steps": [3]} for key in ("1", "4")}})
    made = AdaptiveController(
        PolicySettings(DraftShape.chain(3), strategy=strategy, slots=slots), recorded_table(GPU_8B)
    )
    for batch_size, kept in ((2, [1, 3]), (2, [0, 0]), (9, [2] * 9)):
        choose(made, batch_size)
        observe(made, kept, batch_size, 3)
    # A row that drafted nothing does not count.
    made.on_verify_complete(verified_round([2, 0], 9, 3, steps_per_req=[2, 0]))
    assert {key: slot(made, key)["ema_accept_len"] for key in ("1", "4")} == {"1": 1.0, "4": 2.0}
