"""Page ids of the KV cache: which are free, and which hold a cached prefix (RadixAttention).

The prefix cache is a radix tree with a node per full page.

A node's key holds the page's tokens and the next one, because the last draft KV entry of a page
depends on the token after it (EAGLE: entry j is token j+1 with feature j). So target KV, features
and draft KV of a cached page are the same for all sequences that share it. Sequences that diverge
exactly at the end of a page do not share that page. The key of a first page begins with the salt,
if there is one, so that sequences with different salts share nothing.

Host only, no tensors.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

_Key = tuple[int | str, ...]


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


@dataclass(frozen=True)
class PrefixHit:
    """Cached pages of a prefix, in position order.

    num_draft_pages: how many of the first ones hold draft KV, too.
    """

    page_ids: tuple[int, ...] = ()
    num_draft_pages: int = 0


@dataclass(eq=False, slots=True)
class _Node:
    page: int
    key: _Key
    parent: _Node | None
    has_draft: bool = False
    is_proven: bool = False
    """Whether a token was drawn after it, so that it holds no NaN."""
    children: dict[_Key, _Node] = field(default_factory=dict)


class PrefixSearch:
    """The cached prefix of a text that waits: repeated, it only looks at what has changed."""

    def __init__(self, tree: PrefixTree, salt: str | None) -> None:
        self._tree = tree
        self._salt = salt
        self._path: list[_Node] = []
        self._hit = PrefixHit()

    def hit(self, token_ids: Sequence[int], most_tokens: int) -> PrefixHit:
        """Return the cached pages of a prefix of at most `most_tokens` tokens.

        token_ids: those of the last call, and any more after them.
        """
        path, last = self._path, self._hit
        has_changed = self._tree.follow(path, token_ids, most_tokens, self._salt)
        num_draft_pages = min(last.num_draft_pages, len(path))
        while num_draft_pages < len(path) and path[num_draft_pages].has_draft:
            num_draft_pages += 1
        if has_changed or num_draft_pages != last.num_draft_pages:
            self._hit = PrefixHit(tuple([node.page for node in path]), num_draft_pages)
        return self._hit


class PrefixTree:
    """Holds one reference of every cached page; a page without another reference is idle.

    A sequence that holds a cached page holds its ancestors, too. So all descendants of an idle page
    are idle, and the one idle longest is a leaf: eviction takes the first of a queue (LRU).
    """

    def __init__(self, allocator: PageAllocator, page_size: int) -> None:
        self.num_evicted = 0
        self._allocator = allocator
        self._page_size = page_size
        self._first: dict[_Key, _Node] = {}
        self._nodes: dict[int, _Node] = {}
        # In the order they became idle; of one sequence, the last page first.
        self._idle: OrderedDict[int, _Node] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def num_idle(self) -> int:
        """Pages that no sequence holds."""
        return len(self._idle)

    def follow(
        self, path: list[_Node], token_ids: Sequence[int], most_tokens: int, salt: str | None
    ) -> bool:
        """Cut a path of a text to the nodes that are left, and extend it by those that are new.

        Return whether it has changed.
        """
        newest = path[-1] if path else None
        # The tree keeps the ancestors of every node.
        while path and self._nodes.get(path[-1].page) is not path[-1]:
            path.pop()
        most = max(min(most_tokens, len(token_ids) - 1) // self._page_size, 0)
        del path[most:]
        while len(path) < most:
            children = self._children_of(path[-1] if path else None)
            node = children.get(self._key(token_ids, len(path), salt))
            if node is None:
                break
            path.append(node)
        return (path[-1] if path else None) is not newest

    def num_idle_of(self, hit: PrefixHit) -> int:
        """Return how many pages of a hit no sequence holds: the last ones."""
        pages = hit.page_ids
        return len(pages) - bisect_left(pages, True, key=self._idle.__contains__)

    def hold(self, hit: PrefixHit) -> None:
        """Add a reference to every page of a hit."""
        self._allocator.share(hit.page_ids)
        for page in hit.page_ids:
            self._idle.pop(page, None)

    def publish(
        self,
        token_ids: Sequence[int],
        page_ids: Sequence[int],
        num_draft_pages: int,
        salt: str | None = None,
        *,
        is_proven: bool = False,
    ) -> None:
        """Insert the pages of a running sequence, up to the first that the tree has already.

        Beyond that one the sequence would hold cached pages, but not their ancestors.
        token_ids: the tokens of the pages and the one after them. num_draft_pages: see `PrefixHit`.
        is_proven: whether a token was drawn after the pages.
        """
        known = num_draft_pages, is_proven
        self._insert(token_ids, page_ids, known, salt, stop_at_others=True)

    def retire(
        self,
        token_ids: Sequence[int],
        page_ids: Sequence[int],
        num_draft_pages: int,
        salt: str | None = None,
        *,
        is_proven: bool = False,
    ) -> None:
        """Insert the pages of a sequence that ends and drop its references; see `publish`."""
        known = num_draft_pages, is_proven
        path = self._insert(token_ids, page_ids, known, salt, stop_at_others=False)
        self._allocator.release(page_ids)
        for node in reversed(path):
            if self._allocator.references(node.page) == 1:
                self._idle[node.page] = node
                self._idle.move_to_end(node.page)

    def evict(self, count: int) -> None:
        """Free the `count` least recently used idle pages."""
        assert count <= self.num_idle, f"{count} pages to evict, {self.num_idle} are idle"
        for _ in range(count):
            page, node = self._idle.popitem(last=False)
            assert not node.children, f"page {page}: pages after it would be lost"
            del self._children_of(node.parent)[node.key], self._nodes[page]
            self._allocator.release([page])
        self.num_evicted += count

    def remove_unproven(self, token_ids: Sequence[int], salt: str | None = None) -> int:
        """Drop the pages of a text that no token was drawn from, and all pages after them.

        Sequences that hold such pages keep them. Return the number of pages before them.
        """
        children, number = self._first, 0
        while (number + 1) * self._page_size < len(token_ids):
            key = self._key(token_ids, number, salt)
            node = children.get(key)
            if node is None:
                break
            if not node.is_proven:
                del children[key]
                self._drop(node)
                break
            children, number = node.children, number + 1
        return number

    def _drop(self, top: _Node) -> None:
        """Drop the references of a node and all nodes under it."""
        left = [top]
        while left:
            node = left.pop()
            left += node.children.values()
            del self._nodes[node.page]
            self._idle.pop(node.page, None)
            self._allocator.release([node.page])

    def page_texts(self) -> Iterator[tuple[int, list[int], bool]]:
        """Yield every cached page: id, tokens up to the one after it, whether it has draft KV."""
        for node in self._nodes.values():
            keys, up = [node.key], node.parent
            while up is not None:
                keys.append(up.key)
                up = up.parent
            *_, last = node.key
            text = [*(token for key in reversed(keys) for token in key[:-1]), last]
            yield node.page, [token for token in text if isinstance(token, int)], node.has_draft

    def check_integrity(self) -> None:
        """Raise AssertionError unless links go both ways and idle pages are queued leaf first."""
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
        assert set(place) <= set(self._nodes), "an idle page that is not cached"

    @property
    def page_ids(self) -> list[int]:
        """Every cached page."""
        return list(self._nodes)

    def _key(self, token_ids: Sequence[int], number: int, salt: str | None) -> _Key:
        first = number * self._page_size
        key = tuple(token_ids[first : first + self._page_size + 1])
        return key if salt is None or number else (salt, *key)

    def _insert(
        self,
        token_ids: Sequence[int],
        page_ids: Sequence[int],
        known: tuple[int, bool],
        salt: str | None,
        *,
        stop_at_others: bool,
    ) -> list[_Node]:
        """Return the nodes of a sequence, adding those that are missing.

        known: how many pages have draft KV, and whether the pages are proven.
        """
        num_draft_pages, is_proven = known
        path: list[_Node] = []
        parent: _Node | None = None
        for number, page in enumerate(page_ids):
            key = self._key(token_ids, number, salt)
            node = self._children_of(parent).get(key) or self._add(parent, key, page)
            if node.page == page:
                node.has_draft |= number < num_draft_pages
                node.is_proven |= is_proven
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
