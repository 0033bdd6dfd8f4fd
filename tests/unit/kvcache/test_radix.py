"""Laws of the tree of pages that texts share, against a plain list of what was published."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from serve_spec.kvcache.pages import PageAllocator
from serve_spec.kvcache.radix import PrefixHit, PrefixTree

PAGE = 2
TEXTS = st.lists(st.integers(0, 1), min_size=1, max_size=13)


def known_prefixes(text: Sequence[int]) -> list[tuple[int, ...]]:
    """Every full page of a text with the token after it, as all the tokens up to there."""
    return [tuple(text[: end + 1]) for end in range(PAGE, len(text), PAGE)]


@dataclass
class Sharers:
    """A tree, who holds its pages, and what a plain dictionary says it knows."""

    num_pages: int
    held: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """(text, pages) of whoever runs."""
    pages: dict[tuple[int, ...], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.allocator = PageAllocator(self.num_pages)
        self.tree = PrefixTree(self.allocator, PAGE)

    def start(self, text: list[int]) -> None:
        """Takes what is known of a text, and pages for the rest, if there is room."""
        hit = self.tree.match(text, len(text) - 1)
        expected = []
        for prefix in known_prefixes(text):
            if prefix not in self.pages:
                break
            expected.append(self.pages[prefix])
        assert hit.page_ids == tuple(expected)
        missing = len(text) // PAGE + 1 - len(hit.page_ids)
        room = self.allocator.num_free + self.tree.num_idle - self.tree.num_idle_of(hit)
        if missing > room:
            return
        self.tree.hold(hit)
        before = set(self.tree.page_ids)
        self.tree.evict(max(0, missing - self.allocator.num_free))
        self.forget(before - set(self.tree.page_ids))
        self.held.append((text, [*hit.page_ids, *self.allocator.allocate(missing)]))

    def forget(self, evicted: set[int]) -> None:
        self.pages = {text: page for text, page in self.pages.items() if page not in evicted}

    def publish(self, number: int) -> None:
        text, pages = self.held[number]
        prefixes = known_prefixes(text)
        self.tree.publish(text, pages[: len(prefixes)], 0)
        for prefix, page in zip(prefixes, pages, strict=False):
            if self.pages.setdefault(prefix, page) != page:
                break

    def retire(self, number: int) -> None:
        text, pages = self.held.pop(number)
        prefixes = known_prefixes(text)
        self.tree.retire(text, pages[: len(prefixes)], 0)
        self.allocator.release(pages[len(prefixes) :])
        for prefix, page in zip(prefixes, pages, strict=False):
            self.pages.setdefault(prefix, page)

    def check(self) -> None:
        held = {str(number): pages for number, (_, pages) in enumerate(self.held)}
        self.allocator.check_integrity({**held, "tree": self.tree.page_ids})
        self.tree.check_integrity()
        assert {page: text for text, page in self.pages.items()} == {
            page: tuple(text) for page, text, _ in self.tree.page_texts()
        }
        in_use = {page for _, pages in self.held for page in pages}
        assert self.allocator.num_free + self.tree.num_idle == self.num_pages - len(in_use)


@given(st.lists(st.tuples(st.sampled_from("aapr"), TEXTS, st.integers(0, 9)), max_size=40))
def test_texts_that_come_and_go_find_what_a_dictionary_of_prefixes_holds(
    moves: list[tuple[str, list[int], int]],
) -> None:
    """Too few pages for all of them, so that some are evicted, and no others are lost."""
    sharers = Sharers(num_pages=12)
    for move, text, number in moves:
        if move == "a":
            sharers.start(text)
        elif sharers.held:
            act = sharers.publish if move == "p" else sharers.retire
            act(number % len(sharers.held))
        sharers.check()
    while sharers.held:
        sharers.retire(0)
        sharers.check()
    sharers.tree.evict(sharers.tree.num_idle)
    assert sharers.allocator.num_free == 12
    assert len(sharers.tree) == 0


def filled(texts: Sequence[Sequence[int]], num_draft_pages: int = 0) -> PrefixTree:
    """A tree that knows these texts, the first of them used longest ago."""
    allocator = PageAllocator(32)
    tree = PrefixTree(allocator, PAGE)
    for text in texts:
        count = len(known_prefixes(text))
        tree.retire(text, allocator.allocate(count), num_draft_pages)
    return tree


def found(tree: PrefixTree, text: Sequence[int]) -> int:
    return len(tree.match(text, len(text) - 1).page_ids)


def test_what_was_used_longest_ago_goes_first_and_of_a_text_its_end() -> None:
    old, new = [1, 1, 1, 1, 1], [2, 2, 2, 2, 2]
    tree = filled([old, new])
    hit = tree.match(old, 4)
    tree.hold(hit)
    tree.retire(old, hit.page_ids, 0)
    tree.evict(1)
    assert (found(tree, old), found(tree, new)) == (2, 1)
    tree.evict(2)
    assert (found(tree, old), found(tree, new)) == (1, 0)
    assert tree.num_evicted == 3


def test_draft_entries_are_there_for_the_first_pages_of_a_hit() -> None:
    text = [1, 2, 3, 4, 5, 6, 7]
    tree = filled([text], num_draft_pages=2)
    assert tree.match(text, 6).num_draft_pages == 2
    assert tree.match(text, 2).num_draft_pages == 1


def test_draft_entries_of_one_page_say_nothing_of_another_with_the_same_text() -> None:
    text = [1, 2, 3]
    allocator = PageAllocator(4)
    tree = PrefixTree(allocator, PAGE)
    first, second = allocator.allocate(1), allocator.allocate(1)
    tree.publish(text, first, 0)
    tree.publish(text, second, 1)
    assert tree.match(text, 2) == PrefixHit(tuple(first), 0)
    tree.retire(text, second, 1)
    assert tree.match(text, 2) == PrefixHit(tuple(first), 0)
    assert allocator.num_free == 3, "the second page is nobody's"
    tree.publish(text, first, 1)
    assert tree.match(text, 2) == PrefixHit(tuple(first), 1)
