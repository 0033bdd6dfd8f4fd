"""Page bookkeeping per sequence: reserve ahead of a round, give the surplus back after it."""

from __future__ import annotations

from collections.abc import Iterable

from serve_spec.core.sequence import Sequence
from serve_spec.kvcache.pages import PageAllocator
from serve_spec.kvcache.radix import PrefixHit, PrefixTree


class KVCacheManager:
    """Sequences hold pages in position order: page i covers positions `i·page_size ..`.

    Target and draft caches share the page ids (their pools differ). Drafts are written into
    reserved pages optimistically; rejecting them costs nothing but the length that rewinds.

    With `prefix_caching`, full pages of committed and computed tokens are known to a tree: others
    begin with them, and they stay, when nobody holds them, until their room is needed.
    """

    def __init__(self, num_pages: int, page_size: int, *, prefix_caching: bool = False) -> None:
        self.allocator = PageAllocator(num_pages)
        self.page_size = page_size
        self.tree = PrefixTree(self.allocator, page_size)
        self.prefix_caching = prefix_caching

    @property
    def num_free_pages(self) -> int:
        """Pages no sequence holds."""
        return self.allocator.num_free + self.tree.num_idle

    @property
    def num_pages(self) -> int:
        """All pages."""
        return self.allocator.num_pages

    def pages_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` positions need."""
        return -(-num_tokens // self.page_size)

    def can_reserve(self, seq: Sequence, num_tokens: int) -> bool:
        """Whether `seq` could grow to `num_tokens` positions now."""
        return self.pages_for(num_tokens) - len(seq.page_ids) <= self.num_free_pages

    def can_reserve_all(self, sequences: Iterable[Sequence], num_tokens: Iterable[int]) -> bool:
        """Whether all of them could grow to that many positions each, together."""
        missing = (
            max(0, self.pages_for(count) - len(seq.page_ids))
            for seq, count in zip(sequences, num_tokens, strict=True)
        )
        return sum(missing) <= self.num_free_pages

    def find(self, seq: Sequence) -> PrefixHit:
        """The pages known of a text of which nothing is computed."""
        return self.tree.match(seq.token_ids, self.most_cached(seq))

    def most_cached(self, seq: Sequence) -> int:
        """Most tokens `seq` could begin with.

        The last one is computed in any case, for what follows is drawn from it, and so are those
        whose log-probabilities are asked for. A preempted text computes two, so that it starts
        anew as texts start, with a row of a prompt: that tells a worker to forget where it was.
        """
        if not self.prefix_caching:
            return 0
        if seq.params.prompt_logprobs is not None:
            return len(seq.prompt_logprobs)
        return len(seq) - (1 if seq.num_output_tokens == 0 else 2)

    def can_start(self, seq: Sequence, hit: PrefixHit, num_tokens: int) -> bool:
        """Whether `seq`, which holds nothing, could begin with a hit and grow to `num_tokens`."""
        missing = self.pages_for(num_tokens) - len(hit.page_ids)
        return missing <= self.num_free_pages - self.tree.num_idle_of(hit)

    def start(self, seq: Sequence, hit: PrefixHit) -> None:
        """Lets `seq`, of which nothing is computed, begin with a hit."""
        self.tree.hold(hit)
        seq.page_ids = list(hit.page_ids)
        seq.num_computed = len(hit.page_ids) * self.page_size
        if hit.num_draft_pages:
            # Drafting starts from the output of the last entry, so that one is made in any case.
            seq.num_draft_computed = hit.num_draft_pages * self.page_size - 1

    def publish(self, seq: Sequence) -> None:
        """Makes the full pages of what is computed of a running text known to others."""
        if self.prefix_caching:
            self.tree.publish(seq.token_ids, self._full_pages(seq), self._num_draft_pages(seq))

    def reserve(self, seq: Sequence, num_tokens: int) -> None:
        """Grows `seq` to cover `num_tokens` positions.

        Raises:
            OutOfPages: too few are free; nothing was taken.
        """
        missing = self.pages_for(num_tokens) - len(seq.page_ids)
        if missing <= 0:
            return
        if missing <= self.num_free_pages:
            self.tree.evict(max(0, missing - self.allocator.num_free))
        seq.page_ids += self.allocator.allocate(missing)

    def unheld_pages(self, count: int) -> list[int]:
        """Ids of `count` pages that no sequence holds and the tree does not know; they stay free.

        Raises:
            OutOfPages: sequences hold too many.
        """
        if count <= self.num_free_pages:
            self.tree.evict(max(0, count - self.allocator.num_free))
        pages = self.allocator.allocate(count)
        self.allocator.release(reversed(pages))  # back where they were
        return pages

    def trim(self, seq: Sequence, num_tokens: int) -> None:
        """Returns the pages past `num_tokens` positions (rejected drafts, shortened texts)."""
        keep = self.pages_for(num_tokens)
        if keep < len(seq.page_ids):
            surplus = seq.page_ids[keep:]
            del seq.page_ids[keep:]
            self.allocator.release(surplus)

    def release(self, seq: Sequence) -> None:
        """Returns every page of `seq`, which leaves; others may begin with what it computed."""
        if self.prefix_caching:
            full = self._full_pages(seq)
            del seq.page_ids[: len(full)]
            self.tree.retire(seq.token_ids, full, self._num_draft_pages(seq))
        self.trim(seq, 0)

    def _full_pages(self, seq: Sequence) -> list[int]:
        """Pages of committed tokens that the target has computed, the one after them known."""
        return seq.page_ids[: seq.num_computed // self.page_size]

    def _num_draft_pages(self, seq: Sequence) -> int:
        """Of those, the pages whose draft entries are made by catching up, and usable."""
        return 0 if seq.has_broken_draft else max(0, seq.num_draft_computed) // self.page_size

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Every page is counted as often as it is held; every sequence's cache fits its pages."""
        live = list(sequences)
        held = {seq.request_id: seq.page_ids for seq in live}
        self.allocator.check_integrity({**held, "the prefix tree": self.tree.page_ids})
        self.tree.check_integrity()
        for seq in live:
            room = len(seq.page_ids) * self.page_size
            assert seq.num_computed <= room, f"{seq.request_id}: {seq.num_computed} > {room}"
            assert seq.num_draft_computed <= seq.num_computed, seq.request_id
            assert seq.num_computed < len(seq) or seq.finished, seq.request_id
