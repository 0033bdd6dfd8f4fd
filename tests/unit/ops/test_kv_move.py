"""Kept drafts of a tree end where those of a chain would be."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_spec.ops import acceptance
from tests.helpers.triton import DEVICE, reference

from serve_spec.ops import acceptance_triton  # isort: skip

DEPTH = 4
BOTH = pytest.mark.parametrize(
    "impl", [reference(acceptance), acceptance_triton], ids=["plain", "kernel"]
)

# Rows of a sequence, and the rows of its path: increasing, after the root.
paths = st.integers(0, 8).flatmap(
    lambda rows: st.tuples(
        st.just(rows),
        st.lists(
            st.integers(1, max(rows - 1, 1)), unique=True, max_size=min(DEPTH, max(rows - 1, 0))
        ).map(sorted),
    )
)


@BOTH
@settings(max_examples=30, deadline=None)
@given(
    round=st.lists(paths, min_size=1, max_size=4).filter(lambda round: any(n for n, _ in round)),
    padding=st.integers(0, 2),
    seed=st.integers(0, 5),
)
def test_kept_rows_move_together_and_nothing_else_changes(impl, round, padding, seed):
    generator = torch.Generator().manual_seed(seed)
    num_rows = sum(rows for rows, _ in round) + padding
    slots = torch.randperm(50, generator=generator)[:num_rows]
    pools = [
        torch.randn(3, 50, 2, 5, generator=generator),
        torch.randn(50, 13, generator=generator).bfloat16(),
        torch.randn(1, 50, 5000, generator=generator),
        torch.randn(1, 50, 1, 8, generator=generator).half(),
    ]
    expected = [pool.clone() for pool in pools]
    starts = [0]
    for rows, path in round:
        for j, row in enumerate(path, start=1):
            source, target = slots[starts[-1] + row], slots[starts[-1] + j]
            for old, new in zip(pools, expected, strict=True):
                at = (target,) if old.dim() == 2 else (slice(None), target)
                new[at] = old[(source,) if old.dim() == 2 else (slice(None), source)]
        starts.append(starts[-1] + rows)
    columns = [[0, *path] + [0] * (DEPTH - len(path)) for _, path in round]
    moved = [pool.to(DEVICE) for pool in pools]
    impl.move_accepted(
        moved,
        slots.to(DEVICE),
        torch.tensor(starts, dtype=torch.int32, device=DEVICE),
        torch.tensor(columns, dtype=torch.int32, device=DEVICE),
        torch.tensor([len(path) for _, path in round], dtype=torch.int32, device=DEVICE),
    )
    for found, wanted in zip(moved, expected, strict=True):
        assert torch.equal(found.cpu(), wanted)
