"""Score edits of requests, from plans to the tables of `ops/score_edits.py`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from serve_spec.core.plan import RowPlan, StepPlan
from serve_spec.ops import score_edits
from serve_spec.ops.score_edits import GENERATED_ONCE, HELD_BACK, IN_PROMPT, ScoreEdits
from serve_spec.ops.sending import sent
from serve_spec.runtime.trees import TreeRows


def write_edits(edits: ScoreEdits, place: int, row: RowPlan) -> None:
    """Writes how the request of `row`, which has its `edited` text, edits its scores, to a place.

    The host does not wait for the device.
    """
    params, text = row.params, row.edited
    assert text is not None, "a row that edits comes with what it needs to know of its text"
    bias, marks = edits.bias[place], edits.marks[place]
    device = bias.device
    bias.fill_(0.0 if params.allowed_token_ids is None else float("-inf"))
    if params.allowed_token_ids is not None:
        bias.index_fill_(0, _sent(params.allowed_token_ids, device), 0.0)
    if params.logit_bias:
        ids = _sent([*params.logit_bias], device)
        bias[ids] += _sent([*params.logit_bias.values()], device, torch.float32)
    if params.bad_token_ids:
        bias.index_fill_(0, _sent(params.bad_token_ids, device), float("-inf"))
    marks.zero_()
    if text.token_ids:
        ids = _sent(text.token_ids, device)
        marks.index_fill_(0, ids[: text.num_prompt_tokens], IN_PROMPT)
        generated = ids[text.num_prompt_tokens :]
        once = torch.full_like(generated, GENERATED_ONCE, dtype=torch.int32)
        marks.index_add_(0, generated, once)
    if text.held_ids:
        marks[_sent(text.held_ids, device)] += HELD_BACK
    edits.repetition[place] = params.repetition_penalty
    edits.frequency[place] = params.frequency_penalty
    edits.presence[place] = params.presence_penalty
    edits.min_lengths[place] = text.num_prompt_tokens + params.min_tokens
    edits.is_on[place] = 1


def edit_round(
    plan: StepPlan, token_ids: Tensor, logits: Tensor, trees: TreeRows | None = None
) -> None:
    """Edits the logits of a round that the host planned, in place.

    token_ids: int64 [R], what the rows that draw compute. logits: float32 [R, V]. trees: what those
    rows are, where drafts branch.
    """
    rows = plan.sampling_rows
    editing = [row for row in rows if row.edited is not None]
    if not editing:
        return
    device = logits.device
    edits = ScoreEdits.create(len(editing), logits.shape[1], device)
    for place, row in enumerate(editing):
        write_edits(edits, place, row)
    places = {row.request_id: place for place, row in enumerate(editing)}
    draws = [
        (places.get(row.request_id, -1), row.length, depth)
        for row in rows
        for depth in range(row.num_draft_tokens + 1)
    ]
    owners, lengths, depths = _sent([*zip(*draws, strict=True)], device)
    backs = None
    if trees is not None:
        depths, backs = trees.depths, trees.backs
    score_edits.edit_scores(
        logits,
        owners.to(torch.int32),
        lengths + depths,
        token_ids,
        depths.to(torch.int32),
        edits,
        backs,
    )


def _sent(
    values: Sequence[float] | Sequence[tuple[int, ...]],
    device: torch.device,
    dtype: torch.dtype = torch.int64,
) -> Tensor:
    return sent(torch.tensor(values, dtype=dtype), device)
