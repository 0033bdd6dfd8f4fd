"""The verdict of a round on lanes: draw, walk, move on, all on the device."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from serve_spec.ops import acceptance, draw, rejection, score_edits, token_masks
from serve_spec.ops.acceptance import AcceptedPath
from serve_spec.parallel.group import SINGLE, TensorParallel
from serve_spec.runtime.lane_round import LaneRound
from serve_spec.runtime.lane_target import VerifiedRows
from serve_spec.verify.synthetic import Acceptance, draft_chances


class LaneJudge:
    """Decides what every sequence of a round emits and moves its lane on by it.

    synthetic_acceptance: keeps drafts by chance instead, for load tests; see `verify.synthetic`.
    rejection_sample_method: how sampled drafts are judged, where `round.draft_logits` are kept.
    """

    def __init__(
        self,
        max_steps: int,
        device: torch.device,
        synthetic_acceptance: Acceptance | None = None,
        rejection_sample_method: str = "coupled",
        parallel: TensorParallel = SINGLE,
    ) -> None:
        self.rejection_sample_method = rejection_sample_method
        self.parallel = parallel
        self.survival = None
        if synthetic_acceptance is not None and max_steps:
            self.survival = _survival_table(synthetic_acceptance, max_steps).to(device)

    def __call__(
        self, rows: VerifiedRows, round: LaneRound, *, has_drafts: bool = True
    ) -> AcceptedPath:
        """Edits scores, draws a token from every row, walks, writes `round.verdicts` and lanes.

        Where drafts branch, `round.paths` too. has_drafts: False where no row can be a draft's.
        """
        lanes, layout = round.lanes, rows.layout
        batch_size = layout.query_starts.shape[0] - 1
        members = round.members[:batch_size]
        decided = layout.positions + 1
        parents, depths, backs = layout.offsets - 1, layout.offsets, None
        if rows.parents is not None and rows.depths is not None:
            parents, depths, backs = rows.parents, rows.depths, layout.offsets - rows.parents
        score_edits.edit_scores(
            rows.logits, rows.row_lanes, decided, rows.token_ids, depths, lanes.edits, backs
        )
        token_masks.mask_scores(rows.logits, round.masks.places, round.masks.words)
        drawn = draw.draw_tokens(rows.logits, rows.row_lanes, decided, lanes.params)
        forced = self._forced(round, members, batch_size)
        if round.draft_logits is not None and has_drafts:
            forced = rejection.reject_drafts(
                rows.logits,
                rows.token_ids,
                drawn,
                layout.query_starts,
                members,
                decided,
                lanes.params,
                round.draft_logits,
                self.rejection_sample_method,
            )
            self.parallel.broadcast(forced)
        # Lanes move on by these: on every rank by the same.
        self.parallel.broadcast(drawn)
        accepted = acceptance.accept_and_advance(
            rows.token_ids,
            parents,
            drawn,
            layout.query_starts,
            lanes.recent,
            lanes.lengths,
            members,
            round.verdicts[:batch_size],
            forced=forced,
        )
        score_edits.count_tokens(members, round.verdicts[:batch_size], lanes.edits)
        if round.paths is not None:
            round.paths[:batch_size].copy_(accepted.path)
        return accepted

    def _forced(self, round: LaneRound, members: Tensor, batch_size: int) -> Tensor | None:
        """How many drafts each sequence keeps by chance; None where the target decides."""
        if self.survival is None:
            return None
        lanes = round.lanes
        return acceptance.forced_counts(
            lanes.params.seeds.index_select(0, members),
            lanes.lengths.index_select(0, members).long(),
            round.num_steps[:batch_size],
            self.survival,
        )


def _survival_table(acceptance: Acceptance, max_steps: int) -> Tensor:
    """Chance that the first 1 .. k drafts of n are all kept: [max_steps + 1, max_steps], row n."""
    rows = []
    for num_steps in range(max_steps + 1):
        survival = [*accumulate(draft_chances(acceptance, num_steps), lambda a, b: a * b)]
        rows.append(survival + [0.0] * (max_steps - num_steps))
    return torch.tensor(rows, dtype=torch.float64)
