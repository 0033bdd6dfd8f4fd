"""Attention over pages equals a softmax row by row, for the twin and its kernel."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from serve_spec.ops import paged_attention
from serve_spec.ops.paged_attention import PagedLayout
from tests.helpers.memory import poisoned_memory
from tests.helpers.triton import DEVICE, reference, relative_error

from serve_spec.ops import paged_attention_triton as kernel  # isort: skip
from serve_spec.ops.paged_attention_triton import Tiling  # isort: skip

TWINS = pytest.mark.parametrize(
    "twin", [reference(paged_attention), kernel], ids=["plain", "kernel"]
)
# One share per head, several, and several whose sum is a launch of its own.
TILINGS = [
    Tiling(1, 16, 4, 2),
    Tiling(2, 32, 4, 3),
    Tiling(4, 16, 4, 2),
]
NOWHERE = 1 << 30
"""A page id past every pool."""


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    with poisoned_memory():
        yield


class Scene:
    """Sequences with (cache entries, rows) each, in a pool where all they lack is NaN.

    tree: every row but a sequence's first descends from an earlier one, at random.
    """

    def __init__(
        self,
        lengths: Sequence[tuple[int, int]],
        heads: tuple[int, int] = (4, 2),
        head_dim: int = 16,
        page_size: int = 4,
        window: int | None = None,
        tree: bool = False,
        spare_rows: int = 0,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        num_heads, num_kv_heads = heads
        width = max(1, -(-max(kv for kv, _ in lengths) // page_size))
        pages = torch.randperm(len(lengths) * width + 1, generator=generator)
        pages = pages[: len(lengths) * width].view(len(lengths), width)
        self.lengths, self.window = lengths, window
        self.slots = (pages.unsqueeze(2) * page_size + torch.arange(page_size)).flatten(1)
        pool = torch.full(
            (2, (len(lengths) * width + 1) * page_size, num_kv_heads, head_dim), math.nan
        )
        for (kv_len, _), slots, row in zip(lengths, self.slots, pages, strict=True):
            used = max(kv_len, 0)
            shape = (2, used, num_kv_heads, head_dim)
            pool[:, slots[:used]] = torch.randn(shape, generator=generator)
            row[-(-used // page_size) :] = NOWHERE
        starts = torch.tensor([0, *(rows for _, rows in lengths)]).cumsum(0)
        num_rows = int(starts[-1]) + spare_rows
        self.starts = starts.tolist()
        self.query = torch.randn(num_rows, num_heads, head_dim, generator=generator)
        self.query = self.query.to(DEVICE, dtype)
        self.keys, self.values = pool.to(DEVICE, dtype)
        self.masks = self._tree(generator) if tree else None
        self.layout = PagedLayout(
            tables=pages.to(DEVICE, torch.int32),
            query_starts=starts.to(DEVICE, torch.int32),
            kv_lens=torch.tensor([kv for kv, _ in lengths], dtype=torch.int32, device=DEVICE),
            page_size=page_size,
            max_query_len=max(1, *(rows for _, rows in lengths)),
            window=window,
            tree_mask=None if self.masks is None else self.masks.to(DEVICE),
        )

    def _tree(self, generator: torch.Generator) -> Tensor:
        masks = [1] * len(self.query)
        for start, (_, rows) in zip(self.starts, self.lengths, strict=False):
            for row in range(1, rows):
                parent = int(torch.randint(row, (1,), generator=generator))
                masks[start + row] = masks[start + parent] | 1 << row
        # The last bit is the sign.
        return torch.tensor([m - (1 << 64) if m >> 63 else m for m in masks])

    def run(self, twin: Any) -> Tensor:
        out: Tensor = twin.paged_attention(self.query, self.keys, self.values, self.layout)
        return out

    def tiled(self, tiling: Tiling) -> Tensor:
        out = torch.empty_like(self.query)
        kernel._launch(self.query, self.keys, self.values, self.layout, tiling, out, fills_up=True)
        return out

    def check(self, out: Tensor, tolerance: float = 1e-5) -> None:
        """Rows with something to see agree with the definition; all others are finite."""
        assert out.shape == self.query.shape
        assert out.dtype == self.query.dtype
        assert out.isfinite().all()
        expected = [
            (self.starts[sequence] + row, self._row(sequence, row))
            for sequence, (_, rows) in enumerate(self.lengths)
            for row in range(rows)
            if self._seen(sequence, row)
        ]
        if expected:
            found = out[[row for row, _ in expected]].cpu()
            assert relative_error(found, torch.stack([r for _, r in expected])) < tolerance

    def _seen(self, sequence: int, row: int) -> list[int]:
        kv_len, rows = self.lengths[sequence]
        first = kv_len - rows
        own, drafts = first + row, list(range(row + 1))
        if self.masks is not None:
            mask = int(self.masks[self.starts[sequence] + row])
            drafts = [j for j in range(rows) if mask >> j & 1]
            own = first + len(drafts) - 1
        nearest = -1 if self.window is None else own - self.window
        seen = [position for position in range(first) if position > nearest]
        drafts = [first + j for j in drafts]
        if self.masks is None:
            drafts = [position for position in drafts if position > nearest]
        return seen + [position for position in drafts if position >= 0]

    def _row(self, sequence: int, row: int) -> Tensor:
        slots = self.slots[sequence][self._seen(sequence, row)]
        query = self.query[self.starts[sequence] + row].cpu().double()
        group = query.shape[0] // self.keys.shape[1]
        keys = self.keys.cpu()[slots].double().repeat_interleave(group, dim=1)
        values = self.values.cpu()[slots].double().repeat_interleave(group, dim=1)
        scores = torch.einsum("hd,lhd->hl", query, keys) / math.sqrt(query.shape[1])
        return torch.einsum("hl,lhd->hd", scores.softmax(1), values)


@TWINS
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 2), (3, 1)])
def test_ragged_rows_over_scattered_pages(
    twin: Any, heads: tuple[int, int], window: int | None, tree: bool
) -> None:
    # Alone, at a page's end, at its start, within; more rows than entries before them.
    lengths = [(1, 1), (8, 4), (9, 1), (30, 3), (5, 4)]
    scene = Scene(lengths, heads, window=window, tree=tree)
    scene.check(scene.run(twin))


@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize(("window", "tree"), [(None, False), (20, False), (None, True), (20, True)])
def test_shares_of_a_cache_add_up(tiling: Tiling, window: int | None, tree: bool) -> None:
    # Nothing to share, a share of one entry, shares of unequal length, and of many tiles.
    lengths = [(16, 2), (17, 1), (45, 4), (140, 3)]
    scene = Scene(lengths, page_size=8, window=window, tree=tree)
    scene.check(scene.tiled(tiling))


@settings(max_examples=15)
@given(
    lengths=st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 70)).map(lambda n: (n[0] + n[1], n[0])),
        min_size=1,
        max_size=3,
    ),
    heads=st.sampled_from([(2, 2), (4, 1), (6, 2)]),
    page_size=st.sampled_from([1, 4, 16]),
    window=st.sampled_from([None, 1, 7, 40]),
    tree=st.booleans(),
    spare_rows=st.integers(0, 3),
    tiling=st.sampled_from(TILINGS),
    seed=st.integers(0, 9),
)
def test_the_kernel_is_its_twin(tiling: Tiling, **shape: Any) -> None:
    scene = Scene(**shape)
    if not len(scene.query):
        return
    if shape["tree"] and shape["window"] is not None:
        scene.layout = replace(scene.layout, window=shape["window"] + scene.layout.max_query_len)
        scene.window = scene.layout.window
    scene.check(scene.run(paged_attention))
    scene.check(scene.tiled(tiling))


@TWINS
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)], ids=["bf16", "fp16"]
)
def test_short_floats_are_summed_in_float32(
    twin: Any, dtype: torch.dtype, tolerance: float
) -> None:
    scene = Scene([(70, 2), (33, 1)], head_dim=32, page_size=16, dtype=dtype)
    scene.check(scene.run(twin), tolerance)


@TWINS
def test_padding_is_finite_and_changes_nothing(twin: Any) -> None:
    alone = Scene([(9, 2), (20, 1)])
    expected = alone.run(twin)
    layout = alone.layout
    nobody = torch.full_like(layout.tables[:1], NOWHERE)
    alone.layout = replace(
        layout,
        tables=torch.cat((layout.tables, nobody, nobody)),
        query_starts=torch.cat((layout.query_starts, layout.query_starts[-1:].expand(2))),
        kv_lens=torch.cat((layout.kv_lens, layout.kv_lens.new_tensor([0, 1000]))),
    )
    alone.query = torch.cat((alone.query, torch.full_like(alone.query, math.nan)))
    out = alone.run(twin)
    assert out.isfinite().all()
    assert torch.allclose(out[:3], expected, atol=1e-6)


@TWINS
@pytest.mark.parametrize("window", [None, 3])
def test_rows_before_the_first_entry_are_finite(twin: Any, window: int | None) -> None:
    # Rows at positions -3, -2, -1, 0, 1; and a sequence with no entries at all.
    scene = Scene([(2, 5), (0, 3), (11, 2)], window=window)
    scene.check(scene.run(twin))


@TWINS
def test_entries_past_the_table_are_not_seen(twin: Any) -> None:
    scene = Scene([(12, 1)], page_size=4)
    expected = scene.run(twin)
    scene.layout.kv_lens.fill_(1000)
    assert torch.allclose(scene.run(twin), expected, atol=1e-6)


@TWINS
def test_queries_may_be_part_of_wider_rows(twin: Any) -> None:
    scene = Scene([(12, 2), (5, 1)])
    expected = scene.run(twin)
    scene.query = torch.cat((scene.query, torch.full_like(scene.query, math.nan)), dim=1)[:, :4]
    assert torch.equal(scene.run(twin), expected)


@TWINS
def test_a_tree_that_is_a_chain_is_a_chain(twin: Any) -> None:
    scene = Scene([(23, 5), (3, 1)], window=6)
    expected = scene.run(twin)
    masks = torch.tensor([1, 3, 7, 15, 31, 1], device=DEVICE)
    scene.layout = replace(scene.layout, tree_mask=masks)
    # A chain's drafts are all in the window of the last, as in a tree.
    assert torch.allclose(scene.run(twin), expected, atol=1e-6)


@TWINS
@pytest.mark.parametrize("window", [None, 9])
def test_the_newest_rows_of_a_tree_see_what_they_do_beside_the_others(
    twin: Any, window: int | None
) -> None:
    """A beam's rows come last; the tree's other entries are in the cache."""
    scene = Scene([(23, 6), (14, 6)], window=window, tree=True)
    expected = scene.run(twin).view(2, 6, *scene.query.shape[1:])[:, 3:].flatten(0, 1)
    scene.query = scene.query.view(2, 6, *scene.query.shape[1:])[:, 3:].flatten(0, 1)
    assert scene.masks is not None
    scene.layout = replace(
        scene.layout,
        query_starts=torch.tensor([0, 3, 6], dtype=torch.int32, device=DEVICE),
        max_query_len=3,
        tree_mask=scene.masks.view(2, 6)[:, 3:].flatten().to(DEVICE),
        tree_len=6,
    )
    assert torch.allclose(scene.run(twin), expected, atol=1e-6)


@TWINS
def test_the_last_row_of_a_tree_has_a_bit(twin: Any) -> None:
    scene = Scene([(66, 64)], (1, 1), tree=True)
    scene.check(scene.run(twin))


@pytest.mark.parametrize("tiling", TILINGS)
def test_the_bits_are_the_same_every_time(tiling: Tiling) -> None:
    scene = Scene([(40, 2), (90, 4), (3, 1)], spare_rows=2)
    first = scene.tiled(tiling)
    assert torch.equal(first, scene.tiled(tiling))


def test_the_bits_of_a_row_do_not_depend_on_its_company() -> None:
    tiling = Tiling(4, 16, 4, 2)
    first, second = Scene([(90, 4), (40, 2)]), Scene([(90, 4), (40, 2)])
    second.layout.kv_lens[1] = 7
    assert torch.equal(first.tiled(tiling)[:4], second.tiled(tiling)[:4])


@settings(max_examples=10)
@given(
    narrow=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    wide=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    tree=st.booleans(),
    spare_rows=st.integers(0, 3),
)
def test_groups_of_sequences_are_one_round(
    narrow: list[int], wide: list[int], tree: bool, spare_rows: int
) -> None:
    lengths = [(rows + 7 * number, rows) for number, rows in enumerate([*narrow, *wide])]
    scene = Scene(lengths, tree=tree, spare_rows=spare_rows)
    scene.layout = replace(scene.layout, groups=((len(narrow), 3), (len(wide), 9)))
    if len(scene.query):
        scene.check(scene.run(paged_attention))
        scene.check(scene.run(kernel))


def test_small_batches_are_split_and_large_ones_are_not() -> None:
    splits = [kernel._choose_tiling(8 * b, 4, torch.bfloat16).splits for b in (1, 4, 8, 512)]
    assert splits[0] > splits[1] > splits[2] == splits[3] == 1


def test_tensors_on_a_gpu_take_the_kernel() -> None:
    scene = Scene([(9, 2), (20, 1)])
    twin = kernel if DEVICE.type == "cuda" else reference(paged_attention)
    assert torch.equal(scene.run(paged_attention), scene.run(twin))
