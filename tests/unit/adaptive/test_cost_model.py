"""What rounds cost, and how rounds that ran correct it."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.adaptive.cost_model import GAIN, LARGEST_FACTOR, CostModel
from serve_spec.config.cost_table import CostTable, TreeCosts
from serve_spec.core.draft_shape import PLAIN, DraftShape
from serve_spec.core.record import StepTimes
from tests.helpers.costs import KEY

SIZES, STEPS, CONTEXTS = (1, 2, 4, 8, 16), (0, 1, 2, 3, 5, 7), (128, 512)
SAMPLED_ROW_MS = 0.1
ONE_STEP = 2.0**GAIN * (1 + 1e-9)
"""The most that a round moves the factors of a bucket that is known."""


def draft_ms(batch_size: int, steps: int, context: float) -> float:
    return steps * (1.0 + 0.02 * batch_size) + 0.001 * context if steps else 0.0


def verify_ms(batch_size: int, steps: float, context: float) -> float:
    return 6.0 + 0.4 * batch_size * (steps + 1) + 0.0005 * context * batch_size


def model(padded: bool = False, **changes: Any) -> CostModel:
    """A model of the two formulas above."""
    grids = {
        name: tuple(tuple(tuple(truth(b, k, c) for k in STEPS) for b in SIZES) for c in CONTEXTS)
        for name, truth in (("draft_ms", draft_ms), ("verify_ms", verify_ms))
    }
    table = {
        "version": 1,
        "key": KEY,
        "batch_sizes": SIZES,
        "num_steps": STEPS,
        "contexts": CONTEXTS,
        "sampled_row_ms": SAMPLED_ROW_MS,
        "padded": padded,
        "extrapolated": (),
        "measured_s": 1.0,
        **grids,
        **changes,
    }
    return CostModel(CostTable(**table))


def verify_curve(
    costs: CostModel, batch_size: int, context: float, num_sampled: int
) -> np.ndarray[Any, Any]:
    """What rounds of 0, 1, 2 ... drafts in all cost, up to every row's most."""
    most = batch_size * costs.max_steps
    return np.array([costs.verify_ms(batch_size, n, context, num_sampled) for n in range(most + 1)])


def round_of(batch_size: int, num_steps: int, **times: float) -> dict[str, Any]:
    """Arguments of `observe` for a round in which every row drafts `num_steps`."""
    return {
        "batch_size": batch_size,
        "shape": DraftShape.chain(num_steps),
        "num_rows": batch_size * (1 + num_steps),
        "num_drafting": batch_size if num_steps else 0,
        "context": 128.0,
        "num_sampled": 0,
        **times,
    }


def run(
    costs: CostModel,
    batch_size: int,
    num_steps: int,
    slower: float = 1.0,
    draft_slower: float = 1.0,
    host: float = 0.0,
) -> bool:
    """Observes one round that takes the truth times a factor."""
    draft = draft_ms(batch_size, num_steps, 128) * slower * draft_slower
    verify = verify_ms(batch_size, num_steps, 128) * slower
    times = {"draft_ms": draft, "verify_ms": verify, "round_ms": draft + verify + host}
    return costs.observe(**round_of(batch_size, num_steps, **times))


def test_measured_points_are_exact_and_points_between_them_on_lines() -> None:
    costs = model()
    for b in SIZES:
        for c in CONTEXTS:
            verify, draft = verify_curve(costs, b, c, 0), costs.draft_curve(b, c)
            for k in STEPS:
                assert verify[b * k] == verify_ms(b, k, c)
                assert draft[k] == draft_ms(b, k, c)
                whole = costs.round_ms(b, DraftShape.chain(k), b * (1 + k), c, 0)
                assert whole == pytest.approx(draft[k] + verify[b * k])
    # 3 rows, between the sizes 2 and 4; 10 drafts, between 3 and 4 for each; a context between.
    assert verify_curve(costs, 3, 320, 0)[10] == pytest.approx(verify_ms(3, 10 / 3, 320))


def test_each_sampled_row_adds_its_price_for_every_row_it_verifies() -> None:
    costs = model()
    greedy, sampled = (verify_curve(costs, 4, 128, n) for n in (0, 3))
    rows = np.arange(4, 4 * 8 + 1)
    assert sampled - greedy == pytest.approx(SAMPLED_ROW_MS * rows * 3 / 4)


def test_rows_of_prompts_add_what_rows_of_deep_drafts_would() -> None:
    """The table's own slope: a row more costs the same wherever texts are as often read."""
    costs = model()
    sizes = np.array([2, 4, 8])
    rows = sizes * (1 + costs.max_steps)
    for more in (1, 2, 7):
        expected = verify_ms(1, 7, 128) - verify_ms(0, 7, 128)
        added = costs.prompt_ms(more * (1 + costs.max_steps), 128, rows, batch_size=2)
        assert added == pytest.approx([more * expected] * 3)
    assert (costs.prompt_ms(0, 128, rows, batch_size=2) == 0.0).all()


def beside_prompts(
    costs: CostModel, steps: int, excess_ms: float, rows: int = 24, round_ms: float | None = None
) -> bool:
    """One round of 4 rows, to which `rows` rows of prompts add so much more than the table says."""
    num_rows = 4 * (steps + 1)
    table_ms = model().prompt_ms(rows, 128, np.array([num_rows]), 4)[0]
    whole = costs.round_ms(4, DraftShape.chain(steps), num_rows, 128, 0) + table_ms + excess_ms
    whole = whole if round_ms is None else round_ms
    draft = draft_ms(4, steps, 128)
    return costs.observe(
        batch_size=4, shape=DraftShape.chain(steps), num_rows=num_rows,
        num_drafting=4 * (steps > 0),
        context=128, num_sampled=0, draft_ms=draft, verify_ms=whole - draft, round_ms=whole,
        num_prompt_rows=rows,
    )  # fmt: skip


def prompts_add(costs: CostModel, batch_size: int = 4) -> np.ndarray[Any, Any]:
    """To plain rounds, and to rounds of 2 drafts."""
    return costs.prompt_ms(24, 128, batch_size * np.array([1, 3]), batch_size)


def test_what_prompts_add_is_learned_for_plain_rounds_and_for_those_that_draft() -> None:
    costs = model()
    for _ in range(400):
        assert beside_prompts(costs, 0, -1.5)
        assert beside_prompts(costs, 2, 2.5)
    assert prompts_add(costs) - prompts_add(model()) == pytest.approx(
        np.array([-1.5, 2.5]), rel=0.01
    )
    assert prompts_add(costs, 1) == pytest.approx(prompts_add(model(), 1)), "other sizes"
    assert (costs.prompt_ms(0, 128, np.array([4, 12]), 4) == 0.0).all()
    assert costs.round_ms(4, DraftShape.chain(2), 12, 128, 0) == model().round_ms(
        4, DraftShape.chain(2), 12, 128, 0
    ), "nothing else"


@given(st.floats(0, 600) | st.sampled_from([-1.0, math.nan, math.inf]), st.integers(1, 400))
def test_no_time_of_a_round_with_prompts_makes_them_less_than_free_or_dearer_than_a_round(
    round_ms: float, rows: int
) -> None:
    costs = model()
    for _ in range(10):
        beside_prompts(costs, 2, 0.0, rows, round_ms)
    most = prompts_add(model()) + costs.round_ms(4, DraftShape.chain(2), 12, 128, 0)
    assert (prompts_add(costs) >= 0.0).all()
    assert (prompts_add(costs) <= most).all()


def test_rows_that_stop_drafting_early_make_a_chain_cheaper_by_their_share() -> None:
    """Of 4 rows all draft once, two twice, one three times: 7 drafts."""
    costs = model()
    step_ms = [1.0 + 0.02 * rows for rows in (4, 2, 1)]
    expected = sum(step_ms) + 0.001 * 128
    ragged = costs.round_ms(4, DraftShape.chain(3), 4 + 7, 128, 0)
    assert ragged - verify_curve(costs, 4, 128, 0)[7] == pytest.approx(expected)


@pytest.mark.parametrize(
    "shape",
    [(4, 8, 4, None), (4, 3, 3, None), (4, 3, 17, None), (4, 3, 8, 5), (4, 3, 5, 2), (4, -1, 4, 0)],
)
def test_rounds_that_can_not_be_are_refused(shape: tuple[int, int, int, int | None]) -> None:
    batch_size, num_steps, num_rows, num_drafting = shape
    with pytest.raises(ValueError, match=r"num_(rows|steps)="):
        model().round_ms(batch_size, DraftShape.chain(num_steps), num_rows, 128, 0, num_drafting)


def test_padded_drafting_costs_all_rows_whoever_drafts_and_is_learned_for_all() -> None:
    costs = model(padded=True)
    found = costs.round_ms(8, DraftShape.chain(3), 8 + 3, 128, 0, 1)
    assert found == pytest.approx(costs.verify_ms(8, 3, 128, 0) + draft_ms(8, 3, 128))
    for _ in range(300):
        times = {"draft_ms": 2 * draft_ms(8, 3, 128), "verify_ms": verify_ms(8, 3 / 8, 128)}
        one_row = {"num_rows": 8 + 3, "num_drafting": 1, "round_ms": sum(times.values())}
        assert costs.observe(**{**round_of(8, 3), **times, **one_row})
    assert costs.draft_curve(8, 128)[3] == pytest.approx(2 * draft_ms(8, 3, 128), rel=0.02)


@given(
    truth=st.floats(0.2, 5),
    draft_truth=st.floats(0.7, 1.4),
    host=st.floats(0, 5),
    batch_size=st.integers(1, 16),
    num_steps=st.integers(0, 7),
)
def test_constant_measurements_are_predicted_in_the_end(
    truth: float, draft_truth: float, host: float, batch_size: int, num_steps: int
) -> None:
    costs = model()
    for _ in range(400):
        assert run(costs, batch_size, num_steps, truth, draft_truth, host)
    draft = draft_ms(batch_size, num_steps, 128) * truth * draft_truth
    verify = verify_ms(batch_size, num_steps, 128) * truth
    assert costs.draft_curve(batch_size, 128)[num_steps] == pytest.approx(draft, rel=0.01)
    curve = verify_curve(costs, batch_size, 128, 0)
    assert curve[batch_size * num_steps] == pytest.approx(verify, rel=0.01)
    assert costs.host_ms(batch_size) == pytest.approx(host, rel=0.01, abs=1e-6)


@given(st.floats(0.06, 19), st.floats(0.06, 19), st.integers(0, 7))
def test_one_outlier_moves_no_factor_by_more_than_its_step(
    slower: float, draft_slower: float, num_steps: int
) -> None:
    costs = model()
    for _ in range(200):
        run(costs, 4, num_steps)
    verify = {b: verify_curve(costs, b, 128, 0) for b in SIZES}
    draft = {b: costs.draft_curve(b, 128) for b in SIZES}
    times = {
        "draft_ms": draft_ms(4, num_steps, 128) * draft_slower,
        "verify_ms": verify_ms(4, num_steps, 128) * slower,
    }
    assert costs.observe(**round_of(4, num_steps, **times, round_ms=sum(times.values())))
    for b in SIZES:
        moved = verify_curve(costs, b, 128, 0) / verify[b]
        assert np.all((moved >= 1 / ONE_STEP) & (moved <= ONE_STEP))
        moved = costs.draft_curve(b, 128)[1:] / draft[b][1:]
        assert np.all((moved >= 1 / ONE_STEP) & (moved <= ONE_STEP))


@pytest.mark.parametrize("in_use", [[(4, 0)], [(4, 3)], [(4, 3), (4, 2), (2, 3), (8, 3)]])
def test_a_machine_that_slows_down_moves_tiers_in_use_and_others_alike(
    in_use: list[tuple[int, int]],
) -> None:
    """Else every tier would look cheaper than the one in use."""
    costs = model()
    for num_rounds in (3, 10, 300):
        for _ in range(num_rounds):
            for batch_size, num_steps in in_use:
                run(costs, batch_size, num_steps, 1.5)
        moved = {
            (b, k): costs.verify_ms(b, b * k, 128, 0) / verify_ms(b, k, 128)
            for b, k in [*in_use, (4, 1), (16, 0), (16, 7)]
        }
        assert min(moved.values()) >= 0.94 * max(moved.values())
    assert list(moved.values()) == pytest.approx([1.5] * len(moved), rel=0.01)


def test_an_error_of_one_cell_stays_with_it_when_others_ran_as_predicted() -> None:
    costs = model()
    for _ in range(1000):
        run(costs, 4, 3, 1.5)
        for num_steps in (0, 1, 2):
            run(costs, 4, num_steps)
    elsewhere = verify_curve(costs, 16, 128, 0) / verify_curve(model(), 16, 128, 0)
    assert 1 <= elsewhere[0] < 1.2
    four = verify_curve(costs, 4, 128, 0) / verify_curve(model(), 4, 128, 0)
    assert four[[0, 4, 8, 12]] == pytest.approx([1, 1, 1, 1.5], rel=0.02)


@given(st.lists(st.sampled_from([0.06, 0.5, 2.0, 19.0]), max_size=300))
def test_factors_stay_bounded_whatever_is_measured(ratios: list[float]) -> None:
    costs = model()
    plain = verify_curve(costs, 4, 128, 0)
    for ratio in ratios * 3:
        verify = costs.verify_ms(4, 12, 128, 0) * ratio
        draft = float(costs.draft_curve(4, 128)[3]) * ratio
        costs.observe(**round_of(4, 3, draft_ms=draft, verify_ms=verify, round_ms=draft + verify))
        factor = verify_curve(costs, 4, 128, 0) / plain
        assert np.all((factor <= LARGEST_FACTOR * 1.001) & (factor >= 0.999 / LARGEST_FACTOR))


UNUSABLE = {
    "a time that is not a number": {"verify_ms": math.nan},
    "an endless time": {"round_ms": math.inf},
    "a negative time": {"draft_ms": -0.1},
    "stages longer than the whole": {"round_ms": 12.0},
    "verification absurdly long": {"verify_ms": 400.0, "round_ms": 450.0},
    "verification absurdly short": {"verify_ms": 0.5},
    "drafting absurdly long": {"draft_ms": 90.0, "round_ms": 200.0},
    "drafting absurdly short": {"draft_ms": 0.1},
    "a round that slept": {"round_ms": 5000.0},
}


@pytest.mark.parametrize("times", UNUSABLE.values(), ids=UNUSABLE.keys())
def test_an_unusable_measurement_is_refused_counted_and_changes_nothing(
    times: dict[str, float],
) -> None:
    costs, untouched = model(), model()
    for other in (costs, untouched):
        run(other, 4, 3, 1.2, host=0.5)
    good = {"draft_ms": 3.5, "verify_ms": 13.0, "round_ms": 17.0}
    assert not costs.observe(**round_of(4, 3, **{**good, **times}))
    assert costs.snapshot() == untouched.snapshot() | {"num_refused": 1}
    assert costs.observe(**round_of(4, 3, **good)), "the same round is learned from without it"


def test_sizes_that_never_ran_take_the_host_time_of_the_nearest_that_did() -> None:
    costs = model()
    assert costs.host_ms(4) == 0
    run(costs, 2, 1, host=1.0)
    assert costs.host_ms(1) == costs.host_ms(100) == pytest.approx(1.0)
    run(costs, 16, 1, host=3.0)
    assert costs.host_ms(1) == pytest.approx(1.0)
    assert costs.host_ms(12) == costs.host_ms(100) == pytest.approx(3.0)
    assert costs.round_ms(16, DraftShape.chain(0), 16, 128, 0) == pytest.approx(
        verify_curve(costs, 16, 128, 0)[0] + 3.0
    )


def test_the_snapshot_says_what_was_learned_and_is_json() -> None:
    costs = model()
    fresh = {
        "drift": 1.0,
        "draft_factors": {},
        "verify_factors": {},
        "host_ms": {},
        "entry_ms": 0.0,
        "prompt_excess_ms": {"plain": {}, "drafting": {}},
        "num_refused": 0,
    }
    assert costs.snapshot() == fresh
    for _ in range(20):
        run(costs, 3, 2, 1.5, host=0.25)
    state = costs.snapshot()
    assert json.loads(json.dumps(state)) == state
    assert state["drift"] > 1
    assert state["draft_factors"].keys() == {"4"}
    assert state["verify_factors"].keys() == {"4"}
    assert state["verify_factors"]["4"].keys() == {"2"}
    assert state["host_ms"] == {"4": pytest.approx(0.25)}


@given(st.integers(1, 8), st.integers(1, 7), st.floats(0.5, 2))
def test_drafts_from_texts_are_verified_and_cost_no_drafting(
    size: int, num_steps: int, slower: float
) -> None:
    """However long it took to write them down; they teach what verification takes."""
    costs = model()
    verify = verify_ms(size, num_steps, 128) * slower
    times = {"draft_ms": 0.3, "verify_ms": verify, "round_ms": verify + 1}
    from_text = {"shape": PLAIN, "num_drafting": 0, "num_text_drafts": size * num_steps}
    for _ in range(20):
        assert costs.observe(**{**round_of(size, num_steps, **times), **from_text})
    assert costs.snapshot()["draft_factors"] == {}
    found, before = (
        abs(math.log(this.verify_ms(size, size * num_steps, 128, 0) / verify))
        for this in (costs, model())
    )
    assert found <= before + 1e-12  # rounding: with slower=1 both are a last place or none


TREE = DraftShape(3, 10, 4)


def model_of_trees(**changes: Any) -> CostModel:
    """The same machine, where a tree's levels cost twice the steps of a chain."""
    tree = TreeCosts(
        num_steps=TREE.depth,
        num_draft_tokens=TREE.size,
        draft_ms=tuple(tuple(2 * draft_ms(b, 3, c) for b in SIZES) for c in CONTEXTS),
        verify_ms=tuple(tuple(verify_ms(b, 10, c) for b in SIZES) for c in CONTEXTS),
    )
    return model(trees=(tree,), key=KEY.model_copy(update={"topk": TREE.topk}), **changes)


def run_tree(costs: CostModel, batch_size: int, slower: float = 1.0, **changes: Any) -> bool:
    """Observes one round in which every row drafts the tree."""
    draft = 2 * draft_ms(batch_size, 3, 128) * slower
    verify = verify_ms(batch_size, 10, 128) * slower
    times = {"draft_ms": draft, "verify_ms": verify, "round_ms": draft + verify}
    rows = {"num_rows": batch_size * 11, "shape": TREE}
    return costs.observe(**{**round_of(batch_size, 3), **rows, **times, **changes})


def test_a_round_of_trees_costs_what_was_measured_and_rows_without_one_are_plain() -> None:
    costs = model_of_trees()
    for size in (3, 16, 40):
        expected = 2 * draft_ms(size, 3, 128), verify_ms(size, 10, 128)
        assert costs.stages_ms(TREE, size, size, 10 * size, 128, 0) == pytest.approx(expected)
    draft, verify = costs.stages_ms(TREE, 8, 2, 20, 128, 4)
    assert draft == pytest.approx(2 * draft_ms(2, 3, 128))
    assert verify == pytest.approx(verify_ms(8, 20 / 8, 128) + SAMPLED_ROW_MS * 4 * 28 / 8)
    assert costs.stages_ms(TREE, 8, 0, 0, 128, 0) == (0.0, pytest.approx(verify_ms(8, 0, 128)))


@given(slower=st.floats(0.3, 4), batch_size=st.integers(1, 16))
def test_rounds_of_trees_correct_their_own_shape(slower: float, batch_size: int) -> None:
    costs = model_of_trees()
    for _ in range(300):
        assert run_tree(costs, batch_size, slower)
    truth = slower * 2 * draft_ms(batch_size, 3, 128), slower * verify_ms(batch_size, 10, 128)
    found = costs.stages_ms(TREE, batch_size, batch_size, 10 * batch_size, 128, 0)
    assert found == pytest.approx(truth, rel=0.02)


@pytest.mark.parametrize("known_rounds", [0, 200])
@pytest.mark.parametrize("slower", [0.8, 1.0, 1.3])
def test_rounds_alike_teach_at_once_what_they_teach_one_by_one_but_for_those_that_can_not_be(
    slower: float, known_rounds: int
) -> None:
    together, alone = model(), model()
    for costs in (together, alone):
        for _ in range(known_rounds):
            run(costs, 4, 3)
    draft, verify = draft_ms(4, 3, 128) * slower, verify_ms(4, 3, 128) * slower
    times, absurd = (StepTimes(draft, verify, draft + verify + more) for more in (0.5, 1e9))
    heard = together.observe_alike([times, absurd, *[times] * 7], **round_of(4, 3))
    assert heard == [True, False, *[True] * 7]
    for _ in range(8):
        run(alone, 4, 3, slower=slower, host=0.5)
    for num_steps in (0, 3):
        one_by_one = alone.round_ms(4, DraftShape.chain(num_steps), 4 * (1 + num_steps), 128, 0)
        at_once = together.round_ms(4, DraftShape.chain(num_steps), 4 * (1 + num_steps), 128, 0)
        assert at_once == pytest.approx(one_by_one, rel=0.02)
