"""A radix tree over texts, a node per full page: which pages hold the beginning of a text.

A page is known by its tokens and the one after them, for the last draft entry of a page carries the
token that follows it (EAGLE: entry j is token j+1 with feature j). So whatever is made of a known
page, the target's keys and values, its features and the draft's entries, is the same for all who
share it. Texts that part exactly where a page ends do not share that page.

Host only, no tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from serve_spec.kvcache.pages import PageAllocator

_Key = tuple[int, ...]


@dataclass(frozen=True)
class PrefixHit:
    """Pages that hold the beginning of a text, in position order.

    num_draft_pages: how many of them, the first ones, hold the draft's entries, too.
    """

    page_ids: tuple[int, ...] = ()
    num_draft_pages: int = 0


@dataclass(eq=False, slots=True)
class _Node:
    """A page after the pages of its ancestors; without a parent, the first of a text."""

    page: int
    key: _Key
    parent: _Node | None
    has_draft: bool = False
    children: dict[_Key, _Node] = field(default_factory=dict)


class PrefixTree:
    """Owns one reference of every page it knows; a page that nobody else holds is idle.

    Whoever holds a known page holds its ancestors, too. So below an idle page all are idle, and
    the one that is idle longest has nothing below it: evicting is taking the first of a queue.
    """

    def __init__(self, allocator: PageAllocator, page_size: int) -> None:
        self.num_evicted = 0
        self._allocator = allocator
        self._page_size = page_size
        self._first: dict[_Key, _Node] = {}
        self._nodes: dict[int, _Node] = {}
        # In the order they became idle; of a text, the last page first.
        self._idle: OrderedDict[int, _Node] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def num_idle(self) -> int:
        """Pages that only the tree holds."""
        return len(self._idle)

    def match(self, token_ids: Sequence[int], most_tokens: int) -> PrefixHit:
        """The pages known of the text's beginning, `most_tokens` tokens at most."""
        pages: list[int] = []
        num_draft_pages = 0
        for node in self._walk(token_ids, min(most_tokens, len(token_ids) - 1)):
            if node.has_draft and num_draft_pages == len(pages):
                num_draft_pages += 1
            pages.append(node.page)
        return PrefixHit(tuple(pages), num_draft_pages)

    def num_idle_of(self, hit: PrefixHit) -> int:
        """How many pages of a hit only the tree holds."""
        return sum(page in self._idle for page in hit.page_ids)

    def hold(self, hit: PrefixHit) -> None:
        """One more reference of every page of a hit, for whoever found it."""
        self._allocator.share(hit.page_ids)
        for page in hit.page_ids:
            self._idle.pop(page, None)

    def publish(
        self, token_ids: Sequence[int], page_ids: Sequence[int], num_draft_pages: int
    ) -> None:
        """Makes the pages of a running text known, up to one that the tree has another page for.

        Beyond it the text would hold known pages, and not their ancestors.
        token_ids: the tokens of the pages and the one after them. num_draft_pages: see `PrefixHit`.
        """
        self._enter(token_ids, page_ids, num_draft_pages, stop_at_others=True)

    def retire(
        self, token_ids: Sequence[int], page_ids: Sequence[int], num_draft_pages: int
    ) -> None:
        """Takes over the pages of a text that ends; those the tree has others for are released.

        Arguments as for `publish`.
        """
        path = self._enter(token_ids, page_ids, num_draft_pages, stop_at_others=False)
        self._allocator.release(page_ids)
        for node in reversed(path):
            if self._allocator.references(node.page) == 1:
                self._idle[node.page] = node
                self._idle.move_to_end(node.page)

    def evict(self, count: int) -> None:
        """Frees the `count` pages, of the idle ones, that were used longest ago."""
        assert count <= self.num_idle, f"{count} pages to evict, {self.num_idle} are idle"
        for _ in range(count):
            page, node = self._idle.popitem(last=False)
            assert not node.children, f"page {page}: pages after it would be lost"
            del self._children_of(node.parent)[node.key], self._nodes[page]
            self._allocator.release([page])
        self.num_evicted += count

    def page_texts(self) -> Iterator[tuple[int, list[int], bool]]:
        """Every page known: its id, the text up to the token after it, whether it has a draft's
        entries."""
        for node in self._nodes.values():
            keys, up = [node.key], node.parent
            while up is not None:
                keys.append(up.key)
                up = up.parent
            text = [token for key in reversed(keys) for token in key[:-1]]
            yield node.page, [*text, node.key[-1]], node.has_draft

    def check_integrity(self) -> None:
        """Nodes are linked both ways, idle pages queue leaf first. Raises AssertionError."""
        place = {page: number for number, page in enumerate(self._idle)}
        for page, node in self._nodes.items():
            parent = node.parent
            assert node.page == page, f"page {page}: its node is {node.page}'s"
            assert self._children_of(parent)[node.key] is node, f"page {page}: not its parent's"
            is_idle = self._allocator.references(page) == 1
            assert is_idle == (page in place), f"page {page}: idle {is_idle}"
            if parent is not None:
                assert parent.key[-1] == node.key[0], f"page {page}: does not follow its parent"
                last = place.get(parent.page)
                assert last is None or place.get(page, last) < last, f"page {page}: before its leaf"
        assert set(place) <= set(self._nodes), "an idle page that is not known"

    @property
    def page_ids(self) -> list[int]:
        """Every page known."""
        return list(self._nodes)

    def _key(self, token_ids: Sequence[int], number: int) -> _Key:
        first = number * self._page_size
        return tuple(token_ids[first : first + self._page_size + 1])

    def _walk(self, token_ids: Sequence[int], most_tokens: int) -> Iterator[_Node]:
        children = self._first
        for number in range(most_tokens // self._page_size):
            node = children.get(self._key(token_ids, number))
            if node is None:
                return
            yield node
            children = node.children

    def _enter(
        self,
        token_ids: Sequence[int],
        page_ids: Sequence[int],
        num_draft_pages: int,
        *,
        stop_at_others: bool,
    ) -> list[_Node]:
        """The nodes of a text, those it had and new ones of its own pages."""
        path: list[_Node] = []
        parent: _Node | None = None
        for number, page in enumerate(page_ids):
            key = self._key(token_ids, number)
            node = self._children_of(parent).get(key) or self._add(parent, key, page)
            if node.page == page:
                node.has_draft |= number < num_draft_pages
            elif stop_at_others:
                break
            path.append(node)
            parent = node
        return path

    def _add(self, parent: _Node | None, key: _Key, page: int) -> _Node:
        node = _Node(page, key, parent)
        self._allocator.share([page])
        self._children_of(parent)[key] = self._nodes[page] = node
        return node

    def _children_of(self, parent: _Node | None) -> dict[_Key, _Node]:
        return self._first if parent is None else parent.children
