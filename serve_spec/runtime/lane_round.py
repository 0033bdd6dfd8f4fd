"""The static tensors of a round on lanes: what its stages read, and leave for each other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from serve_spec.core.draft import DraftChain, DraftTrees, TextDrafts, padded_drafts
from serve_spec.core.plan import StepPlan
from serve_spec.core.round import DRAFT_SHARPNESS
from serve_spec.log import get_logger
from serve_spec.models.draft import DraftHead
from serve_spec.ops.rejection import DraftLogits
from serve_spec.ops.sending import sent
from serve_spec.runtime.lanes import Lanes
from serve_spec.runtime.pieces import Pieces
from serve_spec.runtime.token_masks import LaneMasks

logger = get_logger(__name__)


@dataclass(frozen=True)
class LaneRound:
    """A round's inputs, hand-overs and outputs, for up to B sequences, N drafts of each, K deep.

    `members` int32 [B]: each sequence's lane, the padding lane past the last. `num_steps` int32
    [B]: how deep its drafts go. `query_lens` int32 [B]: rows the target verifies, its drafts and
    one, and 0 past the last. `hidden` [B, H]: the draft head's state after catching up. `drafts`
    int64 [B, N]: -1 where the head gave no token. `verdicts` int32 [B, K + 3]: drafts kept, flags,
    then the tokens; see `ops.acceptance`. `sharpness` float32 [1]: at which temperature sampled
    sequences draft, over their own. `masks`: what the rows that draw may, by grammar. `pieces`:
    texts a stage computes beside these rows, or instead of them.
    Where drafts may branch: `parents` int32 [B, N], as in `DraftTrees`; `paths` int32 [B, K + 1],
    see `AcceptedPath`.
    Where drafts are sampled: `draft_logits`, from what those in `drafts` were drawn.
    """

    lanes: Lanes
    members: Tensor
    num_steps: Tensor
    query_lens: Tensor
    hidden: Tensor | None
    drafts: Tensor
    verdicts: Tensor
    sharpness: Tensor
    masks: LaneMasks
    pieces: Pieces
    parents: Tensor | None = None
    paths: Tensor | None = None
    draft_logits: DraftLogits | None = None

    @classmethod
    def create(
        cls,
        lanes: Lanes,
        max_steps: int,
        head: DraftHead | None,
        max_prompt_rows: int,
        max_tree_drafts: int = 0,
        *,
        samples_drafts: bool = False,
    ) -> LaneRound:
        """Tensors for a round without sequences, for as many as there are lanes.

        max_tree_drafts: of the largest tree; 0 where nothing branches.

        Raises:
            MemoryError: what sampled drafts are drawn from does not fit.
        """
        device, max_batch_size = lanes.lengths.device, lanes.padding

        def zeros(*shape: int, dtype: torch.dtype | None = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        most = max(max_steps, max_tree_drafts)
        return cls(
            lanes=lanes,
            members=torch.full_like(zeros(max_batch_size), lanes.padding),
            num_steps=zeros(max_batch_size),
            query_lens=zeros(max_batch_size),
            hidden=None
            if head is None
            else zeros(max_batch_size, head.hidden_size, dtype=head.dtype),
            drafts=zeros(max_batch_size, most, dtype=torch.int64),
            verdicts=zeros(max_batch_size, max_steps + 3),
            sharpness=torch.full((1,), DRAFT_SHARPNESS, device=device),
            masks=LaneMasks(max_batch_size * (most + 1), lanes.vocab_size, device),
            pieces=Pieces.create(max_prompt_rows, max_batch_size, device),
            parents=zeros(max_batch_size, most) if max_tree_drafts else None,
            paths=zeros(max_batch_size, max_steps + 1) if max_tree_drafts else None,
            draft_logits=_draft_logits(lanes, max_steps, head)
            if samples_drafts and head is not None and max_steps
            else None,
        )

    @property
    def max_batch_size(self) -> int:
        """Most sequences of a round."""
        return self.members.shape[0]

    @property
    def max_steps(self) -> int:
        """Deepest drafts of a sequence."""
        return self.verdicts.shape[1] - 3

    @property
    def max_drafts(self) -> int:
        """Most drafts of a sequence."""
        return self.drafts.shape[1]

    def seat(
        self, lanes: Sequence[int], num_steps: Sequence[int], num_draft_tokens: Sequence[int]
    ) -> None:
        """Writes who takes part, how deep each drafts and how many drafts of it are verified.

        The host does not wait.
        """
        empty = [0] * (self.max_batch_size - len(lanes))
        members = [*lanes, *[self.lanes.padding] * len(empty)]
        query_lens = [*(count + 1 for count in num_draft_tokens), *empty]
        seats = torch.tensor([members, query_lens, [*num_steps, *empty]], dtype=torch.int32)
        if self.members.is_cuda:
            seats = seats.pin_memory()
        self.members.copy_(seats[0], non_blocking=True)
        self.query_lens.copy_(seats[1], non_blocking=True)
        self.num_steps.copy_(seats[2], non_blocking=True)

    def drafted(self, plan: StepPlan) -> DraftChain | DraftTrees:
        """What was drafted for the sampling rows of a plan, and behind them for nobody."""
        rows = plan.sampling_rows
        if plan.shape.is_chain or self.parents is None:
            return DraftChain(self.drafts, tuple(row.num_steps for row in rows))
        counts = tuple(row.num_draft_tokens for row in rows)
        return DraftTrees(self.drafts, self.parents, counts)

    def write_drafts(self, drafts: Mapping[int, TextDrafts]) -> None:
        """Writes what the host found, by the sequence's number in the round, without waiting."""
        _write(self.drafts, {number: found.token_ids for number, found in drafts.items()})
        parents = {number: found.parents for number, found in drafts.items() if found.parents}
        if parents:
            assert self.parents is not None, "a round with trees has room for them"
            _write(self.parents, parents)


@torch.inference_mode()
def _draft_logits(lanes: Lanes, max_steps: int, head: DraftHead) -> DraftLogits:
    device, vocab_size = lanes.lengths.device, lanes.vocab_size
    hidden = torch.zeros(1, head.hidden_size, dtype=head.dtype, device=device)
    shape = (lanes.padding, max_steps, head.logits(hidden).shape[1])
    mebibytes = 4 * math.prod(shape) / 2**20
    try:
        logits = DraftLogits.create(shape, head.target_ids, vocab_size, device)
    except torch.OutOfMemoryError as error:
        raise MemoryError(
            f"num_steps={max_steps}, max_num_seqs={lanes.padding}: the device has no memory left "
            f"for what sampled drafts are drawn from, {mebibytes:.0f} MiB. Lower memory_fraction, "
            "max_num_seqs or the candidate steps, or use rejection_sample_method=coupled"
        ) from error
    logger.info("sampled drafts: %.0f MiB for what they are drawn from", mebibytes)
    return logits


def _write(table: Tensor, entries: Mapping[int, Sequence[int]]) -> None:
    """Rows of `table` [B, N], padded."""
    padded = padded_drafts(entries.values(), table.shape[1])
    rows = [[number, *of_row] for number, of_row in zip(entries, padded, strict=True)]
    written = sent(torch.tensor(rows, dtype=torch.int64), table.device)
    table.index_copy_(0, written[:, 0], written[:, 1:].to(table.dtype))
