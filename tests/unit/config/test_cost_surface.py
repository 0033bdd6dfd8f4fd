"""From a measured table to a surface: monotone, exact where it can be, bounded in between."""

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.config.cost_table import CostSurface, monotone

DURATIONS = st.floats(0.1, 100.0)


@st.composite
def noisy(draw):
    """A surface's arguments: any grids, any durations."""
    sizes = sorted(draw(st.sets(st.integers(1, 24), min_size=1, max_size=4)))
    steps = sorted({0, *draw(st.sets(st.integers(1, 7), max_size=3))})
    short = draw(st.integers(1, 300))
    long = short + draw(st.integers(1, 500))
    cells = st.lists(DURATIONS, min_size=len(steps), max_size=len(steps))
    rows = st.lists(cells, min_size=len(sizes), max_size=len(sizes))
    return {
        "ms": draw(st.lists(rows, min_size=2, max_size=2)),
        "contexts": (short, long),
        "batch_sizes": sizes,
        "num_steps": steps,
    }


def rising(table):
    """The same grids with a monotone table."""
    ms = np.array(table["ms"])
    for axis in range(3):
        ms = np.add.accumulate(ms, axis)
    return {**table, "ms": ms.tolist()}


def surface(table):
    arguments = dict(table)
    return CostSurface(arguments.pop("ms"), **arguments)


def all_le(low, high):
    """low ≤ high, rounding aside."""
    return bool(np.all(low <= high * (1 + 1e-9)))


@given(noisy())
def test_any_table_becomes_monotone_in_steps_batch_size_and_context(table):
    costs = surface(table)
    long = table["contexts"][1]
    contexts = [1, long // 2, long, 2 * long, 50 * long]
    sizes = [*range(1, 30, 3), 64, 500]
    curves = {(b, c): costs.curve(b, c) for b in sizes for c in contexts}
    assert all(np.all(np.diff(curve) >= 0) for curve in curves.values())
    assert all(curve.shape == (table["num_steps"][-1] + 1,) for curve in curves.values())
    for b, (c, longer) in product(sizes, pairwise(contexts)):
        assert all_le(curves[b, c], curves[b, longer])
    for (b, larger), c in product(pairwise(sizes), contexts[:3]):  # lines may cross beyond
        assert all_le(curves[b, c], curves[larger, c])


@given(noisy())
def test_a_monotone_table_is_kept_at_its_points(table):
    table = rising(table)
    costs = surface(table)
    for (i, c), (j, b) in product(enumerate(table["contexts"]), enumerate(table["batch_sizes"])):
        assert costs.curve(b, c)[table["num_steps"]] == pytest.approx(table["ms"][i][j])


def test_beyond_the_largest_size_and_context_the_last_line_goes_on_or_grows_in_proportion():
    def truth(batch_size, steps, context):
        return 5.0 + 0.5 * batch_size * (steps + 1) + 0.01 * context * batch_size

    sizes, steps, contexts = [1, 2, 4], [0, 1, 3], (100, 300)
    ms = [[[truth(b, k, c) for k in steps] for b in sizes] for c in contexts]
    costs = CostSurface(ms, contexts=contexts, batch_sizes=sizes, num_steps=steps)
    for b, c in ((4, 300), (7, 100), (64, 300), (4, 3000), (5, 3000)):
        expected = [truth(b, k, c) for k in range(4)]
        assert costs.curve(b, c) == pytest.approx(expected)
    costs = CostSurface(
        [[[2.0, 3.0]], [[2.0, 3.0]]], contexts=(100, 200), batch_sizes=[4], num_steps=[0, 1]
    )
    assert costs.curve(2, 100) == pytest.approx([2.0, 3.0])
    assert costs.curve(8, 100) == pytest.approx([4.0, 6.0])


def test_one_disturbed_cell_does_not_make_its_neighbours_dearer():
    calm = np.array([[[10.0, 11.0, 12.0, 13.0]]])
    disturbed = calm.copy()
    disturbed[0, 0, 1] = 40.0
    assert monotone(disturbed).tolist() == [[[10.0, 12.0, 12.0, 13.0]]]
