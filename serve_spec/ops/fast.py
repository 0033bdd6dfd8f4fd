"""Each function's fast twin where its tensors live on a GPU, the plain one elsewhere.

Kernels are imported on their first use: machines without a GPU need no Triton.
torch's compiler, where layers are left to it, is shown the plain ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.compiler import is_compiling

from serve_spec.core.context import Rotation
from serve_spec.core.gpu import is_hopper
from serve_spec.ops import (
    acceptance,
    activation,
    draft_tree,
    draw,
    kv_move,
    layout,
    linear_tiles,
    norm,
    rejection,
    rotary,
    score_edits,
    shared_sum,
    token_masks,
)
from serve_spec.ops import linear as plain_linear
from serve_spec.ops import paged_attention as plain_paged_attention
from serve_spec.ops.acceptance import AcceptedPath
from serve_spec.ops.draft_tree import Beam, Level
from serve_spec.ops.draw import DrawParams
from serve_spec.ops.layout import RowLayout
from serve_spec.ops.linear import EightBit
from serve_spec.ops.paged_attention import PagedLayout
from serve_spec.ops.rejection import DraftLogits
from serve_spec.ops.score_edits import ScoreEdits
from serve_spec.ops.shared_sum import SharedMemory


def edit_scores(
    logits: Tensor,
    owners: Tensor,
    positions: Tensor,
    token_ids: Tensor,
    depths: Tensor,
    edits: ScoreEdits,
    backs: Tensor | None = None,
) -> None:
    """See `score_edits.edit_scores`."""
    if logits.is_cuda:
        from serve_spec.ops import score_edits_triton

        score_edits_triton.edit_scores(logits, owners, positions, token_ids, depths, edits, backs)
    else:
        score_edits.edit_scores(logits, owners, positions, token_ids, depths, edits, backs)


def count_tokens(members: Tensor, verdicts: Tensor, edits: ScoreEdits) -> None:
    """See `score_edits.count_tokens`."""
    if verdicts.is_cuda:
        from serve_spec.ops import score_edits_triton

        score_edits_triton.count_tokens(members, verdicts, edits)
    else:
        score_edits.count_tokens(members, verdicts, edits)


def mask_scores(logits: Tensor, places: Tensor, words: Tensor) -> None:
    """See `token_masks.mask_scores`."""
    if logits.is_cuda:
        from serve_spec.ops import token_masks_triton

        token_masks_triton.mask_scores(logits, places, words)
    else:
        token_masks.mask_scores(logits, places, words)


def draw_tokens(
    logits: Tensor,
    owners: Tensor,
    positions: Tensor,
    params: DrawParams,
    *,
    num_ids: int | None = None,
) -> Tensor:
    """See `draw.draw_tokens`."""
    if logits.is_cuda:
        from serve_spec.ops import draw_triton

        return draw_triton.draw_tokens(logits, owners, positions, params, num_ids=num_ids)
    return draw.draw_tokens(logits, owners, positions, params, num_ids=num_ids)


def draw_drafts(
    logits: Tensor,
    owners: Tensor,
    positions: Tensor,
    params: DrawParams,
    sharpness: Tensor,
    target_ids: Tensor | None = None,
    *,
    num_ids: int | None = None,
) -> Tensor:
    """See `draw.draw_drafts`."""
    if logits.is_cuda:
        from serve_spec.ops import draw_triton

        return draw_triton.draw_drafts(
            logits, owners, positions, params, sharpness, target_ids, num_ids=num_ids
        )
    return draw.draw_drafts(
        logits, owners, positions, params, sharpness, target_ids, num_ids=num_ids
    )


def sample_drafts(
    logits: Tensor,
    owners: Tensor,
    positions: Tensor,
    roots: Tensor,
    params: DrawParams,
    target_ids: Tensor | None = None,
) -> Tensor:
    """See `draw.sample_drafts`."""
    if logits.is_cuda:
        from serve_spec.ops import draw_triton

        return draw_triton.sample_drafts(logits, owners, positions, roots, params, target_ids)
    return draw.sample_drafts(logits, owners, positions, roots, params, target_ids)


def reject_drafts(
    logits: Tensor,
    row_tokens: Tensor,
    drawn: Tensor,
    query_starts: Tensor,
    lanes: Tensor,
    positions: Tensor,
    params: DrawParams,
    drafted: DraftLogits,
    method: str,
) -> Tensor:
    """See `rejection.reject_drafts`."""
    chains = logits, row_tokens, drawn, query_starts, lanes, positions, params, drafted, method
    if logits.is_cuda:
        from serve_spec.ops import rejection_triton

        return rejection_triton.reject_drafts(*chains)
    return rejection.reject_drafts(*chains)


def draw_children(
    logits: Tensor,
    owners: Tensor,
    positions: Tensor,
    params: DrawParams,
    sharpness: Tensor,
    target_ids: Tensor | None,
    topk: int,
) -> tuple[Tensor, Tensor]:
    """See `draw.draw_children`."""
    if logits.is_cuda:
        from serve_spec.ops import draw_triton

        return draw_triton.draw_children(
            logits, owners, positions, params, sharpness, target_ids, topk
        )
    return draw.draw_children(logits, owners, positions, params, sharpness, target_ids, topk)


def grow_beam(before: Beam, token_ids: Tensor, scores: Tensor, step: int) -> tuple[Level, Beam]:
    """See `draft_tree.grow_beam`."""
    if token_ids.is_cuda:
        from serve_spec.ops import draft_tree_triton

        if token_ids[0].numel() <= draft_tree_triton.MAX_CANDIDATES:
            return draft_tree_triton.grow_beam(before, token_ids, scores, step)
    return draft_tree.grow_beam(before, token_ids, scores, step)


def choose_drafts(
    levels: Sequence[Level], num_steps: Tensor, num_draft_tokens: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """See `draft_tree.choose_drafts`."""
    if num_steps.is_cuda:
        from serve_spec.ops import draft_tree_triton

        if sum(level.scores.shape[1] for level in levels) <= draft_tree_triton.MAX_CANDIDATES:
            return draft_tree_triton.choose_drafts(levels, num_steps, num_draft_tokens, width)
    return draft_tree.choose_drafts(levels, num_steps, num_draft_tokens, width)


def accept_path(
    row_tokens: Tensor,
    parents: Tensor,
    drawn: Tensor,
    query_starts: Tensor,
    max_depth: int,
    forced: Tensor | None = None,
) -> AcceptedPath:
    """See `acceptance.accept_path`."""
    if drawn.is_cuda:
        from serve_spec.ops import acceptance_triton

        return acceptance_triton.accept_path(
            row_tokens, parents, drawn, query_starts, max_depth, forced
        )
    return acceptance.accept_path(row_tokens, parents, drawn, query_starts, max_depth, forced)


def accept_and_advance(
    row_tokens: Tensor,
    parents: Tensor,
    drawn: Tensor,
    query_starts: Tensor,
    recent: Tensor,
    lengths: Tensor,
    lanes: Tensor,
    verdicts: Tensor,
    forced: Tensor | None = None,
) -> AcceptedPath:
    """See `acceptance.accept_and_advance`."""
    if drawn.is_cuda:
        from serve_spec.ops import acceptance_triton

        return acceptance_triton.accept_and_advance(
            row_tokens, parents, drawn, query_starts, recent, lengths, lanes, verdicts, forced
        )
    return acceptance.accept_and_advance(
        row_tokens, parents, drawn, query_starts, recent, lengths, lanes, verdicts, forced
    )


def forced_counts(seeds: Tensor, positions: Tensor, num_steps: Tensor, survival: Tensor) -> Tensor:
    """See `acceptance.forced_counts`."""
    if seeds.is_cuda:
        from serve_spec.ops import acceptance_triton

        return acceptance_triton.forced_counts(seeds, positions, num_steps, survival)
    return acceptance.forced_counts(seeds, positions, num_steps, survival)


def tree_masks(parents: Tensor, query_starts: Tensor) -> Tensor:
    """See `acceptance.tree_masks`."""
    if parents.is_cuda:
        from serve_spec.ops import acceptance_triton

        return acceptance_triton.tree_masks(parents, query_starts)
    return acceptance.tree_masks(parents, query_starts)


def lay_out_rows(
    query_lens: Tensor,
    starts: Tensor,
    first_valid: Tensor,
    tables: Tensor,
    page_size: int,
    num_rows: int,
    scratch_slot: int,
) -> RowLayout:
    """See `layout.lay_out_rows`."""
    if query_lens.is_cuda:
        from serve_spec.ops import layout_triton

        return layout_triton.lay_out_rows(
            query_lens, starts, first_valid, tables, page_size, num_rows, scratch_slot
        )
    return layout.lay_out_rows(
        query_lens, starts, first_valid, tables, page_size, num_rows, scratch_slot
    )


def ring_tokens(recent: Tensor, lanes: Tensor, positions: Tensor) -> Tensor:
    """See `layout.ring_tokens`."""
    if recent.is_cuda:
        from serve_spec.ops import layout_triton

        return layout_triton.ring_tokens(recent, lanes, positions)
    return layout.ring_tokens(recent, lanes, positions)


def move_accepted(
    pools: Sequence[Tensor],
    slots: Tensor,
    query_starts: Tensor,
    path: Tensor,
    num_correct: Tensor,
) -> None:
    """See `kv_move.move_accepted`."""
    if slots.is_cuda:
        from serve_spec.ops import kv_move_triton

        kv_move_triton.move_accepted(pools, slots, query_starts, path, num_correct)
    else:
        kv_move.move_accepted(pools, slots, query_starts, path, num_correct)


def rotate_and_store(
    heads: Tensor, rotation: Rotation, slots: Tensor, keys: Tensor, values: Tensor, num_heads: int
) -> Tensor:
    """See `rotary.rotate_and_store`."""
    if heads.is_cuda:
        from serve_spec.ops import rotary_triton

        return rotary_triton.rotate_and_store(heads, rotation, slots, keys, values, num_heads)
    return rotary.rotate_and_store(heads, rotation, slots, keys, values, num_heads)


def paged_attention(query: Tensor, keys: Tensor, values: Tensor, layout: PagedLayout) -> Tensor:
    """See `paged_attention.paged_attention`."""
    if query.is_cuda:
        from serve_spec.ops import paged_attention_triton

        return paged_attention_triton.paged_attention(query, keys, values, layout)
    return plain_paged_attention.paged_attention(query, keys, values, layout)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    eight_bit: EightBit | None = None,
) -> Tensor:
    """See `linear.linear`: the vendor's library, or our own kernel where the rows are few.

    eight_bit: the weight in eight bits, for whoever is faster with it.
    """
    if x.is_cuda and eight_bit is not None and _is_ours(x, weight, eight_bit=True):
        from serve_spec.ops import linear_triton

        return linear_triton.small_linear(x, eight_bit.values, bias, out_dtype, eight_bit.scale)
    if x.is_cuda and _is_ours(x, weight):
        from serve_spec.ops import linear_triton

        return linear_triton.small_linear(x, weight, bias, out_dtype)
    return plain_linear.linear(x, weight, bias, out_dtype)


def addends(x: Tensor, weight: Tensor, eight_bit: EightBit | None = None) -> Tensor:
    """x·Wᵀ [T, out], or its addends for whoever reads them to add up, which spares a launch.

    See `linear.whole`.
    """
    if x.is_cuda and eight_bit is not None and _is_ours(x, weight, eight_bit=True):
        from serve_spec.ops import linear_triton

        return linear_triton.small_addends(x, eight_bit.values, eight_bit.scale)
    if x.is_cuda and _is_ours(x, weight):
        from serve_spec.ops import linear_triton

        return linear_triton.small_addends(x, weight)
    return plain_linear.linear(x, weight)


def gate_up(x: Tensor, weight: Tensor, eight_bit: EightBit | None = None) -> Tensor:
    """silu(gate) · up: x [T, in], weight [2·I, in], the rows of the gate first -> [T, I].

    eight_bit: see `linear`.
    """
    if x.is_cuda and eight_bit is not None and _is_ours(x, weight, gated=True, eight_bit=True):
        from serve_spec.ops import linear_triton

        return linear_triton.small_gate_up(x, eight_bit.values, eight_bit.scale)
    if x.is_cuda and _is_ours(x, weight, gated=True):
        from serve_spec.ops import linear_triton

        return linear_triton.small_gate_up(x, weight)
    return silu_and_mul(linear(x, weight))


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See `activation.silu_and_mul`."""
    if gate_up.is_cuda and not is_compiling():
        from serve_spec.ops import activation_triton

        return activation_triton.silu_and_mul(gate_up)
    return activation.silu_and_mul(gate_up)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `norm.rms_norm`."""
    if x.is_cuda and not is_compiling():
        from serve_spec.ops import norm_triton

        return norm_triton.rms_norm(x, weight, eps)
    return norm.rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `norm.add_rms_norm`."""
    if x.is_cuda and not is_compiling():
        from serve_spec.ops import norm_triton

        return norm_triton.add_rms_norm(x, residual, weight, eps)
    return norm.add_rms_norm(x, residual, weight, eps)


def sum_over_ranks(x: Tensor, memory: SharedMemory) -> None:
    """See `shared_sum.sum_over_ranks`."""
    if x.is_cuda:
        from serve_spec.ops import shared_sum_triton

        shared_sum_triton.sum_over_ranks(x, memory)
    else:
        shared_sum.sum_over_ranks(x, memory)


def sum_add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, memory: SharedMemory
) -> tuple[Tensor, Tensor]:
    """See `shared_sum.sum_add_norm`."""
    if x.is_cuda:
        from serve_spec.ops import shared_sum_triton

        return shared_sum_triton.sum_add_norm(x, residual, weight, eps, memory)
    return shared_sum.sum_add_norm(x, residual, weight, eps, memory)


def _is_ours(x: Tensor, weight: Tensor, *, gated: bool = False, eight_bit: bool = False) -> bool:
    """Whether the kernels of `linear_triton` can do this product, and fastest."""
    return (
        not is_compiling()
        and linear_tiles.is_ours(x.shape[0], gated=gated, eight_bit=eight_bit)
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.stride(-1) == 1
        and weight.is_contiguous()
        and is_hopper(x.device)
    )
