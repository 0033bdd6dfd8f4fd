"""The verdict over trees: draw at every row, then walk from the root along what was drawn."""

from __future__ import annotations

import torch
from torch import Tensor

from serve_spec.core.draft import VerifyResult
from serve_spec.ops import acceptance
from serve_spec.ops.acceptance import AcceptedPath, pack_verdicts
from serve_spec.ops.sampling import SamplingRows, sample
from serve_spec.runtime.trees import TreeRows
from serve_spec.verify.verifier import read_verdicts


def judge_trees(
    logits: Tensor,
    trees: TreeRows,
    sampling: SamplingRows,
    max_depth: int,
    forced: Tensor | None = None,
) -> tuple[VerifyResult, AcceptedPath]:
    """Draws a token from every row of `trees`, then keeps the drafts the draws confirm.

    logits: float32 [R, V]; sampling: of these rows. forced: see `accept_path`.
    The single host read-back of a round happens here.
    """
    drawn = sample(logits, sampling)
    accepted = acceptance.accept_path(
        trees.token_ids, trees.parents, drawn, trees.query_starts, max_depth, forced
    )
    packed = pack_verdicts(trees.token_ids, accepted, trees.query_starts)
    table = torch.cat([packed, accepted.path], dim=1).tolist()
    width = packed.shape[1]
    verdict = read_verdicts([row[:width] for row in table])
    paths = [row[width : width + row[0] + 1] for row in table]
    return VerifyResult(verdict.token_ids, verdict.broken_drafts, paths), accepted
