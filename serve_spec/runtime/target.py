"""The target on one rank: its weights, its cache, and the features it leaves for the drafter."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from serve_spec.core.context import AttentionBackend, ForwardContext, RaggedBatch
from serve_spec.kvcache.pool import FeaturePool, PagedKVPool
from serve_spec.models.draft import FeatureCapture
from serve_spec.models.llama import Llama
from serve_spec.ops import kv_move
from serve_spec.ops.acceptance import AcceptedPath


@dataclass(frozen=True)
class TargetRunner:
    """Runs the target over a ragged batch.

    Every row's features (what the drafter conditions on) are kept by slot, beside its key and
    value. So the drafter can catch up at any later round, over any stretch of positions: after
    rounds without speculation, after a preemption, after a prompt computed in chunks.
    """

    model: Llama
    pool: PagedKVPool
    capture: FeatureCapture | None = None
    features: FeaturePool | None = None

    def forward(self, token_ids: Tensor, batch: RaggedBatch, attention: AttentionBackend) -> Tensor:
        """Computes token_ids [T], fills both caches, returns hidden states [T, H]."""
        context = ForwardContext(batch.positions, attention.plan(batch, self.pool))
        output = self.model.forward(token_ids, context, self.capture)
        if self.features is not None:
            assert output.features is not None, "a drafter waits for features"
            self.features.write(batch.slots, output.features)
        return output.hidden

    def keep(self, slots: Tensor, query_starts: Tensor, accepted: AcceptedPath) -> None:
        """Moves what a tree's kept drafts left in both caches next to each other.

        slots, query_starts: see `ops.kv_move.move_accepted`.
        """
        pools = [self.pool.keys, self.pool.values]
        if self.features is not None:
            pools.append(self.features.features)
        kv_move.move_accepted(pools, slots, query_starts, accepted.path, accepted.num_correct)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [R, V] from hidden states [R, H]."""
        return self.model.logits(hidden)
