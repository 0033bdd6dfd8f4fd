"""Laws of the page allocator and of the per-sequence bookkeeping."""

import pytest

from serve_spec.core.request import SamplingParams
from serve_spec.core.sequence import Sequence
from serve_spec.kvcache.radix import OutOfPages, PageAllocator


def sequence(name):
    return Sequence(name, SamplingParams(), [1], 1, 0)


def test_a_refused_allocation_takes_nothing():
    allocator = PageAllocator(4)
    held = allocator.allocate(3)
    with pytest.raises(OutOfPages, match="2 pages wanted, 1 of 4 free"):
        allocator.allocate(2)
    assert allocator.num_free == 1
    allocator.check_integrity({"a": held})


def test_a_page_released_twice_is_caught():
    allocator = PageAllocator(2)
    pages = allocator.allocate(1)
    allocator.release(pages)
    with pytest.raises(AssertionError, match="without a reference"):
        allocator.release(pages)


def test_integrity_sees_a_page_that_two_sequences_hold():
    allocator = PageAllocator(2)
    pages = allocator.allocate(1)
    with pytest.raises(AssertionError, match=f"page {pages[0]}"):
        allocator.check_integrity({"a": pages, "b": pages})


def test_integrity_sees_a_leaked_page():
    allocator = PageAllocator(2)
    allocator.allocate(1)
    with pytest.raises(AssertionError, match="1 references"):
        allocator.check_integrity({})
