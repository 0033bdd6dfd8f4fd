"""What texts have to draft for the round being planned."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from serve_spec.core.draft import TextDrafter, TextDrafts
from serve_spec.core.round import TreeShape
from serve_spec.core.sequence import Sequence
from serve_spec.scheduler.rows import RowDrafts


class Texts:
    """Asks a text drafter, once a round and sequence, and remembers what it found."""

    def __init__(self, drafter: TextDrafter) -> None:
        self.drafter = drafter
        self._chains: dict[str, tuple[int, ...]] = {}

    def find(self, sequences: SequenceOf[Sequence], most: SequenceOf[int]) -> list[int]:
        """Looks for a chain of up to `most` drafts of each sequence; how many there are."""
        for seq, count in zip(sequences, most, strict=True):
            self._chains[seq.request_id] = self.drafter.propose(
                seq.request_id, seq.token_ids, count
            )
        return [len(self._chains[seq.request_id]) for seq in sequences]

    def drafts(self, seq: Sequence, wanted: RowDrafts) -> TextDrafts:
        """The chain that was found, or, where a tree is wanted, a tree."""
        if not wanted.tree_drafts:
            return TextDrafts(self._chains[seq.request_id])
        shape = TreeShape(wanted.num_steps, wanted.tree_drafts)
        return self.drafter.propose_tree(seq.request_id, seq.token_ids, shape)

    def forget(self, request_id: str) -> None:
        """The sequence has left the batch."""
        self.drafter.forget(request_id)
        self._chains.pop(request_id, None)

    def __len__(self) -> int:
        """Sequences of which something is remembered."""
        return len(self._chains)
