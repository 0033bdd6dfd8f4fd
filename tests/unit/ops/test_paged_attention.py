"""Paged attention equals a softmax token by token: the reference and the kernel."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_spec.core.caches import PagedCache
from serve_spec.ops import paged_attention as dispatched
from serve_spec.ops.paged_attention import AttentionPlan
from tests.helpers.memory import poisoned_memory
from tests.helpers.triton import DEVICE, reference, relative_error

from serve_spec.ops import paged_attention_triton as kernel  # isort: skip
from serve_spec.ops.paged_attention_triton import Tiling  # isort: skip

paged_attention = reference(dispatched)
BOTH = pytest.mark.parametrize("op", [paged_attention, kernel], ids=["plain", "kernel"])
# Query tokens per tile (0: as many as a request may have), lines per tile at least, and the rest.
TILINGS = {
    "merged by a launch": (0, 16, {"block": 16, "min_split": 16}),
    "merged by the last": (0, 16, {"block": 32, "min_split": 16, "is_last_merging": True}),
    "a program for each split": (0, 16, {"block": 16, "min_split": 16, "programs": 8}),
    "small tiles": (3, 16, {"block": 16, "min_split": 16}),
    "small tiles, merged by the last": (
        2,
        16,
        {"block": 16, "min_split": 16, "is_last_merging": True},
    ),
    "blocks without masks": (0, 128, {"block": 16, "min_split": 16}),
    "whole tiles": (0, 16, {"block": 16}),
    "tiles in waves": (0, 16, {"block": 16, "min_split": 16, "in_waves": True}),
}
# Window, tree.
KINDS = [(None, False), (20, True), (None, True), (20, False)]
# Scores of random queries and keys have a deviation of one, so that this cap changes most of them.
SINKS_AND_SOFTCAP = {"has_sinks": True, "softcap": 1.5}
FP8 = {"stored_in": torch.float8_e4m3fn, "key_scale": 0.7, "value_scale": 3.0}
NOWHERE = 1 << 30
"""A page id past every pool."""


@pytest.fixture(autouse=True)
def _poisoned():
    with poisoned_memory():
        yield


class Scene:
    """Requests with (cache entries, query tokens) each, in a pool where all they lack is NaN.

    tree: every token but a request's first descends from an earlier one, at random. widths: of keys
    and values. groups: see `AttentionPlan`. stored_in: dtype of the pool
    (None: as the queries). settings: of `PagedCache`.
    """

    def __init__(
        self,
        lengths,
        heads=(4, 2),
        widths=(16, 16),
        page_size=4,
        tree=False,
        groups=(),
        spare_tokens=0,
        dtype=torch.float32,
        seed=0,
        stored_in=None,
        **settings,
    ):
        generator = torch.Generator().manual_seed(seed)
        num_heads, num_kv_heads = heads
        width = max(1, -(-max(kv for kv, _ in lengths) // page_size))
        pages = torch.randperm(len(lengths) * width + 1, generator=generator)
        pages = pages[: len(lengths) * width].view(len(lengths), width)
        self.lengths = lengths
        self.slots = (pages.unsqueeze(2) * page_size + torch.arange(page_size)).flatten(1)
        num_slots = (len(lengths) * width + 1) * page_size
        pools = [torch.full((num_slots, num_kv_heads, wide), math.nan) for wide in widths]
        for (kv_len, _), slots, row in zip(lengths, self.slots, pages, strict=True):
            used = max(kv_len, 0)
            for pool in pools:
                shape = (used, *pool.shape[1:])
                pool[slots[:used]] = torch.randn(shape, generator=generator)
            row[-(-used // page_size) :] = NOWHERE
        starts = torch.tensor([0, *(tokens for _, tokens in lengths)]).cumsum(0)
        num_tokens = int(starts[-1]) + spare_tokens
        self.starts = starts.tolist()
        self.query = torch.randn(num_tokens, num_heads, widths[0], generator=generator)
        self.query = self.query.to(DEVICE, dtype)
        self.cache = PagedCache(num_kv_heads, *widths, dtype=stored_in, **settings)
        self.keys, self.values = (pool.to(DEVICE, self.cache.dtype or dtype) for pool in pools)
        self.masks = self._tree(generator) if tree else None
        self.sinks = None
        if self.cache.has_sinks:
            self.sinks = 2 * torch.randn(num_heads, generator=generator).to(DEVICE)
        self.plan = AttentionPlan(
            tables=pages.to(DEVICE, torch.int32),
            query_starts=starts.to(DEVICE, torch.int32),
            kv_lens=torch.tensor([kv for kv, _ in lengths], dtype=torch.int32, device=DEVICE),
            page_size=page_size,
            groups=groups or ((len(lengths), max(1, *(tokens for _, tokens in lengths))),),
            tree_mask=None if self.masks is None else self.masks.to(DEVICE),
        )

    def _tree(self, generator):
        masks = [1] * len(self.query)
        for start, (_, tokens) in zip(self.starts, self.lengths, strict=False):
            for token in range(1, tokens):
                parent = int(torch.randint(token, (1,), generator=generator))
                masks[start + token] = masks[start + parent] | 1 << token
        # 64 bits, of which the last one is the sign.
        masks = [mask & (1 << 64) - 1 for mask in masks]
        return torch.tensor([mask - (1 << 64) if mask >> 63 else mask for mask in masks])

    def run(self, op):
        plan = replace(self.plan)  # nothing prepared
        pools = self.keys, self.values
        return op.paged_attention(self.query, *pools, plan, self.cache, self.sinks)

    def tiled(self, name):
        tokens, lines, rest = TILINGS[name]
        ((num_requests, max_query_len),) = self.plan.groups
        tokens = min(max_query_len, tokens) if tokens else max_query_len
        needed = tokens * self.query.shape[1] // self.keys.shape[1]
        while lines < needed:
            lines *= 2
        tiling = Tiling(tokens, lines, num_warps=4, num_stages=2, **rest)
        group = kernel._Group(0, num_requests, max_query_len, tiling, fills_up=True)
        out = torch.empty(*self.query.shape[:2], self.values.shape[2]).to(self.query)
        pools, plan = (self.keys, self.values), replace(self.plan)
        for _ in range(2):  # two layers of one forward
            kernel._launch(self.query, pools, self.sinks, plan, self.cache, group, out)
        return out

    def check(self, out, tolerance=1e-5):
        """Tokens with something to see agree with the definition; all others are finite."""
        assert out.shape == (*self.query.shape[:2], self.values.shape[2])
        assert out.dtype == self.query.dtype
        assert out.isfinite().all()
        expected = [
            (self.starts[request] + token, self._token(request, token))
            for request, (_, tokens) in enumerate(self.lengths)
            for token in range(tokens)
            if self._seen(request, token)
        ]
        if expected:
            found = out[[token for token, _ in expected]].cpu()
            assert relative_error(found, torch.stack([r for _, r in expected])) < tolerance

    def _seen(self, request, token):
        kv_len, tokens = self.lengths[request]
        first, window = kv_len - tokens, self.cache.window
        own, drafts = first + token, list(range(token + 1))
        if self.masks is not None:
            mask = int(self.masks[self.starts[request] + token])
            drafts = [j for j in range(tokens) if mask >> j & 1]
            own = first + len(drafts) - 1
        nearest = -1 if window is None else own - window
        seen = [position for position in range(first) if position > nearest]
        drafts = [first + j for j in drafts]
        if self.masks is None:
            drafts = [position for position in drafts if position > nearest]
        return seen + [position for position in drafts if position >= 0]

    def _token(self, request, token):
        slots = self.slots[request][self._seen(request, token)]
        query = self.query[self.starts[request] + token].cpu().double()
        group = query.shape[0] // self.keys.shape[1]
        keys, values = (
            pool.cpu()[slots].double().repeat_interleave(group, dim=1) * scale
            for pool, scale in zip(
                (self.keys, self.values),
                (self.cache.key_scale, self.cache.value_scale),
                strict=True,
            )
        )
        scores = torch.einsum("hd,lhd->hl", query, keys)
        scores *= self.cache.scale or 1 / math.sqrt(query.shape[1])
        if self.cache.softcap is not None:
            scores = self.cache.softcap * torch.tanh(scores / self.cache.softcap)
        weights = scores.exp()
        total = weights.sum(1, keepdim=True)
        if self.sinks is not None:
            total += self.sinks.cpu().double().exp().unsqueeze(1)
        return torch.einsum("hl,lhd->hd", weights / total, values)


SHORT = {torch.bfloat16: 1e-2, torch.float16: 2e-3}


@st.composite
def scenes(draw):
    """Requests of any lengths over layers of any kind; some have more tokens than entries."""
    tree = draw(st.booleans())
    length = st.tuples(st.integers(0, 6) | st.integers(0, 24), st.integers(-4, 70))
    lengths = draw(st.lists(length, min_size=1, max_size=3))
    least = 0 if tree else -40
    lengths = [(max(0, tokens + max(more, least)), tokens) for tokens, more in lengths]
    window = draw(st.sampled_from([None, 1, 7, 40]))
    if tree and window is not None:
        window += max(tokens for _, tokens in lengths)
    return Scene(
        lengths,
        heads=draw(st.sampled_from([(2, 2), (4, 1), (6, 2), (3, 1)])),
        widths=draw(st.sampled_from([(16, 16), (16, 32), (32, 16), (24, 16), (48, 40)])),
        page_size=draw(st.sampled_from([1, 4, 16])),
        window=window,
        scale=draw(st.sampled_from([None, 0.5])),
        softcap=draw(st.sampled_from([None, 1.5, 30.0])),
        has_sinks=draw(st.booleans()),
        **draw(st.sampled_from([{}, FP8])),
        tree=tree,
        spare_tokens=draw(st.integers(0, 3)),
        dtype=draw(st.sampled_from([torch.float32, *SHORT])),
        seed=draw(st.integers(0, 9)),
    )


@settings(max_examples=14)
@given(scene=scenes(), tiling=st.none() | st.sampled_from(sorted(TILINGS)))
def test_tokens_of_any_requests_see_what_they_should(scene, tiling):
    tolerance = SHORT.get(scene.query.dtype, 1e-5)
    if len(scene.query):
        scene.check(scene.run(paged_attention), tolerance)
        scene.check(scene.tiled(tiling) if tiling else scene.run(kernel), tolerance)


@pytest.mark.parametrize(
    "settings",
    [{}, FP8, SINKS_AND_SOFTCAP, SINKS_AND_SOFTCAP | FP8],
    ids=["plain", "fp8", "sinks and softcap", "sinks and softcap, fp8"],
)
@pytest.mark.parametrize(
    ("tiling", "window", "tree"),
    [(tiling, *KINDS[number % 4]) for number, tiling in enumerate(TILINGS)],
)
def test_splits_of_a_tile_add_up_and_have_one_sink(tiling, window, tree, settings):
    # Nothing to cut, a split of one entry, splits of unequal length, and of many blocks.
    lengths = [(16, 2), (17, 1), (37, 4), (84, 3)]
    scene = Scene(lengths, page_size=8, window=window, tree=tree, **settings)
    scene.check(scene.tiled(tiling))


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("widths", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)])
def test_keys_and_values_may_be_of_any_usual_width(op, widths, dtype):
    scene = Scene([(37, 3), (20, 18)], widths=widths, dtype=dtype, page_size=16)
    scene.check(scene.run(op), SHORT.get(dtype, 1e-5))


@BOTH
def test_a_softcap_bends_scores_of_any_size(op):
    scene = Scene([(37, 3), (20, 18)], softcap=30.0, scale=20.0)
    scene.check(scene.run(op))


@BOTH
@pytest.mark.parametrize("exponent", [-30, -12, 17, 60])
def test_queries_may_be_of_any_size_beside_keys_in_fp8(op, exponent):
    """Those of one token, too: its other numbers are then as good as zero."""
    for dtype in (torch.bfloat16, torch.float32):
        scene = Scene([(37, 3), (20, 18)], scale=0.25 * 2.0**-exponent, dtype=dtype, **FP8)
        scene.query *= 2.0**exponent
        scene.query[0, 0, 1:4] *= torch.tensor([2.0**-16, 2.0**-30, 0.0]).to(scene.query)
        scene.query[2, 1] = 0
        scene.check(scene.run(op), SHORT.get(dtype, 1e-5))


@BOTH
@pytest.mark.parametrize("settings", [{}, FP8], ids=["plain", "fp8"])
def test_a_broken_value_breaks_its_request_and_no_other(op, settings):
    for dtype in (torch.bfloat16, torch.float32):
        scene = Scene([(9, 2), (20, 4)], dtype=dtype, **settings)
        scene.values[scene.slots[1][3]] = math.nan
        out = scene.run(op).isnan().flatten(1)
        assert out.any(1).tolist() == out.all(1).tolist() == [False, False, *[True] * 4]


@BOTH
def test_padding_is_finite_and_changes_nothing(op):
    alone = Scene([(9, 2), (20, 1)])
    expected = alone.run(op)
    plan = alone.plan
    padding = torch.full_like(plan.tables[:1], NOWHERE)
    alone.plan = replace(
        plan,
        tables=torch.cat((plan.tables, padding, padding)),
        query_starts=torch.cat((plan.query_starts, plan.query_starts[-1:].expand(2))),
        kv_lens=torch.cat((plan.kv_lens, plan.kv_lens.new_tensor([0, 1000]))),
        groups=((4, 2),),
    )
    alone.query = torch.cat((alone.query, torch.full_like(alone.query, math.nan)))
    out = alone.run(op)
    assert out.isfinite().all()
    assert torch.allclose(out[:3], expected, atol=1e-6)


@BOTH
def test_entries_past_the_table_are_not_seen_and_queries_may_be_part_of_wider_rows(op):
    scene = Scene([(12, 1)], page_size=4)
    expected = scene.run(op)
    scene.plan.kv_lens.fill_(1000)
    assert torch.allclose(scene.run(op), expected, atol=1e-6)
    scene = Scene([(12, 2), (5, 1), (30, 20)])
    expected = scene.run(op)
    scene.query = torch.cat((scene.query, torch.full_like(scene.query, math.nan)), dim=1)[:, :4]
    assert torch.equal(scene.run(op), expected)


@BOTH
def test_the_newest_tokens_of_a_tree_see_what_they_do_beside_the_others(op):
    """A beam's tokens come last; the tree's other entries are in the cache."""
    scene = Scene([(23, 6), (14, 6)], window=9, tree=True)
    expected = scene.run(op).view(2, 6, *scene.query.shape[1:])[:, 3:].flatten(0, 1)
    scene.query = scene.query.view(2, 6, *scene.query.shape[1:])[:, 3:].flatten(0, 1)
    scene.plan = replace(
        scene.plan,
        query_starts=torch.tensor([0, 3, 6], dtype=torch.int32, device=DEVICE),
        groups=((2, 3),),
        tree_mask=scene.masks.view(2, 6)[:, 3:].flatten().to(DEVICE),
        tree_len=6,
    )
    assert torch.allclose(scene.run(op), expected, atol=1e-6)


@BOTH
def test_tokens_whose_masks_have_all_bits_see_their_whole_block(op):
    scene = Scene([(23, 6), (6, 6), (14, 6)], tree=True)
    scene.masks.fill_((1 << 6) - 1)
    scene.plan = replace(scene.plan, tree_mask=scene.masks.to(DEVICE), tree_len=6)
    scene.check(scene.run(op))


@BOTH
def test_the_last_token_of_a_tree_has_a_bit(op):
    scene = Scene([(66, 64)], (2, 1), tree=True)
    scene.check(scene.run(op))


@BOTH
def test_requests_of_more_tokens_than_a_mask_has_bits_are_chains(op):
    scene = Scene([(23, 4), (90, 70)], tree=True, groups=((1, 4), (1, 70)))
    found = scene.run(op)
    for index in range(66):
        scene.masks[8 + index] = 0  # bits of entries that chains do not have
    scene.plan = replace(scene.plan, tree_mask=scene.masks.to(DEVICE))
    assert torch.equal(scene.run(op), found)
    chain = Scene([(23, 4), (90, 70)])
    assert torch.allclose(found[4:], chain.run(op)[4:], atol=1e-6)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="programs run one after the other there")
@pytest.mark.parametrize("tiling", [tiling for tiling in TILINGS if "merged" in tiling])
def test_the_bits_are_the_same_every_time(tiling):
    scene = Scene([(40, 2), (90, 4), (3, 1)], spare_tokens=2)
    first = scene.tiled(tiling)
    assert torch.equal(first, scene.tiled(tiling))


@BOTH
def test_layers_of_a_forward_share_a_plan_whatever_their_kind(op):
    kinds = [{}, {"window": 5}, SINKS_AND_SOFTCAP]
    sizes = [((4, 4), (16, 16)), ((4, 2), (16, 16)), ((4, 2), (24, 32)), ((6, 1), (64, 64))]
    scenes = [
        Scene([(40, 2), (9, 1)], heads=heads, widths=widths, **kind)
        for heads, widths in sizes
        for kind in kinds
    ]
    for scene in scenes:
        assert torch.equal(scene.slots, scenes[0].slots)
        scene.plan = scenes[0].plan
        pools = scene.keys, scene.values
        scene.check(op.paged_attention(scene.query, *pools, scene.plan, scene.cache, scene.sinks))


@settings(max_examples=5)
@given(
    narrow=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    wide=st.lists(st.integers(0, 30), min_size=1, max_size=3),
    tree=st.booleans(),
    spare_tokens=st.integers(0, 3),
)
def test_groups_of_requests_are_one_forward(narrow, wide, tree, spare_tokens):
    lengths = [(tokens + 7 * number, tokens) for number, tokens in enumerate([*narrow, *wide])]
    groups = ((len(narrow), 3), (len(wide), 30))
    scene = Scene(lengths, tree=tree, spare_tokens=spare_tokens, groups=groups)
    if len(scene.query):
        scene.check(scene.run(paged_attention))
        scene.check(scene.run(kernel))


@settings(max_examples=8)
@given(
    lengths=st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 900) | st.integers(0, 9000)).map(
            lambda n: (n[0] + n[1], n[0])
        ),
        min_size=1,
        max_size=6,
    ),
    window=st.sampled_from([None, 100, 1000]),
    programs=st.integers(1, 40),
    in_waves=st.booleans(),
)
def test_every_program_reads_a_fair_part_of_long_caches(lengths, window, programs, in_waves):
    tokens = 16
    scene = Scene(lengths, heads=(1, 1), widths=(1, 1), page_size=64)
    max_query_len = max(1, *(count for _, count in lengths))
    num_tiles = sum(-(-count // tokens) for _, count in lengths)
    tiling = Tiling(tokens, 16, 16, 4, 2, in_waves=in_waves)
    group = kernel._Group(0, len(lengths), max_query_len, tiling, fills_up=True)
    work = kernel._plan_work(scene.plan, window, group, len(scene.query), programs, 1)
    tiles, ranges = work.tiles.tolist(), work.ranges.tolist()
    splits = {tile: [] for tile in range(num_tiles)}
    read = []
    for first_tile, end_tile, first_entry, end_entry in ranges:
        read.append(0)
        for tile in range(first_tile, end_tile):
            *_, begin, end, _, entry, _ = tiles[tile]
            split = begin + max(first_entry - entry, 0), min(end, begin + end_entry - entry)
            if split[0] < split[1]:
                splits[tile].append(split)
                read[-1] += split[1] - split[0]
    for (request, first_token, count, *_), of_tile in zip(tiles, splits.values(), strict=False):
        kv_len, query_len = lengths[request]
        last = kv_len - query_len + first_token - scene.starts[request] + count
        seen = sum(end - begin for begin, end in of_tile)
        assert all(before[1] == after[0] for before, after in pairwise(of_tile))
        assert seen == last - (0 if window is None else max(0, last - count - window + 1))
    fair = sum(-(-tile[7] // 16) * 16 for tile in tiles[:num_tiles]) / programs
    assert max(read) <= max(256, 1.5 * fair + 128)


@pytest.mark.parametrize(("kv_len", "is_cut"), [(20 * 16, False), (9000, True)])
def test_large_tiles_are_cut_where_the_last_ones_would_run_alone(kv_len, is_cut):
    programs, tiling = 16, Tiling(16, 16, 16, 4, 2, in_waves=True)
    scene = Scene([(kv_len, 20 * 16)], heads=(1, 1), widths=(1, 1), page_size=64)
    group = kernel._Group(0, 1, 20 * 16, tiling, fills_up=True)
    work = kernel._plan_work(scene.plan, None, group, len(scene.query), programs, 1)
    used = [end - begin for *_, begin, end in work.ranges.tolist() if end > begin]
    assert (len(used) == programs and max(used) <= 1.01 * 20 * 9000 / programs) == is_cut


def test_splits_of_few_requests_are_merged_by_a_launch():
    tilings = [kernel._choose_tiling(b, 1, (32, 8), 128, torch.bfloat16) for b in (1, 8, 9, 512)]
    assert [tiling.is_last_merging for tiling in tilings] == [False, False, True, True]
