"""N-gram drafts of the step being planned."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from serve_spec.core.draft import TextDrafter, TextDrafts
from serve_spec.core.sequence import Sequence
from serve_spec.scheduler.requests import RequestDrafts


class TextDraftCache:
    """Keeps what a text drafter proposed for each sequence, so it is asked once a step.

    An id beyond the target's `vocab_size` becomes -1: the step counts it as a broken draft, and
    its sequence stops drafting.
    """

    def __init__(self, drafter: TextDrafter, vocab_size: int) -> None:
        self.drafter = drafter
        self.vocab_size = vocab_size
        self._chains: dict[str, tuple[int, ...]] = {}

    def find(self, sequences: SequenceOf[Sequence], most: SequenceOf[int]) -> list[int]:
        """Propose up to `most` drafts for each sequence. Return how many were found."""
        for seq, count in zip(sequences, most, strict=True):
            found = self.drafter.propose(seq.request_id, seq.token_ids, count)
            self._chains[seq.request_id] = self._known(found)
        return [len(self._chains[seq.request_id]) for seq in sequences]

    def drafts(self, seq: Sequence, wanted: RequestDrafts) -> TextDrafts:
        """Return the chain that was found, or a tree if one is wanted."""
        if wanted.shape.is_chain:
            return TextDrafts(self._chains[seq.request_id], match=self._match(seq))
        tree = self.drafter.propose_tree(seq.request_id, seq.token_ids, wanted.shape)
        return tree._replace(token_ids=self._known(tree.token_ids), match=self._match(seq))

    def _match(self, seq: Sequence) -> int:
        return self.drafter.match_length(seq.request_id)

    def forget(self, request_id: str) -> None:
        """Drop the state of a sequence that leaves the batch."""
        self.drafter.forget(request_id)
        self._chains.pop(request_id, None)

    def _known(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        if not token_ids or max(token_ids) < self.vocab_size:
            return token_ids
        return tuple(token if token < self.vocab_size else -1 for token in token_ids)

    def __len__(self) -> int:
        """Return the number of sequences with drafts."""
        return len(self._chains)
