"""What the engine relies on, and the known mistakes that must not come back."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.adaptive import AdaptiveController, PolicySettings, Reason
from serve_spec.adaptive.controller import FALLBACK_ROUNDS
from serve_spec.adaptive.goodput import GoodputPolicy
from serve_spec.config import ConfigError, SpeculativeConfig
from serve_spec.config.adaptive_file import load_slots
from serve_spec.core.draft_shape import DraftShape
from serve_spec.core.record import StepTimes
from tests.helpers.rounds import decode_batch, verified_round
from tests.helpers.simulated_costs import GPU_8B, recorded_table

EAGER = {"ema_alpha": 1.0, "warmup_batches": 0, "update_interval": 1}
TWO_SLOTS = {**EAGER, "1": {"candidate_steps": [1, 3, 7]}, "8": {"candidate_steps": [1, 3]}}


def speculative(**keys: Any) -> SpeculativeConfig:
    """A section that drafts; any folder that exists can stand for the checkpoint."""
    drafts = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": Path.cwd()}
    return SpeculativeConfig(**(drafts | keys))


def ema_from(file: Path) -> SpeculativeConfig:
    """Strategy ema with the adaptive config of a file."""
    return speculative(speculative_adaptive_strategy="ema", speculative_adaptive_config=file)


def controller(
    config: dict[str, Any], num_steps: int = 3, min_dwell_rounds: int = 0
) -> AdaptiveController:
    """An ema controller over the slots of `config`."""
    return AdaptiveController(
        PolicySettings(
            DraftShape.chain(num_steps),
            strategy="ema",
            slots=load_slots(config),
            min_dwell_rounds=min_dwell_rounds,
        )
    )


def depths(chooses: AdaptiveController | PolicySettings) -> tuple[int, ...]:
    """Of the chains it may choose."""
    return tuple(shape.depth for shape in chooses.shapes if shape.is_chain)


def play(target: AdaptiveController, batch_size: int, kept: Callable[[int], int]) -> int:
    """One round in which every row keeps `kept(num_steps)` drafts; its tier."""
    steps = choose(target, batch_size)
    told(target, [kept(steps)] * batch_size, batch_size, steps)
    return steps


def choose(target: AdaptiveController, batch_size: int) -> int:
    """The tier of a round."""
    return target.choose_steps(decode_batch(batch_size)).shape.depth


def told(
    target: AdaptiveController, correct: list[int], batch_size: int, num_steps: int
) -> int | None:
    """Reports a round; the tier of the batch's slot if that changed."""
    before = choose_of_slot(target, batch_size)
    target.on_verify_complete(verified_round(correct, batch_size, num_steps))
    after = choose_of_slot(target, batch_size)
    return None if after == before else after


def choose_of_slot(target: AdaptiveController, batch_size: int) -> int | None:
    """The tier the slot of `batch_size` stands at, without choosing."""
    slots: Any = target.snapshot()["slots"]
    keys = [int(key) for key in slots]
    below = [key for key in keys if key <= batch_size] or [min(keys)] if keys else []
    return slots[str(max(below))].get("current_steps") if below else None


def everything(num_steps: int) -> int:
    return num_steps


def nothing(num_steps: int) -> int:
    return 0


def slot(target: AdaptiveController, key: str) -> dict[str, Any]:
    slots: Any = target.snapshot()["slots"]
    found: dict[str, Any] = slots[key]
    return found


def test_ema_follows_the_conservative_preset_by_default() -> None:
    made = AdaptiveController.create(speculative(speculative_adaptive_strategy="ema"))
    assert depths(made) == (1, 3, 7)
    assert [choose(made, bs) for bs in (1, 8, 32)] == [3, 3, 1]


def test_the_adaptive_config_of_the_configuration_is_used(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"candidate_steps": [0, 5]}))
    made = AdaptiveController.create(ema_from(file))
    assert depths(made) == (0, 5)
    assert choose(made, 1) == 5


@pytest.mark.parametrize(
    "keys",
    [{"speculative_adaptive": False}, {"speculative_adaptive_strategy": "static"}],
)
@pytest.mark.parametrize("num_steps", [0, 2, 5])
def test_a_static_tier_never_moves(keys: dict[str, Any], num_steps: int) -> None:
    made = AdaptiveController.create(speculative(speculative_num_steps=num_steps, **keys))
    assert depths(made) == (num_steps,)
    assert {play(made, bs, nothing) for bs in range(1, 60)} == {num_steps}
    assert made.snapshot()["strategy"] == "static"


def test_without_a_draft_model_the_tier_is_zero() -> None:
    made = AdaptiveController.create(SpeculativeConfig())
    assert depths(made) == (0,)
    assert {play(made, bs, nothing) for bs in (1, 40)} == {0}


@pytest.mark.parametrize("strategy", ["ema", "per_request", "goodput"])
@pytest.mark.parametrize("most", [1, 2, 4, 5, 8, 20])
def test_no_strategy_goes_deeper_by_itself_than_drafts_can_be(strategy: Any, most: int) -> None:
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


def test_known_mistake_1_a_stale_result_changes_neither_average_nor_count() -> None:
    made = controller(TWO_SLOTS, num_steps=7)
    before = slot(made, "1")
    for stale_tier in (0, 1, 3):
        assert told(made, [stale_tier] * 2, 2, stale_tier) is None
    assert slot(made, "1") == before
    assert made.snapshot()["num_stale_rounds"] == 3


def test_known_mistake_1_a_result_that_arrives_after_the_switch_is_stale() -> None:
    made = controller(TWO_SLOTS)
    assert told(made, [0, 0], 2, 3) == 1
    average = slot(made, "1")["ema_accept_len"]
    assert told(made, [3, 3], 2, 3) is None  # the round that was under way
    assert slot(made, "1")["ema_accept_len"] == average


def test_known_mistake_2_a_round_without_live_rows_teaches_nothing() -> None:
    made = controller(TWO_SLOTS)
    before = slot(made, "1")
    assert told(made, [], 4, 3) is None
    assert slot(made, "1") == before
    assert made.snapshot()["accept_rate"] is None


def test_known_mistake_2_a_row_that_could_not_draft_the_whole_tier_is_no_failure_of_it() -> None:
    """Near its end, or capped by its request: all it drafted was kept, and reads as almost none."""
    made = controller(TWO_SLOTS, num_steps=7)
    whole, cut = [7] * 2, [1] * 5
    for _ in range(3):
        made.on_verify_complete(verified_round(whole + cut, 7, 7, row_steps=whole + cut))
    assert slot(made, "1")["ema_accept_len"] == 7.0
    assert choose(made, 7) == 7
    before = slot(made, "1")
    made.on_verify_complete(verified_round(cut, 7, 7, row_steps=cut))
    assert slot(made, "1") == before, "a round of such rows alone says nothing"


@pytest.mark.parametrize("strategy", ["ema", "per_request"])
def test_drafts_found_in_texts_say_nothing_of_the_model_that_drafts_beside_them(
    strategy: Any,
) -> None:
    """All kept: alone they would raise what the model's, all lost, lower."""
    settings = PolicySettings(
        DraftShape.chain(3), strategy=strategy, slots=load_slots(TWO_SLOTS), min_dwell_rounds=0
    )
    made, without = AdaptiveController(settings), AdaptiveController(settings)
    for _ in range(3):
        steps = made.choose_steps(decode_batch(4))
        without.choose_steps(decode_batch(4))
        row_steps = list(steps.row_steps or [steps.shape.depth] * 4)
        kept = [0, 0, *row_steps[2:]]
        told_both = verified_round(kept, 4, steps.shape.depth, row_steps=row_steps)
        made.on_verify_complete(replace(told_both, is_from_text=[False, False, True, True]))
        plain = [*row_steps[:2], 0, 0]
        without.on_verify_complete(verified_round([0] * 4, 4, steps.shape.depth, row_steps=plain))
    assert made.snapshot() == without.snapshot()


def test_known_mistake_3_serving_backs_off_from_bad_probes_by_default(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"candidate_steps": [0, 1]}))
    made = AdaptiveController.create(ema_from(file))
    tiers = [play(made, 4, nothing) for _ in range(2000)]
    assert sum(tiers[-1000:]) <= 20, "at most two probes of ten rounds in the last thousand"
    assert slot(made, "1")["probe_wait_rounds"] == 640


def test_known_mistake_4_serving_keeps_a_tier_for_eight_rounds_by_default() -> None:
    settings = PolicySettings(DraftShape.chain(3), strategy="ema", slots=load_slots(TWO_SLOTS))
    made = AdaptiveController(settings)
    tiers = [play(made, 2, everything if n % 3 else nothing) for n in range(300)]
    changes = [n for n in range(1, 300) if tiers[n] != tiers[n - 1]]
    assert len(changes) > 10, "the input must make the slot want to move"
    assert min(b - a for a, b in pairwise(changes)) >= 8


def test_known_mistake_4_switches_are_counted_by_reason() -> None:
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
    assert made.snapshot()["switches"] == {"gain": 1, "loss": 2, "range": 1, "probe": 1}


def test_known_mistake_8_each_round_teaches_the_slot_of_the_decode_rows_it_was_asked_with() -> None:
    made = controller(TWO_SLOTS)
    assert choose(made, 7) == 3
    # Only four of the seven rows drafted in full; the round still belongs to batch size 7.
    assert told(made, [3, 3, 3, 3], 7, 3) == 7
    assert slot(made, "8")["num_rounds"] == 0


def test_known_mistake_9_the_accept_rate_divides_by_what_was_drafted() -> None:
    made = controller({**EAGER, "candidate_steps": [1, 7]}, num_steps=1)
    for _ in range(50):
        play(made, 2, everything)
    snapshot = made.snapshot()
    assert snapshot["accept_rate"] == 1.0
    assert snapshot["learned_draft_tokens"] == 2 * (1 + 49 * 7)


def test_known_mistake_9_every_row_is_divided_by_its_own_drafts() -> None:
    made = controller({**EAGER, "candidate_steps": [1, 7]}, num_steps=7)
    choose(made, 3)
    made.on_verify_complete(verified_round([7, 1, 0], 3, 7, row_steps=[7, 1, 0]))
    snapshot: Any = made.snapshot()
    assert (snapshot["learned_draft_tokens"], snapshot["accept_rate"]) == (8, 1.0)
    assert [entry["accept_rate"] for entry in snapshot["positions"]] == [1.0] * 7


@pytest.mark.parametrize("counts", [[4], [-1], [0, 9]])
def test_a_count_outside_the_drafts_of_its_round_is_refused(counts: list[int]) -> None:
    made = controller(TWO_SLOTS)
    with pytest.raises(ValueError, match=rf"num_correct_drafts=\[{counts[0]}"):
        told(made, counts, 2, 3)
    assert made.snapshot()["learned_draft_tokens"] == 0


def test_an_empty_batch_is_no_decision() -> None:
    target = controller(TWO_SLOTS)
    assert choose(target, 4) == 3
    counts = target.snapshot()
    assert target.choose_steps(decode_batch(0)).shape.depth == 0
    assert target.switch_reason is None
    assert target.snapshot() == counts
    assert choose(target, 4) == 3


def test_a_batch_that_changes_slot_takes_its_tier_at_once() -> None:
    made = controller(TWO_SLOTS, num_steps=7, min_dwell_rounds=8)
    rounds = [(choose(made, bs), made.switch_reason) for bs in (7, 8, 9, 7)]
    assert rounds == [(7, None), (3, Reason.RANGE), (3, None), (7, Reason.RANGE)]
    assert made.snapshot()["switches"] == {"range": 2}


@given(
    ladders=st.dictionaries(
        st.sampled_from(["1", "4", "9"]),
        st.lists(st.integers(0, 8), min_size=1, max_size=4),
        min_size=1,
    ),
    rounds=st.lists(st.tuples(st.integers(1, 12), st.floats(0, 1)), max_size=60),
    dwell=st.integers(0, 10),
)
def test_every_choice_is_a_candidate_of_the_slot_and_was_announced_to_the_worker(
    ladders: dict[str, list[int]], rounds: list[tuple[int, float]], dwell: int
) -> None:
    slots = {key: {"candidate_steps": ladder} for key, ladder in ladders.items()}
    made = controller({**EAGER, **slots}, min_dwell_rounds=dwell)
    for batch_size, share in rounds:
        steps = play(made, batch_size, lambda k, share=share: round(share * k))
        assert steps in ladders[str(made.snapshot()["slot"])]
        assert steps in depths(made)
    counted: Any = made.snapshot()["rounds_by_num_steps"]
    assert sum(counted.values()) == len(rounds)


def test_the_snapshot_is_json_and_holds_what_an_operator_asks_for() -> None:
    made = controller(TWO_SLOTS, min_dwell_rounds=8)
    for _ in range(12):
        play(made, 2, everything)
    snapshot = json.loads(json.dumps(made.snapshot()))
    assert snapshot["speculative_num_steps"] == 7
    assert snapshot["slot"] == "1"
    assert snapshot["slots"]["1"]["ema_accept_len"] == 7.0
    assert snapshot["slots"]["1"]["current_steps"] == 7
    assert snapshot["last_reason"] == "dwell"
    assert snapshot["switches"] == {"gain": 1}
    assert snapshot["rounds_by_num_steps"] == {"3": 8, "7": 4}
    assert snapshot["learned_accept_length"] == round(1 + (8 * 3 + 4 * 7) / 12, 4)
    assert [entry["position"] for entry in snapshot["positions"]] == [1, 2, 3, 4, 5, 6, 7]


def test_a_live_change_replaces_the_policy_and_keeps_tier_and_counts() -> None:
    made = controller(TWO_SLOTS)
    play(made, 2, everything)
    play(made, 2, everything)
    made.reconfigure({"speculative_adaptive_config": {"candidate_steps": [3, 7]}})
    assert choose(made, 2) == 7
    assert made.snapshot()["learned_draft_tokens"] == 2 * (3 + 7)
    made.reconfigure({"speculative_adaptive_strategy": "static", "speculative_num_steps": 3})
    assert {play(made, 2, everything) for _ in range(30)} == {3}
    assert made.snapshot()["switches"] == {"gain": 1, "reconfigured": 1}
    made.reconfigure({"speculative_adaptive_config": None})
    assert slot(made, "32")["candidate_steps"] == [1]


def test_a_live_change_is_to_the_configuration_whatever_was_said_before() -> None:
    """A replica that starts later must do what those do that went through every change."""
    changes: list[dict[str, Any]] = [
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


def test_a_live_change_to_zero_steps_is_always_possible() -> None:
    made = controller(TWO_SLOTS)
    made.reconfigure({"speculative_adaptive": False, "speculative_num_steps": 0})
    assert play(made, 2, nothing) == 0


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (
            {"min_dwell_rounds": 0, "speculative_adaptive_config": {"candidate_steps": [1, 5]}},
            r"no tier was built for \[5\]",
        ),
        ({"speculative_adaptive": False, "speculative_num_steps": 2}, r"built for \[2\]"),
        ({"min_dwell_rounds": 0, "page_size": 3}, "page_size: unknown key"),
        ({"speculative_adaptive_strategy": "goodput"}, r"no tier was built for \[2, 4, 5, 6\]"),
    ],
)
def test_an_invalid_live_change_is_refused_as_a_whole(
    settings: dict[str, Any], complaint: str
) -> None:
    made, untouched = controller(TWO_SLOTS), controller(TWO_SLOTS)
    with pytest.raises(ConfigError, match=complaint):
        made.reconfigure(settings)
    for n in range(60):
        kept = everything if n % 7 else nothing
        assert play(made, 1 + n % 9, kept) == play(untouched, 1 + n % 9, kept)
    assert made.snapshot() == untouched.snapshot()


def test_a_live_change_cannot_start_to_draft_without_a_draft_model() -> None:
    made = AdaptiveController.create(SpeculativeConfig())
    with pytest.raises(ConfigError, match="no tier was built that drafts"):
        made.reconfigure({"speculative_adaptive": True})


class TestAStartFromWhatOthersLearned:
    @staticmethod
    def make() -> AdaptiveController:
        return AdaptiveController(
            PolicySettings(DraftShape.chain(3)), recorded_table(GPU_8B, (1, 2, 4, 8))
        )

    @staticmethod
    def rates(target: AdaptiveController) -> list[float]:
        acceptance: Any = target.snapshot()["acceptance"]
        return [position["accept_rate"] for position in acceptance["positions"]]

    def test_it_is_what_the_policy_expects_of_drafts_nobody_has_seen(self) -> None:
        target = self.make()
        known = [0.9, 0.5, 0.4, 0.3, 0.3, 0.3, 0.3]
        target.start_from(known)
        assert self.rates(target) == pytest.approx(known)

    def test_it_is_left_behind_as_the_traffic_shows_otherwise(self) -> None:
        target = self.make()
        target.start_from([0.1] * 7)
        before = self.rates(target)[0]
        for _ in range(200):
            play(target, 4, lambda num_steps: num_steps)
        assert self.rates(target)[0] > before

    @pytest.mark.parametrize("useless", [[0.5], [0.5] * 6 + [1.5], [0.0] * 7], ids=str)
    def test_what_is_of_no_use_is_refused_and_changes_nothing(self, useless: list[float]) -> None:
        target = self.make()
        before = self.rates(target)
        with pytest.raises(ValueError, match="prior_rates"):
            target.start_from(useless)
        assert self.rates(target) == before

    def test_it_outlives_a_change_of_the_policy(self) -> None:
        target = self.make()
        target.start_from([0.9] * 7)
        target.reconfigure({"min_dwell_rounds": 2})
        assert self.rates(target) == pytest.approx([0.9] * 7)

    def test_a_policy_that_estimates_nothing_passes_it_over(self) -> None:
        target = controller(TWO_SLOTS)
        target.start_from([0.9] * 3)
        assert choose(target, 4) == 3


BROKEN = StepTimes(0.0, 0.0, float("nan"))


def fail(*args: object) -> None:
    raise RuntimeError("defect")


class TestAPolicyThatFails:
    """Speculation is off for a while, that is said once, and then the policy is built anew."""

    @staticmethod
    def make(said: list[str], **keys: Any) -> AdaptiveController:
        settings = PolicySettings(DraftShape.chain(3), min_dwell_rounds=0)
        return AdaptiveController(settings, recorded_table(GPU_8B), said.append, **keys)

    @staticmethod
    def play(target: AdaptiveController, num_rounds: int, **fields: Any) -> list[int]:
        depths = []
        for _ in range(num_rounds):
            depths.append(choose(target, 2))
            kept = [depths[-1]] * 2
            target.on_verify_complete(verified_round(kept, 2, depths[-1], **fields))
        return depths

    def test_for_a_broken_clock(self) -> None:
        said: list[str] = []
        target = self.make(said)
        depths = self.play(target, FALLBACK_ROUNDS + 100, times=BROKEN)
        off = [n for n, depth in enumerate(depths) if not depth]
        assert FALLBACK_ROUNDS <= len(off) <= FALLBACK_ROUNDS + 100
        assert set(range(8, FALLBACK_ROUNDS)) <= set(off)
        assert any(depths[FALLBACK_ROUNDS:])
        assert target.snapshot()["num_fallbacks"] == 2
        assert target.snapshot()["last_reason"] == "fallback"
        assert len(said) == 1
        assert "speculation is off for now: 8 times in a row" in said[0]

    @pytest.mark.parametrize("method", ["choose", "observe"])
    def test_for_a_defect(self, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
        said: list[str] = []
        target = self.make(said)
        with monkeypatch.context() as patch:
            patch.setattr(GoodputPolicy, method, fail)
            self.play(target, 1)
            assert set(self.play(target, FALLBACK_ROUNDS - 2)) == {0}
        assert "RuntimeError('defect')" in said[0]
        assert any(self.play(target, 9))
        assert target.snapshot()["fallback"] is None

    def test_but_rough_costs_alone_are_dropped(self) -> None:
        said: list[str] = []
        target = self.make(said, costs_are_rough=True)
        self.play(target, 9, times=BROKEN)
        shown = target.snapshot()
        assert (shown["strategy"], shown["fallback"], said) == ("ema", None, [])
        target.use_costs(recorded_table(GPU_8B))
        assert target.snapshot()["strategy"] == "goodput"
        choose(target, 2)
        assert target.snapshot()["last_reason"] == "reconfigured"


@pytest.mark.parametrize(
    ("changes", "ignored"),
    [
        ({"strategy": "ema"}, None),
        ({"strategy": "goodput"}, "'goodput' ignores ema_alpha"),
        ({"strategy": "per_request"}, "'per_request' ignores candidate_trees, ema_alpha"),
        ({"adaptive": False}, "'static' ignores candidate_steps, candidate_trees, ema_alpha"),
        ({"strategy": "goodput", "slots": None}, None),
    ],
)
def test_a_start_names_keys_that_have_no_effect(
    changes: dict[str, Any], ignored: str | None
) -> None:
    slot = {"candidate_steps": [1, 3], "candidate_trees": [], "ema_alpha": 0.5}
    said: list[str] = []
    fields = {"slots": load_slots({"1": slot}), **changes}
    AdaptiveController(PolicySettings(DraftShape.chain(3), **fields), say=said.append)
    told = [] if ignored is None else [f"speculative_adaptive_config: strategy {ignored}"]
    assert said == told


@pytest.mark.parametrize(("num_steps", "most"), [(0, None), (1, 31), (3, 31), (7, 7), (8, None)])
def test_batches_of_a_depth_end_where_the_next_slots_are_less_deep(
    num_steps: int, most: int | None
) -> None:
    slots = {str(key): {"candidate_steps": k} for key, k in ((1, [7]), (8, [1, 3]), (32, [0]))}
    settings = PolicySettings(DraftShape.chain(3), slots=load_slots(slots))
    assert settings.largest_batch(num_steps) == most
    assert replace(settings, adaptive=False).largest_batch(num_steps) is None


def test_the_dwell_is_a_key_and_the_start_is_shown_before_any_round() -> None:
    config = SpeculativeConfig(
        speculative_algorithm="NGRAM", speculative_num_steps=3, min_dwell_rounds=0
    )
    assert PolicySettings.of(config).min_dwell_rounds == 0
    shown = AdaptiveController(PolicySettings.of(config)).snapshot()
    assert (shown["speculative_num_steps"], shown["speculative_num_draft_tokens"]) == (3, 4)


@pytest.mark.parametrize("strategy", ["static", "per_request", "goodput", "ema"])
def test_accepted_drafts_are_averaged_by_slot_under_every_strategy(strategy: Any) -> None:
    slots = load_slots({"ema_alpha": 0.5, **{key: {"candidate_steps": [3]} for key in ("1", "4")}})
    made = AdaptiveController(
        PolicySettings(DraftShape.chain(3), strategy=strategy, slots=slots),
        recorded_table(GPU_8B),
    )
    for batch_size, kept in ((2, [1, 3]), (2, [0, 0]), (9, [2] * 9)):
        choose(made, batch_size)
        made.on_verify_complete(verified_round(kept, batch_size, 3))
    assert {key: slot(made, key)["ema_accept_len"] for key in ("1", "4")} == {"1": 1.0, "4": 2.0}
