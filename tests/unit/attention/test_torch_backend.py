"""Paged attention equals a softmax over each sequence alone, on a grid of shapes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from serve_spec.attention import create_attention_backend
from serve_spec.ops.paged_attention import PagedLayout, paged_attention
from tests.helpers.paged import PagedSequences, unrotated

# What float32 kernels differ by; those of GPUs accumulate in another order.
TOLERANCE = {"cpu": 2e-5, "cuda": 2e-4}


@dataclass(frozen=True)
class Heads:
    num_heads: int
    num_kv_heads: int
    head_dim: int = 16
    sliding_window: int | None = None
    num_layers: int = 2


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Scene:
    """Random q, k, v of whole sequences, and what they attend to."""

    def __init__(self, device: str, heads: Heads, lengths: list[int], seed: int = 0) -> None:
        self.device = device
        generator = torch.Generator().manual_seed(seed)
        self.qkv = [
            tuple(
                torch.randn(length, count, heads.head_dim, generator=generator) * 2
                for count in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
            )
            for length in lengths
        ]
        self.expected = [naive(*qkv, heads.sliding_window) for qkv in self.qkv]
        self.sequences = PagedSequences(heads, len(lengths), max(lengths), seed=seed, device=device)

    def feed(self, pieces: list[tuple[int, int]], layer: int = 1) -> list[Tensor]:
        """Adds (sequence, rows) to the pool and attends; the rows of each piece."""
        starts = [self.sequences.lengths[index] for index, _ in pieces]
        ctx = self.sequences.extend(pieces)
        rows = [
            [tensor[start : start + count] for tensor in self.qkv[index]]
            for (index, count), start in zip(pieces, starts, strict=True)
        ]
        query, key, value = (torch.cat(p) for p in zip(*rows, strict=True))
        heads = torch.cat((query, key, value), dim=1).to(self.device)
        out = ctx.attention.run(layer, heads, unrotated(heads))
        assert out.shape == query.shape
        return list(out.cpu().split([count for _, count in pieces]))

    def check(self, pieces: list[tuple[int, int]]) -> None:
        starts = [self.sequences.lengths[index] for index, _ in pieces]
        for (index, count), start, rows in zip(pieces, starts, self.feed(pieces), strict=True):
            difference = rows - self.expected[index][start : start + count]
            assert difference.abs().max() < TOLERANCE[self.device]


def naive(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """Row by row, head by head."""
    group = query.shape[1] // key.shape[1]
    out = torch.empty_like(query)
    for row in range(query.shape[0]):
        first = 0 if window is None else max(0, row - window + 1)
        for head in range(query.shape[1]):
            seen = slice(first, row + 1), head // group
            scores = key[seen] @ query[row, head] / math.sqrt(query.shape[2])
            out[row, head] = scores.softmax(0) @ value[seen]
    return out


@pytest.mark.parametrize("window", [None, 3, 10])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize(
    "query_lens", [[1], [1, 1, 1], [4], [3, 3], [8, 8, 8], [1, 5, 1, 2], [17, 1]]
)
def test_ragged_queries_over_scattered_pages(
    device: str, query_lens: list[int], heads: tuple[int, int], window: int | None
) -> None:
    # Caches of 0, 3, 11 and 6 entries: empty, inside one page, across pages.
    before = [0, 3, 11, 6][: len(query_lens)]
    lengths = [n + q for n, q in zip(before, query_lens, strict=True)]
    scene = Scene(device, Heads(*heads, sliding_window=window), lengths)
    history = [(index, n) for index, n in enumerate(before) if n]
    if history:
        scene.check(history)
    scene.check(list(enumerate(query_lens)))


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("chunks", [[60], [17, 43], [40, 1, 19], [20, 40]])
def test_long_prompts_in_chunks(device: str, chunks: list[int], window: int | None) -> None:
    scene = Scene(device, Heads(4, 2, sliding_window=window), [60, 60, 9])
    for chunk in chunks:
        scene.check([(0, chunk), (1, chunk)])
    scene.check([(2, 9)])


def test_equal_lengths_need_no_mask_and_still_agree(device: str) -> None:
    scene = Scene(device, Heads(4, 2), [9, 9, 9])
    scene.feed([(0, 8), (1, 8), (2, 8)])
    scene.check([(0, 1), (1, 1), (2, 1)])


def test_caches_of_very_different_length_share_a_batch(device: str) -> None:
    scene = Scene(device, Heads(2, 1, head_dim=8), [700, 30, 300, 5])
    scene.feed([(0, 698), (1, 28), (2, 298), (3, 3)])
    scene.check([(0, 2), (1, 2), (2, 2), (3, 2)])


def test_a_window_hides_all_of_a_long_cache_but_its_end(device: str) -> None:
    # More than one internal block of keys (512) is fully masked for the first rows.
    scene = Scene(device, Heads(2, 1, head_dim=8, sliding_window=40), [1300, 1300])
    scene.feed([(0, 1290), (1, 1200)])
    scene.check([(0, 8), (1, 8)])
    scene.check([(1, 60)])


def test_a_row_does_not_depend_on_its_company(device: str) -> None:
    heads = Heads(4, 2)
    alone, together = Scene(device, heads, [30, 12, 25]), Scene(device, heads, [30, 12, 25])
    alone.feed([(0, 26)])
    together.feed([(0, 26), (1, 8), (2, 24)])
    expected = alone.feed([(0, 4)])[0]
    found = together.feed([(1, 4), (0, 4), (2, 1)])[1]
    assert (found - expected).abs().max() < TOLERANCE[device] / 10


def test_layers_keep_their_caches_apart(device: str) -> None:
    scene = Scene(device, Heads(4, 2), [10])
    scene.feed([(0, 10)], layer=1)
    slots = scene.sequences.batch([(0, 0)]).slot_table[0, :10]
    assert torch.equal(scene.sequences.pool.keys[1, slots].cpu(), scene.qkv[0][1])
    assert (scene.sequences.pool.keys[0] == 50.0).all()


def test_an_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"attention_backend='flash'.*torch"):
        create_attention_backend("flash", Heads(4, 2))


def test_a_backend_refuses_the_pool_of_another_model() -> None:
    scene = Scene("cpu", Heads(4, 2), [4])
    backend = create_attention_backend("torch", Heads(4, 1))
    with pytest.raises(AssertionError, match="backend of its own"):
        backend.plan(scene.sequences.batch([(0, 1)]), scene.sequences.pool)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("tree_lens", [(6, 6), (4, 7), (0, 5), (20, 5)])
@pytest.mark.parametrize("newest", [2, 4])
def test_rows_of_a_tree_see_the_text_and_their_own_path(
    device: str, window: int | None, tree_lens: tuple[int, int], newest: int
) -> None:
    """The last rows of trees, some of whose entries are in the cache; a chain beside them."""
    heads = Heads(4, 2, sliding_window=window)
    sequences = PagedSequences(heads, 2, 60, device=device)
    generator = torch.Generator().manual_seed(1)

    def rows(count: int) -> Tensor:
        return torch.randn(count, 8, heads.head_dim, generator=generator).to(device)

    before = [(0, 17), (1, 12)]
    text = rows(29)
    sequences.extend(before).attention.run(1, text, unrotated(text))
    masks: list[int] = []
    for length in tree_lens:
        paths = [1]
        for entry in range(1, length):
            parent = int(torch.randint(entry, (1,), generator=generator))
            paths.append(paths[parent] | 1 << entry)
        masks += paths[-newest:] if length else [0] * newest
    older = [(index, length - newest) for index, length in enumerate(tree_lens) if length > newest]
    if older:
        cached = rows(sum(count for _, count in older))
        sequences.extend(older).attention.run(1, cached, unrotated(cached))
    batch = sequences.batch([(0, newest), (1, newest)])
    batch = replace(batch, tree_mask=torch.tensor(masks, device=device), tree_lens=tree_lens)
    heads_rows = rows(2 * newest)
    plan = sequences.backend.plan(batch, sequences.pool)
    found = plan.run(1, heads_rows, unrotated(heads_rows))
    for index, length in enumerate(tree_lens):
        part = slice(index * newest, (index + 1) * newest)
        layout = PagedLayout(
            tables=sequences.pages[index : index + 1].to(device, torch.int32),
            query_starts=torch.tensor([0, newest], dtype=torch.int32, device=device),
            kv_lens=torch.tensor([batch.kv_lens[index]], dtype=torch.int32, device=device),
            page_size=sequences.page_size,
            max_query_len=newest,
            window=window,
            tree_mask=torch.tensor(masks[part], device=device) if length else None,
            tree_len=length or None,
        )
        pool = sequences.pool
        expected = paged_attention(heads_rows[part, :4], pool.keys[1], pool.values[1], layout)
        assert (found[part] - expected).abs().max() < TOLERANCE[device]
