"""What texts have to draft for the round being planned."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from serve_spec.core.draft import TextDrafter, TextDrafts
from serve_spec.core.sequence import Sequence
from serve_spec.scheduler.rows import RowDrafts


class Texts:
    """Asks a text drafter, once a round and sequence, and remembers what it found.

    An id beyond the target's `vocab_size` becomes -1, no token: the round counts it as a broken
    draft, and its sequence drafts no more. The target could not even look it up.
    """

    def __init__(self, drafter: TextDrafter, vocab_size: int) -> None:
        self.drafter = drafter
        self.vocab_size = vocab_size
        self._chains: dict[str, tuple[int, ...]] = {}

    def find(self, sequences: SequenceOf[Sequence], most: SequenceOf[int]) -> list[int]:
        """Looks for a chain of up to `most` drafts of each sequence; how many there are."""
        for seq, count in zip(sequences, most, strict=True):
            found = self.drafter.propose(seq.request_id, seq.token_ids, count)
            self._chains[seq.request_id] = self._known(found)
        return [len(self._chains[seq.request_id]) for seq in sequences]

    def drafts(self, seq: Sequence, wanted: RowDrafts) -> TextDrafts:
        """The chain that was found, or, where a tree is wanted, a tree."""
        if wanted.shape.is_chain:
            return TextDrafts(self._chains[seq.request_id])
        tree = self.drafter.propose_tree(seq.request_id, seq.token_ids, wanted.shape)
        return tree._replace(token_ids=self._known(tree.token_ids))

    def forget(self, request_id: str) -> None:
        """The sequence has left the batch."""
        self.drafter.forget(request_id)
        self._chains.pop(request_id, None)

    def _known(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        if not token_ids or max(token_ids) < self.vocab_size:
            return token_ids
        return tuple(token if token < self.vocab_size else -1 for token in token_ids)

    def __len__(self) -> int:
        """Sequences of which something is remembered."""
        return len(self._chains)
