"""Laws of the page allocator, and of the tree of pages that texts share."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.kvcache.radix import OutOfPages, PageAllocator, PrefixHit, PrefixSearch, PrefixTree

PAGE = 2


def match(tree, text, most_tokens):
    return PrefixSearch(tree, None).hit(text, most_tokens)


def filled(texts, num_draft_pages=0):
    """A tree that knows these texts, the first of them used longest ago."""
    allocator = PageAllocator(32)
    tree = PrefixTree(allocator, PAGE)
    for text in texts:
        tree.retire(text, allocator.allocate((len(text) - 1) // PAGE), num_draft_pages)
    return tree


def found(tree, text):
    return len(match(tree, text, len(text) - 1).page_ids)


def test_what_was_used_longest_ago_goes_first_and_of_a_text_its_end():
    old, new = [1, 1, 1, 1, 1], [2, 2, 2, 2, 2]
    tree = filled([old, new])
    hit = match(tree, old, 4)
    tree.hold(hit)
    tree.retire(old, hit.page_ids, 0)
    tree.evict(1)
    assert (found(tree, old), found(tree, new)) == (2, 1)
    tree.evict(2)
    assert (found(tree, old), found(tree, new)) == (1, 0)
    assert tree.num_evicted == 3


def test_draft_entries_are_there_for_the_first_pages_of_a_hit():
    text = [1, 2, 3, 4, 5, 6, 7]
    tree = filled([text], num_draft_pages=2)
    assert match(tree, text, 6).num_draft_pages == 2
    assert match(tree, text, 2).num_draft_pages == 1


def test_draft_entries_of_a_page_are_not_those_of_another_with_the_same_text():
    text = [1, 2, 3]
    allocator = PageAllocator(4)
    tree = PrefixTree(allocator, PAGE)
    first, second = allocator.allocate(1), allocator.allocate(1)
    tree.publish(text, first, 0)
    tree.publish(text, second, 1)
    assert match(tree, text, 2) == PrefixHit(tuple(first), 0)
    tree.retire(text, second, 1)
    assert match(tree, text, 2) == PrefixHit(tuple(first), 0)
    assert allocator.num_free == 3, "the second page has no owner"
    tree.publish(text, first, 1)
    assert match(tree, text, 2) == PrefixHit(tuple(first), 1)


def test_a_refused_allocation_takes_nothing_and_integrity_sees_wrong_owners_and_releases():
    allocator = PageAllocator(2)
    pages = allocator.allocate(1)
    with pytest.raises(AssertionError, match=f"page {pages[0]}"):
        allocator.check_integrity({"a": pages, "b": pages})
    with pytest.raises(AssertionError, match="1 references"):
        allocator.check_integrity({})
    allocator.release(pages)
    with pytest.raises(AssertionError, match="without a reference"):
        allocator.release(pages)
    allocator = PageAllocator(4)
    held = allocator.allocate(3)
    with pytest.raises(OutOfPages, match="2 pages wanted, 1 of 4 free"):
        allocator.allocate(2)
    assert allocator.num_free == 1
    allocator.check_integrity({"a": held})


TEXTS = st.lists(st.integers(0, 1), min_size=3, max_size=9)
CHANGES = st.lists(
    st.tuples(st.sampled_from(["retire", "evict", "remove"]), TEXTS, st.integers(0, 3)), max_size=12
)


@given(text=TEXTS, changes=CHANGES)
def test_a_repeated_search_finds_what_a_new_one_finds(text, changes):
    allocator = PageAllocator(64)
    tree = PrefixTree(allocator, PAGE)
    search = PrefixSearch(tree, None)
    for change, other, count in changes:
        if change == "retire":
            pages = allocator.allocate((len(other) - 1) // PAGE)
            tree.retire(other, pages, count, is_proven=count > 1)
        elif change == "evict":
            tree.evict(min(count, tree.num_idle))
        else:
            tree.remove_unproven(other)
        most = len(text) - 1 - count % 2
        assert search.hit(text, most) == match(tree, text, most)
        tree.check_integrity()


def test_a_repeated_search_looks_at_one_page_however_long_the_prefix_is(monkeypatch):
    text = [*range(41)]
    tree = filled([text])
    search = PrefixSearch(tree, None)
    assert len(search.hit([*text, 1, 2], 42).page_ids) == 20
    looked, key = [], PrefixTree._key
    monkeypatch.setattr(PrefixTree, "_key", lambda *args: (looked.append(1), key(*args))[1])
    assert len(search.hit([*text, 1, 2], 42).page_ids) == 20
    assert len(looked) <= 1


def test_the_pages_of_a_text_without_a_drawn_token_are_dropped_with_all_after_them():
    tree = filled([])
    allocator, drawn, failed = tree._allocator, [1, 2, 3, 4, 5], [1, 2, 3, 4, 9, 9, 9]
    tree.retire(drawn, allocator.allocate(2), 0, is_proven=True)
    tree.retire(failed, allocator.allocate(3), 0)
    tree.retire([*failed, 8, 8], allocator.allocate(4), 0)
    assert tree.remove_unproven(failed) == 1
    assert (found(tree, drawn), found(tree, [*failed, 8, 8])) == (2, 1)
    assert allocator.num_free == 32 - 2
    tree.check_integrity()
