"""EAGLE and EAGLE-3 chains (arXiv 2401.15077, 2503.01840): a small head extrapolates features.

Draft entry j = (token j+1, feature of position j) at position j; its output predicts token j+2. A
whole model drafts so, too, without features and one position further on, and so do Medusa's heads,
of which each reads the same feature (see `DraftHead`).
Entries built from the target's own features are kept; entries made while drafting (from the head's
own features) are always overwritten by the next catch-up.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from serve_spec.core.context import AttentionBackend, ForwardContext, RaggedBatch
from serve_spec.core.draft import DraftTrees
from serve_spec.core.plan import RowPlan
from serve_spec.drafters.base import Proposal
from serve_spec.drafters.draws import BeginDraws
from serve_spec.drafters.eagle_trees import draft_trees
from serve_spec.kvcache.pool import FeaturePool, PagedKVPool
from serve_spec.models.draft import DraftHead
from serve_spec.ops.sampling import SamplingRows, sample_children
from serve_spec.runtime.layout import ragged_batch, slot_table
from serve_spec.runtime.spec_state import SpecRuntimeState


class EagleDrafter:
    """Proposes chains and trees with an EAGLE or EAGLE-3 head over its own paged cache.

    begin_draws: how the drafts of a round are drawn.
    max_tokens: entries computed in one forward while catching up, a bound on memory.
    topk: children of a draft in a tree.
    """

    def __init__(
        self,
        head: DraftHead,
        pool: PagedKVPool,
        features: FeaturePool,
        *,
        page_size: int,
        begin_draws: BeginDraws,
        max_tokens: int,
        topk: int = 1,
    ) -> None:
        self.head = head
        self.pool = pool
        self.features = features
        self.page_size = page_size
        self.begin_draws = begin_draws
        self.max_tokens = max_tokens
        self.topk = topk
        self.device = pool.keys.device
        self.dtype = head.dtype

    def propose(
        self,
        rows: Sequence[RowPlan],
        root_draws: Sequence[int],
        sampling: SamplingRows,
        tier: SpecRuntimeState,
    ) -> Proposal:
        """See `Drafter.propose`: catch up, then one head forward per further draft."""
        assert tier.draft is not None, "a tier built without a drafter can not draft"
        assert tier.extend is not None, "a tier built without a drafter can not catch up"
        slots = slot_table([row.page_ids for row in rows], self.page_size, self.device)
        hidden = self._catch_up(rows, slots, tier.extend)
        depth = max(row.num_steps for row in rows)
        chain = torch.zeros(len(rows), depth, dtype=torch.int64, device=self.device)
        alive = list(range(len(rows)))
        index = torch.arange(len(rows), device=self.device)
        draws = self.begin_draws(sampling, root_draws, depth, self.head.target_ids, self.device)
        for step in range(depth):
            tokens = draws.draw(self.head.logits(hidden, step), index, step)
            chain[index, step] = tokens
            staying = [i for i, b in enumerate(alive) if rows[b].num_steps > step + 1]
            if not staying:
                break
            if len(staying) < len(alive):
                alive = [alive[i] for i in staying]
                tokens, hidden = tokens[staying], hidden[staying]
                slots, index = slots[staying], index[staying]
            starts = [rows[b].start + step for b in alive]
            entered = tokens.clamp(min=0)  # -1: no token; what follows it is never kept
            hidden = self._follow(entered, slots, starts, tier.draft, hidden)
        return Proposal(chain, draws.laws)

    def propose_trees(
        self,
        rows: Sequence[RowPlan],
        root_draws: Sequence[int],
        sampling: SamplingRows,
        tier: SpecRuntimeState,
    ) -> DraftTrees:
        """See `Drafter.propose_trees`: catch up, then one head forward per further level."""
        draft = tier.draft
        assert draft is not None, "a tier built without a drafter can not draft"
        assert tier.extend is not None, "a tier built without a drafter can not catch up"
        slots = slot_table([row.page_ids for row in rows], self.page_size, self.device)
        hidden = self._catch_up(rows, slots, tier.extend)

        def children(hidden: Tensor, step: int, draws: Tensor) -> tuple[Tensor, Tensor]:
            logits, ids = self.head.logits(hidden, step), self.head.target_ids
            return sample_children(logits, sampling, draws, ids, self.topk)

        def feed(tokens: Tensor, batch: RaggedBatch, hidden: Tensor) -> Tensor:
            context = ForwardContext(batch.positions, draft.plan(batch, self.pool))
            return self.head.forward(tokens, hidden, context)

        return draft_trees(rows, root_draws, slots, self.head.shift, hidden, children, feed)

    def _catch_up(
        self, rows: Sequence[RowPlan], slots: Tensor, attention: AttentionBackend
    ) -> Tensor:
        """Makes the missing entries of every row; the hidden state of each row's last one [B, H].

        After a drafting round that is the accepted run; after a prompt or rounds without
        speculation it is everything since, in pieces of at most `max_tokens` entries.
        """
        share = max(1, self.max_tokens // len(rows))
        begin = self._shorten(rows, slots, share, attention)
        lens = [row.start - first for row, first in zip(rows, begin, strict=True)]
        tokens = [t for row, n in zip(rows, lens, strict=True) for t in row.catch_up_ids[-n:]]
        return self._enter(self._ids(tokens), slots, begin, lens, attention, [1] * len(rows))

    def _shorten(
        self,
        rows: Sequence[RowPlan],
        slots: Tensor,
        longest: int,
        attention: AttentionBackend,
    ) -> list[int]:
        """Works off backlogs until no row lacks more than `longest` entries; where each begins.

        All rows together, `max_tokens` entries at a time. One entry of each is left: its output is
        what drafting starts from.
        """
        begin = [row.draft_start for row in rows]
        while True:
            room, pieces = self.max_tokens, []
            for b, row in enumerate(rows):
                count = min(row.start - begin[b] - 1, room)
                if row.start - begin[b] > longest and count > 0:
                    pieces.append((b, count))
                    room -= count
            if not pieces:
                return begin
            tokens: list[int] = []
            for b, count in pieces:
                made = begin[b] - rows[b].draft_start
                tokens += rows[b].catch_up_ids[made : made + count]
            members = [b for b, _ in pieces]
            starts, counts = [begin[b] for b in members], [count for _, count in pieces]
            nothing = [0] * len(members)
            self._enter(self._ids(tokens), slots[members], starts, counts, attention, nothing)
            for b, count in pieces:
                begin[b] += count

    def _enter(
        self,
        tokens: Tensor,
        slots: Tensor,
        starts: Sequence[int],
        lens: Sequence[int],
        attention: AttentionBackend,
        asked: Sequence[int],
    ) -> Tensor:
        """Makes `lens[b]` entries of every row from the target's features.

        Returns the head's hidden states of the last entry of each row where `asked[b]` is 1.
        """
        batch = ragged_batch(slots, [start + self.head.shift for start in starts], lens)
        ends = [end - 1 for end, is_asked in zip(accumulate(lens), asked, strict=True) if is_asked]
        last = torch.tensor(ends, dtype=torch.int64, device=slots.device)
        if self.head.ends_early:
            batch = batch.asking(last, tuple(asked))
        hidden = self.head.encode(self.features.read(batch.slots))
        context = ForwardContext(batch.positions, attention.plan(batch, self.pool), batch.asked)
        hidden = self.head.forward(tokens, hidden, context)
        return hidden if self.head.ends_early else hidden[last]

    def _follow(
        self,
        tokens: Tensor,
        slots: Tensor,
        starts: Sequence[int],
        attention: AttentionBackend,
        hidden: Tensor,
    ) -> Tensor:
        """Makes entry `starts[b]` of every row from the head's own features [B, H]; the next."""
        ones = [1] * len(starts)
        batch = ragged_batch(slots, [start + self.head.shift for start in starts], ones)
        context = ForwardContext(batch.positions, attention.plan(batch, self.pool))
        return self.head.forward(tokens, hidden, context)

    def _ids(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor(tokens, dtype=torch.int64, device=self.device)
