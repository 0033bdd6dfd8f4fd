"""The acceptance walk against plain loops and recursion, and its kernels against its twin."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from serve_spec.ops import acceptance
from serve_spec.ops.acceptance import AcceptedPath, accept_chain
from serve_spec.ops.noise import seed_words
from serve_spec.verify.synthetic import SyntheticVerdict, draft_chances
from tests.helpers.memory import poisoned_memory
from tests.helpers.triton import DEVICE, reference

from serve_spec.ops import acceptance_triton  # isort: skip

WINDOW = 16
TWINS = pytest.mark.parametrize(
    "twin", [reference(acceptance), acceptance_triton], ids=["plain", "kernel"]
)


def walk(drafts: list[int], drawn: list[int], num_steps: int) -> int:
    correct = 0
    while correct < num_steps and drafts[correct] == drawn[correct]:
        correct += 1
    return correct


@given(st.data(), st.integers(0, 6), st.integers(1, 5))
def test_the_walk_stops_at_the_first_draft_the_target_did_not_draw(
    data: st.DataObject, depth: int, batch: int
) -> None:
    token = st.integers(0, 1)
    drafts = data.draw(
        st.lists(st.lists(token, min_size=depth, max_size=depth), min_size=batch, max_size=batch)
    )
    drawn = data.draw(
        st.lists(
            st.lists(token, min_size=depth + 1, max_size=depth + 1), min_size=batch, max_size=batch
        )
    )
    steps = data.draw(st.lists(st.integers(0, depth), min_size=batch, max_size=batch))
    found = accept_chain(
        torch.tensor(drafts, dtype=torch.int64).reshape(batch, depth),
        torch.tensor(drawn, dtype=torch.int64),
        torch.tensor(steps),
    )
    assert found.tolist() == [walk(*row) for row in zip(drafts, drawn, steps, strict=True)]


@dataclass(frozen=True)
class Tree:
    """The rows of one sequence: (token, parent, drawn) each, the root's token not a draft's."""

    rows: tuple[tuple[int, int, int], ...]

    def children(self, row: int) -> list[int]:
        """Drafts that stand behind `row`."""
        return [i for i, (token, parent, _) in enumerate(self.rows) if i and parent == row]

    def verdict(self, depth: int, row: int = 0) -> tuple[list[int], list[int]]:
        """Tokens emitted from `row` on, and the rows kept after it: the law, recursively."""
        drawn = self.rows[row][2]
        if depth:
            for child in self.children(row):
                if self.rows[child][0] == drawn >= 0:
                    tokens, path = self.verdict(depth - 1, child)
                    return [drawn, *tokens], [child, *path]
        return [drawn], []

    def forced(self, count: int, row: int = 0) -> tuple[list[int], list[int]]:
        """As `verdict`, with `count` drafts kept whatever was drawn."""
        whole = [child for child in self.children(row) if self.rows[child][0] >= 0]
        if count <= 0 or not whole:
            return [self.rows[row][2]], []
        tokens, path = self.forced(count - 1, whole[0])
        return [self.rows[whole[0]][0], *tokens], [whole[0], *path]


@st.composite
def trees(draw: st.DrawFn, max_rows: int = 9) -> Tree:
    """Sequences of no rows to `max_rows`; few tokens, so that walks go deep, some of them -1."""
    token = st.sampled_from([0, 1, 1, 1, -1])
    num_rows = draw(st.integers(0, max_rows))
    return Tree(
        tuple((draw(token), draw(st.integers(0, i - 1)) if i else -1, draw(token))
              for i in range(num_rows))
    )  # fmt: skip


def tensors_of(round: list[Tree], padding: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, parents, draws and query starts of a round, with rows of nobody behind them."""
    rows = [row for tree in round for row in tree.rows] + [(1, 0, 1)] * padding
    tokens, parents, drawn = (torch.tensor(column) for column in zip(*rows, strict=True))
    starts = [0, *accumulate(len(tree.rows) for tree in round)]
    return (
        tokens.to(DEVICE),
        parents.to(DEVICE, torch.int32),
        drawn.to(DEVICE),
        torch.tensor(starts, dtype=torch.int32, device=DEVICE),
    )


def padded(rows: list[list[int]], width: int) -> list[list[int]]:
    return [row + [0] * (width - len(row)) for row in rows]


def assert_path(found: AcceptedPath, verdicts: list[tuple[list[int], list[int]]]) -> None:
    """`verdicts`: tokens and path after the root of each sequence, both empty without rows."""
    width = found.path.shape[1]
    assert found.num_correct.tolist() == [len(path) for _, path in verdicts]
    assert found.token_ids.tolist() == padded([tokens for tokens, _ in verdicts], width)
    assert found.path.tolist() == padded([[0, *path] for _, path in verdicts], width)
    assert [x.dtype for x in found] == [torch.int64, torch.int32, torch.int32]


@TWINS
@settings(max_examples=40, deadline=None)
@given(round=st.lists(trees(), min_size=1, max_size=4), depth=st.integers(0, 5))
def test_a_walk_goes_to_the_first_child_that_was_drawn(
    twin: Any, round: list[Tree], depth: int
) -> None:
    with poisoned_memory():
        found = twin.accept_path(*tensors_of(round, padding=3), depth)
    assert_path(found, [tree.verdict(depth) if tree.rows else ([], []) for tree in round])


@TWINS
@settings(max_examples=40, deadline=None)
@given(data=st.data(), round=st.lists(trees(), min_size=1, max_size=4), depth=st.integers(0, 5))
def test_a_forced_walk_keeps_what_it_is_told_along_first_children(
    twin: Any, data: st.DataObject, round: list[Tree], depth: int
) -> None:
    counts = [data.draw(st.integers(0, 6)) for _ in round]
    forced = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    found = twin.accept_path(*tensors_of(round, padding=1), depth, forced)
    assert_path(
        found,
        [
            tree.forced(min(count, depth)) if tree.rows else ([], [])
            for tree, count in zip(round, counts, strict=True)
        ],
    )


@TWINS
def test_a_sequence_may_fill_every_row_there_is(twin: Any) -> None:
    chain = Tree(tuple((7, i - 1, 7) for i in range(acceptance.MAX_ROWS)))
    found = twin.accept_path(*tensors_of([chain, chain]), acceptance.MAX_ROWS)
    assert found.num_correct.tolist() == [acceptance.MAX_ROWS - 1] * 2


@dataclass
class LaneTensors:
    """Lanes whose recent tokens are told apart, with different lengths."""

    recent: Tensor
    lengths: Tensor

    @classmethod
    def create(cls, num_lanes: int) -> LaneTensors:
        """Lane l holds 5 + 9·l tokens."""
        recent = torch.arange(num_lanes * WINDOW, dtype=torch.int32).view(num_lanes, WINDOW) + 100
        lengths = torch.arange(num_lanes, dtype=torch.int32) * 9 + 5
        return cls(recent.to(DEVICE), lengths.to(DEVICE))


@TWINS
@settings(max_examples=40, deadline=None)
@given(data=st.data(), round=st.lists(trees(), min_size=1, max_size=4), depth=st.integers(0, 5))
def test_lanes_grow_by_what_is_emitted_and_the_host_reads_the_same(
    twin: Any, data: st.DataObject, round: list[Tree], depth: int
) -> None:
    order = data.draw(st.permutations(range(5)))
    # Sequences without rows may name any lane, also one that is taken.
    lanes = [order[i] if tree.rows else 0 for i, tree in enumerate(round)]
    state, before = LaneTensors.create(5), LaneTensors.create(5)
    verdicts = torch.full((len(round), depth + 3), -77, dtype=torch.int32, device=DEVICE)
    rows = tensors_of(round, padding=2)
    with poisoned_memory():
        accepted = twin.accept_and_advance(
            *rows,
            state.recent,
            state.lengths,
            torch.tensor(lanes, dtype=torch.int32, device=DEVICE),
            verdicts,
        )
    expected, lengths = before.recent.tolist(), before.lengths.tolist()
    read_back = []
    for tree, lane in zip(round, lanes, strict=True):
        tokens, path = tree.verdict(depth) if tree.rows else ([], [])
        for token in tokens:
            expected[lane][lengths[lane] % WINDOW] = max(token, 0)
            lengths[lane] += 1
        is_broken = any(token < 0 for token, _, _ in tree.rows[1:])
        read_back.append([len(path), int(is_broken), *padded([tokens], depth + 1)[0]])
    assert state.recent.tolist() == expected
    assert state.lengths.tolist() == lengths
    assert verdicts.tolist() == read_back
    walked = reference(acceptance).accept_path(*rows, depth)
    assert all(torch.equal(a, b) for a, b in zip(accepted, walked, strict=True))


@TWINS
@settings(max_examples=40, deadline=None)
@given(round=st.lists(trees(12), min_size=1, max_size=4), padding=st.integers(0, 70))
def test_a_row_sees_itself_and_its_path(twin: Any, round: list[Tree], padding: int) -> None:
    def ancestors(tree: Tree, row: int) -> int:
        return 0 if row < 0 else 1 << row | ancestors(tree, tree.rows[row][1])

    _, parents, _, starts = tensors_of(round, padding=max(padding, 1))
    with poisoned_memory():
        found = twin.tree_masks(parents, starts)
    expected = [ancestors(tree, row) for tree in round for row in range(len(tree.rows))]
    assert found.tolist() == expected + [0] * max(padding, 1)


@TWINS
def test_the_longest_chain_fits_the_mask(twin: Any) -> None:
    rows = acceptance.MAX_ROWS
    parents = torch.arange(-1, rows - 1, dtype=torch.int32, device=DEVICE)
    masks = twin.tree_masks(parents, torch.tensor([0, rows], dtype=torch.int32, device=DEVICE))
    assert [mask % 2**64 for mask in masks.tolist()] == [2 ** (i + 1) - 1 for i in range(rows)]


@TWINS
@settings(max_examples=20, deadline=None)
@given(
    law=st.one_of(st.floats(1, 6), st.lists(st.floats(0, 1), min_size=1, max_size=4)),
    rows=st.lists(
        st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**33), st.integers(0, 5)),
        min_size=1,
        max_size=6,
    ),
)
def test_forced_counts_are_those_of_the_synthetic_verdict(
    twin: Any, law: float | list[float], rows: list[tuple[int, int, int]]
) -> None:
    most = 5
    survival = torch.zeros(most + 1, most, dtype=torch.float64)
    for steps in range(1, most + 1):
        chances = accumulate(draft_chances(law, steps), lambda a, b: a * b)
        survival[steps, :steps] = torch.tensor([*chances], dtype=torch.float64)
    seeds, positions, num_steps = (list(column) for column in zip(*rows, strict=True))
    found = twin.forced_counts(
        torch.tensor([seed_words(seed) for seed in seeds], dtype=torch.int32, device=DEVICE),
        torch.tensor(positions, device=DEVICE),
        torch.tensor(num_steps, dtype=torch.int32, device=DEVICE),
        survival.to(DEVICE),
    )
    expected = SyntheticVerdict(law).num_correct_drafts(num_steps, seeds=seeds, positions=positions)
    assert found.tolist() == expected
