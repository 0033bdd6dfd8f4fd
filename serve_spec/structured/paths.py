"""What may be drawn after each draft of a round, along the draft's own path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from serve_spec.structured.compiler import Mask, Matcher


class Node(NamedTuple):
    """A draft: whether it can be drawn where it stands, and what may be drawn after it (None:
    anything, for nobody will look at it)."""

    is_legal: bool
    mask: Mask | None = None


_ILLEGAL = Node(is_legal=False)
_LAST = Node(is_legal=True)


def follow(
    matcher: Matcher,
    root: Mask,
    token_ids: Sequence[int],
    parents: Sequence[int],
    ends: Mask,
    mask_at: Callable[[int], Mask],
) -> list[Node]:
    """One node per draft; the matcher is back where it was, unless it has a `problem` now.

    root: what may be drawn at the root. ends: the tokens that end a text; a draft of one, or of -1
    (no token), is the last of its path.
    token_ids, parents: of each draft, parents before children, -1 for the root.
    mask_at: what may be drawn where the matcher stands, so many drafts after the root.
    """
    nodes: list[Node] = []
    path: list[int] = []
    for number, (token, parent) in enumerate(zip(token_ids, parents, strict=True)):
        before = root if parent < 0 else nodes[parent].mask
        if before is None or matcher.problem or not (token < 0 or allows(before, token)):
            nodes.append(_ILLEGAL)
        elif token < 0 or allows(ends, token):
            nodes.append(_LAST)
        else:
            path = _move(matcher, path, [*_ancestors(parents, parent), number], token_ids)
            nodes.append(Node(is_legal=True, mask=mask_at(len(path))))
    if not matcher.problem:
        matcher.go_back(len(path))
    return nodes


def allows(mask: Mask, token: int) -> bool:
    """Whether the mask has the token."""
    return bool(mask[token >> 5] >> (token & 31) & 1)


def _ancestors(parents: Sequence[int], node: int) -> list[int]:
    """From the root's child down to the node itself."""
    found = []
    while node >= 0:
        found.append(node)
        node = parents[node]
    return found[::-1]


def _move(matcher: Matcher, old: list[int], new: list[int], token_ids: Sequence[int]) -> list[int]:
    """Brings the matcher from the end of one path to the end of another, which it returns."""
    same = 0
    while same < min(len(old), len(new)) and old[same] == new[same]:
        same += 1
    matcher.go_back(len(old) - same)
    matcher.advance([token_ids[node] for node in new[same:]])
    return new
