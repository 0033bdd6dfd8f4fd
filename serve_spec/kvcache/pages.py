"""Page ids of the KV cache: a free list and reference counts. Host only, no tensors."""

from __future__ import annotations

from collections.abc import Iterable


class OutOfPages(RuntimeError):
    """More pages are wanted than are free; the caller decides what to preempt."""


class PageAllocator:
    """Allocates page ids `0 .. num_pages-1`; a page is free again after its last release."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages={num_pages}: a cache needs a page; use at least 1")
        self.num_pages = num_pages
        # A stack: the page freed last is used next, while its memory is still warm.
        self._free = list(range(num_pages - 1, -1, -1))
        self._references = [0] * num_pages

    @property
    def num_free(self) -> int:
        """Pages without a reference."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Return `count` free pages, with one reference each.

        Raises:
            OutOfPages: fewer are free; nothing was taken.
        """
        if count > len(self._free):
            raise OutOfPages(f"{count} pages wanted, {len(self._free)} of {self.num_pages} free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a reference to each page."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is shared without a reference"
            self._references[page] += 1

    def references(self, page: int) -> int:
        """Return the number of references of a page."""
        return self._references[page]

    def release(self, pages: Iterable[int]) -> None:
        """Drop a reference of each page."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} released without a reference"
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)

    def check_integrity(self, held: dict[str, list[int]]) -> None:
        """Raise AssertionError unless every page has as many references as owners in `held`."""
        owners: dict[int, list[str]] = {}
        for owner, pages in held.items():
            for page in pages:
                owners.setdefault(page, []).append(owner)
        free = set(self._free)
        assert len(free) == len(self._free), "a page is twice in the free list"
        for page, references in enumerate(self._references):
            named = owners.get(page, [])
            assert references == len(named), f"page {page}: {references} references, of {named}"
            assert (page in free) == (references == 0), f"page {page}: free and held by {named}"
