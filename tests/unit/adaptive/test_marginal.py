"""What one more request costs: by hand where it can be done by hand, and laws elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.adaptive.cost_model import CostModel
from serve_spec.adaptive.marginal import (
    TierSpeeds,
    marginal_ms_by_rows,
    tier_speeds,
)
from tests.helpers.simulated_costs import GPU_8B, TWO_CPU_CORES, recorded_table
from tests.unit.adaptive.test_cost_model import (
    TREE,
    draft_ms,
    model,
    model_of_trees,
    verify_ms,
)

MAX_STEPS = 7
CONTEXT = 128


def marginal(
    costs: CostModel, rate: float, most: int = MAX_STEPS, **trees: Any
) -> dict[int, float]:
    rates = np.full(MAX_STEPS, rate)
    return marginal_ms_by_rows(costs, rates, context=CONTEXT, bound=lambda size: most, **trees)


def test_without_drafts_it_is_the_time_of_a_row_alone_and_then_what_a_doubling_gains() -> None:
    def speed(rows: int) -> float:
        return rows / verify_ms(rows, 0, CONTEXT)

    found = marginal(model(), 0.5, most=0)
    assert list(found) == [0, 1, 2, 4, 8], "up to the largest measured batch, 16"
    assert found[0] == pytest.approx(verify_ms(1, 0, CONTEXT))
    assert found[4] == pytest.approx(4 / (speed(8) - speed(4)))


@given(rate=st.floats(0, 1), of_level=st.floats(0, 1))
def test_trees_never_make_the_first_request_dearer_and_the_order_stays(
    rate: float, of_level: float
) -> None:
    def beside_trees(level: float) -> dict[int, float]:
        rates = {TREE: np.full(TREE.depth, level)}
        return marginal(model_of_trees(), rate, trees=lambda size: rates)

    found = beside_trees(of_level)
    assert found[0] <= marginal(model_of_trees(), rate)[0]
    assert list(found.values()) == sorted(found.values())
    whole_ms = 2 * draft_ms(1, TREE.depth, CONTEXT) + verify_ms(1, TREE.size, CONTEXT)
    assert beside_trees(1.0)[0] <= whole_ms / (1 + TREE.depth) * (1 + 1e-9)


@given(low=st.floats(0, 1), high=st.floats(0, 1))
def test_better_drafts_never_make_the_first_request_dearer(low: float, high: float) -> None:
    low, high = sorted((low, high))
    assert marginal(model(), high)[0] <= marginal(model(), low)[0] + 1e-9


@given(rate=st.floats(0, 1), factor=st.floats(0.25, 4))
def test_a_machine_that_is_slower_throughout_is_dearer_in_proportion(
    rate: float, factor: float
) -> None:
    def scaled(name: str) -> Any:
        table = recorded_table(TWO_CPU_CORES)
        return tuple(
            tuple(tuple(ms * factor for ms in row) for row in grid) for grid in getattr(table, name)
        )

    table = recorded_table(TWO_CPU_CORES)
    slower = table.model_copy(
        update={name: scaled(name) for name in ("draft_ms", "verify_ms")}
        | {"sampled_row_ms": table.sampled_row_ms * factor}
    )
    there, here = marginal(CostModel(slower), rate), marginal(CostModel(table), rate)
    # Where more rows bring nothing, the floor takes over from the proportion.
    for rows, ms in here.items():
        if ms < 1e5:
            assert there[rows] == pytest.approx(factor * ms, rel=1e-6)


@pytest.mark.parametrize("machine", [TWO_CPU_CORES, GPU_8B], ids=["cpu", "gpu"])
@pytest.mark.parametrize("disturbed", [1.0, 1.5])
def test_every_entry_is_a_positive_number_and_none_falls_though_a_size_was_measured_too_slow(
    machine: Any, disturbed: float
) -> None:
    table = recorded_table(machine)
    verify_ms = tuple(
        tuple(
            tuple(ms * (disturbed if at == 1 else 1) for ms in row) for at, row in enumerate(grid)
        )
        for grid in table.verify_ms
    )
    costs = CostModel(table.model_copy(update={"verify_ms": verify_ms}))
    ms = list(marginal(costs, 0.7).values())
    assert all(0 < entry < 1e7 for entry in ms)
    assert ms == sorted(ms)


def tiers(rate: float) -> TierSpeeds:
    rates = np.full(MAX_STEPS, rate)
    return tier_speeds(model(), rates, batch_size=4, context=CONTEXT)


@given(rate=st.floats(0, 1))
def test_a_tier_brings_its_accepted_drafts_and_one_token_a_row(rate: float) -> None:
    found = tiers(rate)
    assert found.round_ms[0] == pytest.approx(verify_ms(4, 0, CONTEXT))
    tokens = found.tokens_per_ms * found.round_ms / 4
    assert tokens == pytest.approx([sum(rate**i for i in range(k + 1)) for k in range(8)])
