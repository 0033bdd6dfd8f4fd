"""What FlashInfer is given, and when it is chosen; its kernels are tested in `tests/gpu`."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.attention import TorchAttention, create_attention_backend
from serve_spec.attention.flashinfer_backend import why_not
from serve_spec.attention.page_table import page_table
from serve_spec.attention.tree_mask import PackedMask, pack_tree_mask
from tests.helpers.paged import PagedSequences

CUDA = torch.device("cuda")
IS_INSTALLED = importlib.util.find_spec("flashinfer") is not None


@dataclass(frozen=True)
class Heads:
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    sliding_window: int | None = None
    num_layers: int = 1


SEQUENCES = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), min_size=1, max_size=5)


@given(sequences=SEQUENCES, page_size=st.sampled_from([1, 3, 4, 16]))
def test_the_pages_hold_exactly_the_slots_of_every_position(
    sequences: list[tuple[int, int]], page_size: int
) -> None:
    paged = PagedSequences(Heads(), len(sequences), max_len=40, page_size=page_size)
    paged.lengths = [before for before, _ in sequences]
    batch = paged.batch([(index, count) for index, (_, count) in enumerate(sequences)])
    table = page_table(batch, page_size)

    assert table.query_starts.diff().tolist() == list(batch.query_lens)
    for b, length in enumerate(batch.kv_lens):
        pages = table.pages[table.page_starts[b] : table.page_starts[b + 1]].tolist()
        slots = [page * page_size + offset for page in pages for offset in range(page_size)]
        unused = page_size - int(table.last_page_lens[b])
        assert 0 <= unused < page_size
        assert slots[: len(slots) - unused] == batch.slot_table[b, :length].tolist()
    assert len(table.pages) == table.page_starts[-1]


def test_what_the_library_reads_is_int32_and_its_plan_stays_on_the_host() -> None:
    table = page_table(PagedSequences(Heads(), 2, max_len=8).batch([(0, 3), (1, 8)]), page_size=4)
    tensors = (table.query_starts, table.page_starts, table.last_page_lens, table.pages)
    assert {tensor.dtype for tensor in tensors} == {torch.int32}
    assert {tensor.device.type for tensor in tensors[:3]} == {"cpu"}


def unpacked(mask: PackedMask, query_lens: list[int], kv_lens: list[int]) -> list[np.ndarray]:
    """The bits of every sequence [query_len, kv_len], read as the kernel reads them."""
    bits = np.unpackbits(mask.bits.numpy(), bitorder="little")
    return [
        bits[start * 8 :][: count * length].reshape(count, length)
        for start, count, length in zip(
            mask.byte_starts.tolist(), query_lens, kv_lens, strict=False
        )
    ]


@st.composite
def trees(draw: st.DrawFn) -> list[int | None]:
    """The parent of every row; None: it hangs on the last committed token."""
    size = draw(st.integers(1, 8))
    return [draw(st.sampled_from([None, *range(row)])) for row in range(size)]


def ancestors(parents: list[int | None], row: int | None) -> list[int]:
    """`row` and what it descends from, among the tree's rows."""
    return [] if row is None else [row, *ancestors(parents, parents[row])]


@given(
    forest=st.lists(st.tuples(st.integers(0, 12), trees()), min_size=1, max_size=3),
    window=st.sampled_from([None, 9, 12]),
)
def test_a_row_sees_its_ancestors_and_what_is_committed_within_its_window(
    forest: list[tuple[int, list[int | None]]], window: int | None
) -> None:
    lines = [ancestors(parents, row) for _, parents in forest for row in range(len(parents))]
    tree_mask = torch.tensor([sum(1 << row for row in line) for line in lines])
    query_lens = [len(parents) for _, parents in forest]
    kv_lens = [before + count for (before, _), count in zip(forest, query_lens, strict=True)]

    mask = pack_tree_mask(tree_mask, query_lens, kv_lens, query_lens, window)

    for (before, parents), sees in zip(forest, unpacked(mask, query_lens, kv_lens), strict=True):
        for row in range(len(parents)):
            line = ancestors(parents, row)
            first = 0 if window is None else before + len(line) - window
            committed = range(max(0, first), before)
            assert set(sees[row].nonzero()[0]) == {*committed, *(before + r for r in line)}


@pytest.mark.parametrize("tree_len", [3, 0])
def test_a_chain_is_the_tree_whose_mask_is_causal(tree_len: int) -> None:
    chain = torch.tensor([0b1, 0b11, 0b111])
    (sees,) = unpacked(pack_tree_mask(chain, [3], [7], [tree_len], None), [3], [7])
    assert (sees == np.tri(3, 7, 4)).all()


def test_every_sequence_of_a_mask_begins_at_a_byte() -> None:
    mask = pack_tree_mask(torch.tensor([1, 1, 3, 1]), [1, 2, 1], [3, 5, 8], [1, 2, 1], None)
    assert mask.byte_starts.tolist() == [0, 1, 3, 4]
    assert len(mask.bits) == 4


@pytest.mark.parametrize(
    ("heads", "device", "dtype", "reason"),
    [
        (Heads(), "cpu", torch.bfloat16, r"device='cpu': .*attention_backend='torch'"),
        (Heads(), "cuda", torch.float32, r"dtype='float32': .*bfloat16 or float16"),
        (Heads(head_dim=80), "cuda", torch.bfloat16, r"head_dim=80: .*\(64, 128, 256\)"),
        (Heads(sliding_window=9), "cuda", torch.bfloat16, r"sliding_window=9: .*use 'torch'"),
    ],
)
def test_a_model_flashinfer_can_not_serve_is_refused_by_name_and_gets_torch_by_default(
    heads: Heads, device: str, dtype: torch.dtype, reason: str
) -> None:
    with pytest.raises(ValueError, match=f"attention_backend='flashinfer': {reason}"):
        create_attention_backend("flashinfer", heads, device, dtype)
    assert isinstance(create_attention_backend("auto", heads, device, dtype), TorchAttention)


@pytest.mark.skipif(IS_INSTALLED, reason="FlashInfer is installed here")
def test_without_the_package_the_refusal_says_how_to_install_it() -> None:
    assert why_not(Heads(), CUDA, torch.bfloat16) is not None
    with pytest.raises(ValueError, match=r"not installed: pip install serve-spec\[gpu\]"):
        create_attention_backend("flashinfer", Heads(), CUDA, torch.bfloat16)
    assert create_attention_backend("auto", Heads(), CUDA, torch.bfloat16).name == "torch"
