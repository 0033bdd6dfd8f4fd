"""Acceptance of drafts against plain recursion: reference and kernels."""

from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_spec.core.draft import MAX_TREE_TOKENS
from serve_spec.ops import acceptance
from serve_spec.ops.noise import seed_words
from tests.helpers.memory import poisoned_memory
from tests.helpers.plain_sampling import coin, row_key
from tests.helpers.triton import DEVICE, reference

from serve_spec.ops import acceptance_triton  # isort: skip

WINDOW = 16
BOTH = pytest.mark.parametrize(
    "ops", [reference(acceptance), acceptance_triton], ids=["reference", "kernel"]
)


@dataclass(frozen=True)
class Tree:
    """The rows of one sequence: (token, parent, drawn) each, the root's token not a draft's."""

    rows: tuple[tuple[int, int, int], ...]

    def children(self, row):
        return [i for i, (token, parent, _) in enumerate(self.rows) if i and parent == row]

    def emitted(self, depth, row=0):
        drawn = self.rows[row][2]
        if depth:
            for child in self.children(row):
                if self.rows[child][0] == drawn >= 0:
                    tokens, path = self.emitted(depth - 1, child)
                    return [drawn, *tokens], [child, *path]
        return [drawn], []

    def forced(self, count, row=0):
        """Return the same with `count` drafts accepted, whatever was drawn."""
        whole = [child for child in self.children(row) if self.rows[child][0] >= 0]
        if count <= 0 or not whole:
            return [self.rows[row][2]], []
        tokens, path = self.forced(count - 1, whole[0])
        return [self.rows[whole[0]][0], *tokens], [whole[0], *path]


@st.composite
def trees(draw, max_rows=9):
    """Sequences of no rows to `max_rows`; few tokens, so that walks go deep, some of them -1."""
    token = st.sampled_from([0, 1, 1, 1, -1])
    num_rows = draw(st.integers(0, max_rows))
    return Tree(
        tuple((draw(token), draw(st.integers(0, i - 1)) if i else -1, draw(token))
              for i in range(num_rows))
    )  # fmt: skip


def tensors_of(round, padding=0):
    """Return tokens, parents, draws and query starts of a round, with padding after them."""
    rows = [row for tree in round for row in tree.rows] + [(1, 0, 1)] * padding
    tokens, parents, drawn = (torch.tensor(column) for column in zip(*rows, strict=True))
    starts = [0, *accumulate(len(tree.rows) for tree in round)]
    return (
        tokens.to(DEVICE),
        parents.to(DEVICE, torch.int32),
        drawn.to(DEVICE),
        torch.tensor(starts, dtype=torch.int32, device=DEVICE),
    )


def padded(rows, width):
    return [[*row, *[0] * (width - len(row))] for row in rows]


def assert_path(found, results):
    """`results`: tokens and path after the root of each sequence, both empty without rows."""
    width = found.path.shape[1]
    assert found.num_correct.tolist() == [len(path) for _, path in results]
    assert found.token_ids.tolist() == padded([tokens for tokens, _ in results], width)
    assert found.path.tolist() == padded([[0, *path] for _, path in results], width)
    assert [x.dtype for x in found] == [torch.int64, torch.int32, torch.int32]


def advance(ops, rows, slots, depth, window=WINDOW, forced=None):
    """Run a round over slots of which slot s holds 5 + 9·s tokens; return all it wrote, too."""
    recent = torch.arange(5 * window, dtype=torch.int32, device=DEVICE).view(5, window) + 100
    lengths = torch.arange(5, dtype=torch.int32, device=DEVICE) * 9 + 5
    results = torch.full((len(slots), depth + 3), -77, dtype=torch.int32, device=DEVICE)
    slots = torch.tensor(slots, dtype=torch.int32, device=DEVICE)
    known = acceptance.RequestTokens(recent, lengths, slots)
    with poisoned_memory():
        accepted = ops.accept_and_advance(*rows, known, results, forced)
    return accepted, recent.tolist(), lengths.tolist(), results.tolist()


@BOTH
@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    round=st.lists(trees(), min_size=1, max_size=4),
    depth=st.integers(0, 5),
    is_forced=st.booleans(),
)
def test_accepted_drafts_are_emitted_and_kept_and_the_host_reads_the_same(
    ops, data, round, depth, is_forced
):
    """The first children that were drawn; or if forced, any first children."""
    order = data.draw(st.permutations(range(5)))
    # Sequences without rows may name any slot, also one that is taken.
    slots = [order[i] if tree.rows else 0 for i, tree in enumerate(round)]
    counts = [data.draw(st.integers(0, 6)) if is_forced else depth for _ in round]
    forced = torch.tensor(counts, dtype=torch.int32, device=DEVICE) if is_forced else None
    accepted, recent, lengths, results = advance(
        ops, tensors_of(round, padding=2), slots, depth, forced=forced
    )
    emitted = [
        ([], []) if not tree.rows else tree.forced(min(n, depth)) if is_forced else tree.emitted(n)
        for tree, n in zip(round, counts, strict=True)
    ]
    assert_path(accepted, emitted)
    expected = torch.arange(5 * WINDOW).view(5, WINDOW).add(100).tolist()
    grown = [9 * slot + 5 for slot in range(5)]
    read_back = []
    for tree, slot, (tokens, path) in zip(round, slots, emitted, strict=True):
        for token in tokens:
            expected[slot][grown[slot] % WINDOW] = max(token, 0)
            grown[slot] += 1
        is_broken = any(token < 0 for token, _, _ in tree.rows[1:])
        read_back.append([len(path), int(is_broken), *padded([tokens], depth + 1)[0]])
    assert (recent, lengths, results) == (expected, grown, read_back)


@BOTH
def test_a_sequence_may_fill_every_row_there_is(ops):
    chain = Tree(tuple((7, i - 1, 7) for i in range(MAX_TREE_TOKENS)))
    rows = tensors_of([chain, chain])
    found, *_ = advance(ops, rows, [0, 1], MAX_TREE_TOKENS, window=2 * MAX_TREE_TOKENS)
    assert found.num_correct.tolist() == [MAX_TREE_TOKENS - 1] * 2
    _, parents, _, starts = tensors_of([chain])
    masks = ops.tree_masks(parents, starts).tolist()
    assert [mask % 2**64 for mask in masks] == [2 ** (i + 1) - 1 for i in range(len(chain.rows))]


@BOTH
@settings(max_examples=40, deadline=None)
@given(round=st.lists(trees(12), min_size=1, max_size=4), padding=st.integers(0, 70))
def test_a_draft_sees_itself_and_its_path(ops, round, padding):
    def ancestors(tree, row):
        return 0 if row < 0 else 1 << row | ancestors(tree, tree.rows[row][1])

    _, parents, _, starts = tensors_of(round, padding=max(padding, 1))
    with poisoned_memory():
        found = ops.tree_masks(parents, starts)
    expected = [ancestors(tree, row) for tree in round for row in range(len(tree.rows))]
    assert found.tolist() == expected + [0] * max(padding, 1)


@BOTH
@settings(max_examples=20, deadline=None)
@given(
    survival=st.lists(st.floats(0, 1), min_size=15, max_size=15),
    rows=st.lists(
        st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**33), st.integers(0, 5)),
        min_size=1,
        max_size=6,
    ),
)
def test_forced_counts_are_drawn_from_seed_and_position(ops, survival, rows):
    """As many drafts as probabilities of survival are above the request's number."""
    of_size = [survival[n * (n - 1) // 2 :][:n] for n in range(6)]
    seeds, positions, num_steps = (list(column) for column in zip(*rows, strict=True))
    found = ops.forced_counts(
        torch.tensor([seed_words(seed) for seed in seeds], dtype=torch.int32, device=DEVICE),
        torch.tensor(positions, device=DEVICE),
        torch.tensor(num_steps, dtype=torch.int32, device=DEVICE),
        torch.tensor(padded(of_size, 5), dtype=torch.float64, device=DEVICE),
    )
    assert found.tolist() == [
        sum(coin(row_key(seed, position)) < probability for probability in of_size[steps])
        for seed, position, steps in rows
    ]


DEPTH = 4
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
@settings(max_examples=12, deadline=None)
@given(
    round=st.lists(paths, min_size=1, max_size=4).filter(lambda round: any(n for n, _ in round)),
    padding=st.integers(0, 2),
    seed=st.integers(0, 5),
)
def test_kept_rows_move_together_and_nothing_else_changes(ops, round, padding, seed):
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
    ops.move_accepted(
        moved,
        slots.to(DEVICE),
        torch.tensor(starts, dtype=torch.int32, device=DEVICE),
        torch.tensor(columns, dtype=torch.int32, device=DEVICE),
        torch.tensor([len(path) for _, path in round], dtype=torch.int32, device=DEVICE),
    )
    for found, wanted in zip(moved, expected, strict=True):
        assert torch.equal(found.cpu(), wanted)
