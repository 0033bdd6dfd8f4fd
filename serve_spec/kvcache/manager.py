"""Pages per sequence: reserve them before a step, return unused ones after it."""

from __future__ import annotations

from collections.abc import Iterable

from serve_spec.core.sequence import Sequence
from serve_spec.kvcache.radix import PageAllocator, PrefixHit, PrefixSearch, PrefixTree


class KVCacheManager:
    """Assigns pages to sequences: page i of a sequence covers positions `i·page_size ..`.

    Target and draft KV share the page ids, in pools of their own. Drafts are written into reserved
    pages; rejecting them only lowers the sequence's length.

    With `prefix_caching`, full pages of computed tokens enter a prefix tree. Other sequences start
    from them, and idle ones stay cached until their room is needed.
    """

    def __init__(self, num_pages: int, page_size: int, *, prefix_caching: bool = False) -> None:
        self.allocator = PageAllocator(num_pages)
        self.page_size = page_size
        self.tree = PrefixTree(self.allocator, page_size)
        self.prefix_caching = prefix_caching
        self._searches: dict[str, PrefixSearch] = {}
        """Of waiting sequences, by request id."""

    @property
    def num_free_pages(self) -> int:
        """Pages no sequence holds."""
        return self.allocator.num_free + self.tree.num_idle

    @property
    def num_pages(self) -> int:
        """All pages."""
        return self.allocator.num_pages

    def pages_for(self, num_tokens: int) -> int:
        """Return how many pages `num_tokens` positions take."""
        return -(-num_tokens // self.page_size)

    def can_reserve(self, seq: Sequence, num_tokens: int) -> bool:
        """Return whether `seq` can grow to `num_tokens` positions now."""
        return self.pages_for(num_tokens) - len(seq.page_ids) <= self.num_free_pages

    def can_reserve_all(self, sequences: Iterable[Sequence], num_tokens: Iterable[int]) -> bool:
        """Return whether all sequences together can grow to so many positions each."""
        missing = (
            max(0, self.pages_for(count) - len(seq.page_ids))
            for seq, count in zip(sequences, num_tokens, strict=True)
        )
        return sum(missing) <= self.num_free_pages

    def find(self, seq: Sequence) -> PrefixHit:
        """Return the cached prefix of a sequence of which nothing is computed."""
        search = self._searches.get(seq.request_id)
        if search is None:
            search = PrefixSearch(self.tree, seq.params.cache_salt)
            self._searches[seq.request_id] = search
        return search.hit(seq.token_ids, self.most_cached(seq))

    @property
    def searched_ids(self) -> set[str]:
        """Requests of which a search is known."""
        return set(self._searches)

    def forget(self, seq: Sequence) -> None:
        """Drop what is known of a sequence that waits no more."""
        self._searches.pop(seq.request_id, None)

    def most_cached(self, seq: Sequence) -> int:
        """Return the most tokens `seq` may take from the cache.

        The last token is always computed, because the next one is drawn from it, and so are tokens
        whose log-probabilities are wanted. A preempted sequence computes two, so that it restarts
        with a prefill chunk, which makes the worker drop its old state. One whose logits were NaN
        computes all of them.
        """
        if not self.prefix_caching or seq.is_recomputed:
            return 0
        if seq.params.prompt_logprobs is not None:
            return len(seq.prompt_logprobs)
        return len(seq) - (1 if seq.num_output_tokens == 0 else 2)

    def can_start(self, seq: Sequence, hit: PrefixHit, num_tokens: int) -> bool:
        """Return whether `seq`, without pages, can start from a hit and grow to `num_tokens`."""
        missing = self.pages_for(num_tokens) - len(hit.page_ids)
        return missing <= self.num_free_pages - self.tree.num_idle_of(hit)

    def start(self, seq: Sequence, hit: PrefixHit) -> None:
        """Start `seq`, of which nothing is computed, from a cached prefix."""
        self.forget(seq)
        self.tree.hold(hit)
        seq.page_ids = list(hit.page_ids)
        seq.num_computed = len(hit.page_ids) * self.page_size
        if hit.num_draft_pages:
            # Drafting starts from the output of the last entry, so that one is always computed.
            seq.num_draft_computed = hit.num_draft_pages * self.page_size - 1

    def publish(self, seq: Sequence) -> None:
        """Let other sequences use the full computed pages of a running one."""
        if self.prefix_caching:
            full, num_drafts = self._full_pages(seq), self._num_draft_pages(seq)
            salt, is_proven = seq.params.cache_salt, seq.is_decoding
            self.tree.publish(seq.token_ids, full, num_drafts, salt, is_proven=is_proven)

    def reserve(self, seq: Sequence, num_tokens: int) -> None:
        """Grow `seq` to cover `num_tokens` positions.

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
        """Return the ids of `count` pages that no sequence holds and the tree does not cache.

        Raises:
            OutOfPages: too few are free.
        """
        if count <= self.num_free_pages:
            self.tree.evict(max(0, count - self.allocator.num_free))
        pages = self.allocator.allocate(count)
        self.allocator.release(reversed(pages))  # back where they were
        return pages

    def trim(self, seq: Sequence, num_tokens: int) -> None:
        """Free the pages past `num_tokens` positions (rejected drafts, texts cut by a stop)."""
        keep = self.pages_for(num_tokens)
        if keep < len(seq.page_ids):
            unused = seq.page_ids[keep:]
            del seq.page_ids[keep:]
            self.allocator.release(unused)

    def release(self, seq: Sequence) -> None:
        """Free every page of `seq`; full pages stay cached for other sequences."""
        if self.prefix_caching:
            full = self._full_pages(seq)
            del seq.page_ids[: len(full)]
            num_drafts = self._num_draft_pages(seq)
            salt, is_proven = seq.params.cache_salt, seq.is_decoding
            self.tree.retire(seq.token_ids, full, num_drafts, salt, is_proven=is_proven)
        self.trim(seq, 0)

    def discard(self, seq: Sequence) -> None:
        """Free every page of `seq`, whose logits are NaN; cache only what drew tokens before."""
        if not seq.is_decoding:  # else its last token was drawn from all that is computed
            kept = self.tree.remove_unproven(seq.token_ids, seq.params.cache_salt)
            seq.num_computed = min(seq.num_computed, kept * self.page_size)
        self.release(seq)

    def _full_pages(self, seq: Sequence) -> list[int]:
        """Return the pages that are full of computed tokens, and whose next token is known."""
        return seq.page_ids[: seq.num_computed // self.page_size]

    def _num_draft_pages(self, seq: Sequence) -> int:
        """Return how many of those have complete and usable draft KV."""
        return 0 if seq.has_broken_draft else max(0, seq.num_draft_computed) // self.page_size

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError unless reference counts fit the holders, and lengths the pages."""
        live = list(sequences)
        held = {seq.request_id: seq.page_ids for seq in live}
        self.allocator.check_integrity({**held, "the prefix tree": self.tree.page_ids})
        self.tree.check_integrity()
        for seq in live:
            room = len(seq.page_ids) * self.page_size
            assert seq.num_computed <= room, f"{seq.request_id}: {seq.num_computed} > {room}"
            assert seq.num_draft_computed <= seq.num_computed, seq.request_id
            assert seq.num_computed < len(seq) or seq.finished, seq.request_id
