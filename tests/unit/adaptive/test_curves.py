"""From a cost table to milliseconds: exact at its points, monotone and bounded in between."""

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.adaptive.curves import StepCurves, monotone
from serve_spec.config.cost_table import FORMAT_VERSION, CostTable, TreeCosts
from serve_spec.core.draft import DraftShape
from tests.helpers.costs import KEY

DURATIONS = st.floats(0.1, 100.0)
TREE = DraftShape(2, 5, 3)


def table(sizes=(1, 2, 4), steps=(1, 3), draft=None, tokens=(1, 2, 4, 8, 16), verify=None, **more):
    """Return a table whose drafting takes 0.5 ms a request and step, verification 5 and 0.5."""
    return CostTable(
        version=FORMAT_VERSION,
        key=KEY,
        context=100,
        batch_sizes=sizes,
        num_steps=steps,
        draft_ms=draft or tuple(tuple(0.5 * b * k for k in steps) for b in sizes),
        num_tokens=tokens,
        verify_ms=verify or tuple(5.0 + 0.5 * n for n in tokens),
        trees=(TreeCosts(num_steps=2, num_draft_tokens=5, draft_ms=tuple(2.0 * b for b in sizes)),),
        **{"draft_context_ms": 0.0, "verify_context_ms": 0.0, "sampled_token_ms": 0.0}
        | {"extrapolated": (), "measured_s": 0.0}
        | more,
    )


@st.composite
def any_table(draw):
    sizes = sorted(draw(st.sets(st.integers(1, 24), min_size=1, max_size=4)))
    steps = sorted(draw(st.sets(st.integers(1, 7), min_size=1, max_size=3)))
    tokens = sorted(draw(st.sets(st.integers(1, 200), min_size=1, max_size=6)))
    cells = st.lists(DURATIONS, min_size=len(steps), max_size=len(steps))
    verify = draw(st.lists(DURATIONS, min_size=len(tokens), max_size=len(tokens)))
    slopes = draw(st.tuples(st.floats(0.0, 0.1), st.floats(0.0, 0.1)))
    return table(
        tuple(sizes),
        tuple(steps),
        tuple(map(tuple, draw(st.lists(cells, min_size=len(sizes), max_size=len(sizes))))),
        tuple(tokens),
        tuple(sorted(verify)),
        draft_context_ms=slopes[0],
        verify_context_ms=slopes[1],
    )


def rises(values):
    """Whether no value falls, rounding aside."""
    return all(np.all(low <= high * (1 + 1e-9)) for low, high in pairwise(values))


@given(any_table())
def test_any_table_costs_more_for_more_requests_steps_tokens_and_context(costs):
    found = StepCurves(costs)
    sizes, contexts = [*range(1, 30, 3), 64, 500], [1, 60, 100, 200, 5000]
    for size, context in product(sizes, contexts):
        curve = found.draft_ms(size, context)
        assert curve.shape == (costs.num_steps[-1] + 1,)
        assert curve[0] == 0.0
        assert rises(curve)
        assert rises(found.verify_ms(size, context, np.arange(1, 600, 7)))
    for context in contexts[:3]:
        assert rises([found.draft_ms(size, context) for size in sizes])
        assert rises([found.verify_ms(size, context, 64) for size in sizes])
    for size in sizes:
        assert rises([found.draft_ms(size, context) for context in contexts])
        assert rises([found.verify_ms(size, context, 64) for context in contexts])


def test_a_table_is_met_at_its_points():
    costs = table()
    found = StepCurves(costs)
    for b, size in enumerate(costs.batch_sizes):
        assert found.draft_ms(size, 100)[[1, 3]] == pytest.approx(costs.draft_ms[b])
        assert found.tree_draft_ms(TREE, size, 100) == costs.trees[0].draft_ms[b]
    assert found.verify_ms(1, 100, costs.num_tokens) == pytest.approx(costs.verify_ms)


@pytest.mark.parametrize(("size", "context"), [(4, 300), (7, 100), (64, 300), (4, 3000), (5, 100)])
def test_linear_costs_continue_beyond_the_largest_batch_and_context(size, context):
    found = StepCurves(table(draft_context_ms=0.01, verify_context_ms=0.02))
    more = size * (context - 100) * 0.01
    expected = [0.5 * size * k + more * k for k in range(4)]
    assert found.draft_ms(size, context) == pytest.approx(expected)
    tree_ms = 2.0 * size + 2 * more
    assert found.tree_draft_ms(TREE, size, context) == pytest.approx(tree_ms)
    tokens = np.array([3, 16, 64])
    expected = 5.0 + 0.5 * tokens + 0.02 * size * context
    assert found.verify_ms(size, context, tokens) == pytest.approx(expected)


def test_a_single_measured_size_grows_in_proportion():
    found = StepCurves(table(sizes=(4,), draft=((2.0, 4.0),)))
    assert found.draft_ms(2, 100)[[1, 3]] == pytest.approx([2.0, 4.0])
    assert found.draft_ms(8, 100)[[1, 3]] == pytest.approx([4.0, 8.0])


def test_one_disturbed_time_does_not_make_its_neighbours_dearer():
    disturbed = np.array([[10.0, 40.0, 12.0, 13.0]])
    assert monotone(disturbed).tolist() == [[10.0, 12.0, 12.0, 13.0]]
