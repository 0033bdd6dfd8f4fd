"""The sampling law for rows whose parameters live on the device.

`ops/sampling.py` states the law for parameters known to the host. Here the parameters, seeds and
positions of a round are tensors, so that a round can be prepared, and replayed, without asking the
device anything. The tokens are the same. (Only the kernels ask nothing: the functions here look at
the parameters to leave out sorts and noise that no row needs.)

A row that no token can be drawn from says so with token -1 instead of an arbitrary one: its logits
hold a NaN or plus infinity, or nothing above minus infinity.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from serve_spec.ops.dispatch import has_kernel
from serve_spec.ops.draft_tree import likeliest_children
from serve_spec.ops.noise import Stream, gumbel_noise, mix_words


class DrawParams(NamedTuple):
    """How each of B sequences draws: device tensors [B], in the units of `SamplingParams`.

    inverse_temperature: float32, 0 for greedy sequences, whose filters then do nothing.
    seeds: int32 [B, 2], low and high word of the 64-bit seed.
    top_k: int32, below 1 for no limit; top_p: float32, 1 for all; min_p: float32, 0 for all.
    """

    inverse_temperature: Tensor
    seeds: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    def of(self, owners: Tensor) -> DrawParams:
        """The parameters of rows [T] that belong to sequences `owners` (-1: any)."""
        return DrawParams(*(field[owners.clamp(min=0).long()] for field in self))


@has_kernel
def draw_tokens(
    logits: Tensor,
    owners: Tensor,
    positions: Tensor,
    params: DrawParams,
    *,
    num_ids: int | None = None,
) -> Tensor:
    """The token each row draws: `sample` of `ops/sampling.py`.

    logits: [T, V], any float dtype, read as float32; columns from `num_ids` on are never drawn.
    owners: int32 [T], the sequence of each row, -1 for padding, which draws 0.
    positions: int64 [T], the position each row's draw decides.
    Returns int64 [T]; -1 where no token can be drawn (see above).
    """
    return _likeliest(perturbed_scores(logits, owners, positions, params, num_ids=num_ids), owners)


@has_kernel
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
    """The token each draft row proposes: `sample_coupled` of `ops/sampling.py`, without filters.

    sharpness: float32 [1], the drafts' temperature over their requests'.
    target_ids: int64 [Vd], the target's id of each draft id, or None where they are the same.
    Everything else as for `draw_tokens`, with logits over draft ids. Returns target ids, or -1.
    """
    rows = params.of(owners)
    scores = tempered(logits[:, :num_ids], rows.inverse_temperature / sharpness)
    choice = _likeliest(_with_noise(scores, rows, positions, target_ids), owners)
    return _over_target_ids(choice, owners, target_ids)


@has_kernel
def sample_drafts(
    logits: Tensor,
    owners: Tensor,
    positions: Tensor,
    roots: Tensor,
    params: DrawParams,
    target_ids: Tensor | None = None,
) -> Tensor:
    """The token each draft row draws from its own distribution: `drafters.draws.SampledDraws`.

    roots: int64 [T], the position that each row's round decides first; the noise is that of
    `Stream.DRAFT`, by draft id. Everything else as for `draw_drafts`. Returns target ids, or -1.
    """
    rows = params.of(owners)
    keys = row_keys_of(stream_seeds_of(Stream.DRAFT, rows.seeds, roots), positions)
    noise = gumbel_noise(keys, logits.shape[1])
    scores = tempered(logits, rows.inverse_temperature) + noise * _is_random(rows)
    return _over_target_ids(_likeliest(scores, owners), owners, target_ids)


@has_kernel
def draw_children(
    logits: Tensor,
    owners: Tensor,
    positions: Tensor,
    params: DrawParams,
    sharpness: Tensor,
    target_ids: Tensor | None,
    topk: int,
) -> tuple[Tensor, Tensor]:
    """The topk best of what `draw_drafts` takes the largest of, and how likely each is.

    Returns int64 and float32 [T, topk]: `sampling.sample_children`.
    """
    rows = params.of(owners)
    scores = tempered(logits, rows.inverse_temperature / sharpness)
    return likeliest_children(_with_noise(scores, rows, positions, target_ids), topk, target_ids)


def perturbed_scores(
    logits: Tensor,
    owners: Tensor,
    positions: Tensor,
    params: DrawParams,
    *,
    num_ids: int | None = None,
) -> Tensor:
    """What `draw_tokens` takes the largest of: float32 [T, num_ids], -inf where filtered."""
    rows = params.of(owners)
    has_filters = ((rows.top_k > 0) | (rows.top_p < 1.0) | (rows.min_p > 0.0)).any()
    scores = processed_scores(logits[:, :num_ids], rows, has_filters=bool(has_filters))
    return _with_noise(scores, rows, positions, None)


def processed_scores(logits: Tensor, rows: DrawParams, *, has_filters: bool) -> Tensor:
    """Scores [T, V] whose softmax is what rows draw from: tempered, -inf where filtered.

    has_filters: whether any row may have filters.
    """
    scores = tempered(logits, rows.inverse_temperature)
    if not has_filters:
        return scores
    return scores.masked_fill(~survivors(scores, rows), float("-inf"))


def survivors(scores: Tensor, rows: DrawParams) -> Tensor:
    """Which tokens of tempered scores [T, V] the filters of their rows keep: `filter_scores`.

    rank < top_k, mass of the likelier tokens < top_p, p ≥ min_p · max p, all on softmax(scores);
    the likeliest token always survives, and every token of a greedy row. Returns bool [T, V].
    """
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    probs = ordered.softmax(dim=-1)
    rank = torch.arange(scores.shape[-1], device=scores.device)
    top_k, top_p, min_p = (x.unsqueeze(1) for x in (rows.top_k, rows.top_p, rows.min_p))
    mass_before = probs.cumsum(dim=-1) - probs
    keep = (rank < top_k) | (top_k < 1)
    # top_p = 1 keeps all: a cumulative sum that rounds to 1 early must not cut the tail.
    keep &= (mass_before < top_p) | (top_p >= 1.0)
    keep &= probs >= min_p * probs[:, :1]
    keep |= (rank == 0) | (_is_random(rows) == 0)
    return torch.zeros_like(keep).scatter(1, order, keep)


def tempered(logits: Tensor, inverse_temperature: Tensor) -> Tensor:
    """Scores in float32, [T, V]; rows with inverse temperature 0 [T] stay as they are."""
    scale = inverse_temperature.where(inverse_temperature > 0, 1.0)
    return logits.float() * scale.unsqueeze(1)


def row_keys_of(seeds: Tensor, positions: Tensor) -> Tensor:
    """`row_keys` of `ops/noise.py` for seeds and positions on the device, the same bits.

    seeds: int32 [R, 2], low and high word; positions: int64 [R]. Returns int32 [R, 2].
    """
    low, high = seeds.unbind(1)
    # Constants are 0x9E3779B9 and 0x85EBCA6B as signed words.
    first = mix_words(low ^ mix_words(positions.to(torch.int32)))
    second = mix_words(first ^ mix_words(high ^ -1640531527) ^ -2048144789)
    return torch.stack([first, second], dim=1)


def stream_seeds_of(stream: Stream, seeds: Tensor, roots: Tensor) -> Tensor:
    """Seeds [R, 2] whose `row_keys_of` are `stream_keys` of `ops/noise.py`, the same bits.

    seeds: int32 [R, 2]; roots: int64 [R], the position that each row's round decides first.
    """
    low, high = seeds.unbind(1)
    low = mix_words(low ^ mix_words(roots.to(torch.int32)))
    high = mix_words(low ^ high ^ mix_words(torch.full_like(low, stream)))
    return torch.stack([mix_words(low ^ high ^ -2048144789), high], dim=1)  # 0x85EBCA6B


def _with_noise(
    scores: Tensor, rows: DrawParams, positions: Tensor, target_ids: Tensor | None
) -> Tensor:
    """Adds to the scores of random rows the noise of their tokens' target ids."""
    if not (rows.inverse_temperature > 0).any():
        return scores
    keys = row_keys_of(rows.seeds, positions)
    if target_ids is None:
        noise = gumbel_noise(keys, scores.shape[1])
    else:
        ids = target_ids[: scores.shape[1]]
        noise = gumbel_noise(keys, int(ids.max()) + 1)[:, ids]
    return scores + noise * _is_random(rows)


def _is_random(rows: DrawParams) -> Tensor:
    """1.0 for rows that see the noise, 0.0 for greedy ones; [T, 1]."""
    return (rows.inverse_temperature > 0).float().unsqueeze(1)


def _likeliest(values: Tensor, owners: Tensor) -> Tensor:
    """Column of the largest value, the first of equals; -1 without one, 0 for padding."""
    best, choice = values.amax(dim=-1), values.argmax(dim=-1)
    return choice.where(best.isfinite(), -1).where(owners >= 0, 0)


def _over_target_ids(choice: Tensor, owners: Tensor, target_ids: Tensor | None) -> Tensor:
    """Draft ids [T] as the target's; what is no token, or nobody's, stays as it is."""
    if target_ids is None:
        return choice
    return target_ids[choice.clamp(min=0)].where((choice >= 0) & (owners >= 0), choice)
