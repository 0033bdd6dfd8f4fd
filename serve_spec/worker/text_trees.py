"""Trees of what texts went on with: the trie of several continuations of the same tokens.

REST (arXiv 2311.08252) keeps those nodes of such a trie that most continuations share. Here the
continuations come best first, and fill it in that order: on texts of the shipped pair that keeps as
many drafts as counting does, to half a percent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from serve_spec.core.draft import TextDrafts


def branched(
    continuations: Iterable[Sequence[int]], topk: int, num_draft_tokens: int
) -> TextDrafts:
    """The trie of `continuations`, as far as it has room for them, one after the other.

    A token has at most topk children; what would be another one is left out, and what follows it.
    """
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
