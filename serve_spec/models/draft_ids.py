"""Which ids of the target a draft's own ids stand for, where its vocabulary is reduced.

EAGLE-3's `d2t` holds offsets (target id - draft id), Medusa's `token_map` the ids themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from serve_spec.core.errors import CheckpointError
from serve_spec.models.draft_file import DraftFile

TOKEN_MAP = "token_map"


def read_d2t(file: DraftFile, rows: int, vocab: int) -> Tensor | None:
    """int64 [Vd], the target's id of each of `rows` draft ids; None when they are the same.

    `t2d` marks which of the target's `vocab` ids are reached.

    Raises:
        CheckpointError: no map for a reduced vocabulary, or maps that contradict each other.
    """
    if "d2t" not in file.checkpoint:
        if rows == vocab:
            return None
        raise CheckpointError(
            f"{file.path}: tensor d2t is missing although the head draws from {rows} of {vocab} "
            "tokens; fetch the complete file"
        )
    offsets = file.checkpoint.read("d2t")
    if tuple(offsets.shape) != (rows,) or offsets.is_floating_point():
        raise CheckpointError(
            f"{file.path}: tensor d2t is {list(offsets.shape)} of {offsets.dtype}, expected "
            f"[{rows}] integers"
        )
    if rows == vocab and not offsets.any():
        return None
    ids = torch.arange(rows) + offsets.long()
    _check_target_ids(file, ids, vocab)
    return ids


def read_token_map(file: DraftFile, rows: int, vocab: int) -> Tensor | None:
    """int64 [Vd], the target's id of each draft id; None when they are the same.

    rows: of the output: one for each draft id, or for each of the target's `vocab` ids.

    Raises:
        CheckpointError: a map that is none, or names ids twice or beyond the target's.
    """
    if TOKEN_MAP not in file.checkpoint:
        return None
    ids = file.checkpoint.read(TOKEN_MAP)
    is_map = ids.dim() == 1 and ids.numel() > 0 and not ids.is_floating_point()
    if not is_map or rows not in (len(ids), vocab):
        raise CheckpointError(
            f"{file.path}: tensor {TOKEN_MAP} is {list(ids.shape)} of {ids.dtype}, but the output "
            f"has {rows} rows; one integer for each of them, or some of the target's {vocab} ids, "
            "are needed"
        )
    ids = ids.long()
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or ids.unique().numel() != ids.numel():
        raise CheckpointError(
            f"{file.path}: {TOKEN_MAP} names ids {int(ids.min())} .. {int(ids.max())}, not "
            f"distinct ones below {vocab}; use heads trained for this target"
        )
    return ids


def _check_target_ids(file: DraftFile, ids: Tensor, vocab: int) -> None:
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or ids.unique().numel() != ids.numel():
        raise CheckpointError(
            f"{file.path}: d2t maps draft ids to {int(ids.min())} .. {int(ids.max())}, not to "
            f"distinct ids below {vocab}; it must hold offsets (target id - draft id)"
        )
    if "t2d" not in file.checkpoint:
        return
    reached = file.checkpoint.read("t2d")
    if tuple(reached.shape) != (vocab,):
        raise CheckpointError(
            f"{file.path}: tensor t2d is {list(reached.shape)}, expected [{vocab}]; "
            "use a head trained for this target"
        )
    if not torch.equal(reached.nonzero().view(-1), ids.sort().values):
        raise CheckpointError(
            f"{file.path}: t2d marks other tokens than d2t reaches; d2t must hold offsets "
            "(target id - draft id)"
        )
