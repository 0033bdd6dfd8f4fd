"""Laws of the page allocator and of the per-sequence bookkeeping."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.core.request import SamplingParams
from serve_spec.core.sequence import Sequence
from serve_spec.kvcache.manager import KVCacheManager
from serve_spec.kvcache.pages import OutOfPages, PageAllocator


def sequence(name: str) -> Sequence:
    return Sequence(name, SamplingParams(), [1], 1, 0)


def test_a_refused_allocation_takes_nothing() -> None:
    allocator = PageAllocator(4)
    held = allocator.allocate(3)
    with pytest.raises(OutOfPages, match="2 pages wanted, 1 of 4 free"):
        allocator.allocate(2)
    assert allocator.num_free == 1
    allocator.check_integrity({"a": held})


def test_a_page_released_twice_is_caught() -> None:
    allocator = PageAllocator(2)
    pages = allocator.allocate(1)
    allocator.release(pages)
    with pytest.raises(AssertionError, match="without a reference"):
        allocator.release(pages)


def test_integrity_sees_a_page_that_two_sequences_hold() -> None:
    allocator = PageAllocator(2)
    pages = allocator.allocate(1)
    with pytest.raises(AssertionError, match=f"page {pages[0]}"):
        allocator.check_integrity({"a": pages, "b": pages})


def test_integrity_sees_a_leaked_page() -> None:
    allocator = PageAllocator(2)
    allocator.allocate(1)
    with pytest.raises(AssertionError, match="1 references"):
        allocator.check_integrity({})


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), max_size=60))
def test_any_mix_of_growing_and_trimming_keeps_every_page_owned_once(
    moves: list[tuple[int, int]],
) -> None:
    cache = KVCacheManager(num_pages=12, page_size=4)
    sequences = [sequence(str(i)) for i in range(4)]
    for index, num_tokens in moves:
        seq = sequences[index]
        if len(seq.page_ids) * 4 > num_tokens:
            cache.trim(seq, num_tokens)
        elif cache.can_reserve(seq, num_tokens):
            cache.reserve(seq, num_tokens)
        else:
            with pytest.raises(OutOfPages):
                cache.reserve(seq, num_tokens)
        cache.allocator.check_integrity({s.request_id: s.page_ids for s in sequences})
        if len(seq.page_ids) * 4 < num_tokens:
            assert not cache.can_reserve(seq, num_tokens)
    for seq in sequences:
        cache.release(seq)
    assert cache.num_free_pages == 12
