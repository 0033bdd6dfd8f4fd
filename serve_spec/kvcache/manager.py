"""Page bookkeeping per sequence: reserve ahead of a round, give the surplus back after it."""

from __future__ import annotations

from collections.abc import Iterable

from serve_spec.core.sequence import Sequence
from serve_spec.kvcache.pages import PageAllocator


class KVCacheManager:
    """Sequences hold pages in position order: page i covers positions `i·page_size ..`.

    Target and draft caches share the page ids (their pools differ). Drafts are written into
    reserved pages optimistically; rejecting them costs nothing but the length that rewinds.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.allocator = PageAllocator(num_pages)
        self.page_size = page_size

    @property
    def num_free_pages(self) -> int:
        """Pages nobody holds."""
        return self.allocator.num_free

    @property
    def num_pages(self) -> int:
        """All pages."""
        return self.allocator.num_pages

    def pages_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` positions need."""
        return -(-num_tokens // self.page_size)

    def can_reserve(self, seq: Sequence, num_tokens: int) -> bool:
        """Whether `seq` could grow to `num_tokens` positions now."""
        return self.pages_for(num_tokens) - len(seq.page_ids) <= self.allocator.num_free

    def can_reserve_all(self, sequences: Iterable[Sequence], num_tokens: Iterable[int]) -> bool:
        """Whether all of them could grow to that many positions each, together."""
        missing = (
            max(0, self.pages_for(count) - len(seq.page_ids))
            for seq, count in zip(sequences, num_tokens, strict=True)
        )
        return sum(missing) <= self.allocator.num_free

    def reserve(self, seq: Sequence, num_tokens: int) -> None:
        """Grows `seq` to cover `num_tokens` positions.

        Raises:
            OutOfPages: too few are free; nothing was taken.
        """
        missing = self.pages_for(num_tokens) - len(seq.page_ids)
        if missing > 0:
            seq.page_ids += self.allocator.allocate(missing)

    def trim(self, seq: Sequence, num_tokens: int) -> None:
        """Returns the pages past `num_tokens` positions (rejected drafts, shortened texts)."""
        keep = self.pages_for(num_tokens)
        surplus = seq.page_ids[keep:]
        del seq.page_ids[keep:]
        self.allocator.release(surplus)

    def release(self, seq: Sequence) -> None:
        """Returns every page of `seq`."""
        self.trim(seq, 0)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Every page is owned once and every sequence's cache fits its pages."""
        live = list(sequences)
        self.allocator.check_integrity({seq.request_id: seq.page_ids for seq in live})
        for seq in live:
            room = len(seq.page_ids) * self.page_size
            assert seq.num_computed <= room, f"{seq.request_id}: {seq.num_computed} > {room}"
            assert seq.num_draft_computed <= seq.num_computed, seq.request_id
            assert seq.num_computed < len(seq) or seq.finished, seq.request_id
