"""Sampling: one ordered pipeline from logits to a token, the same for plain and verified positions.

    edits → grammar masks → temperature → top-k, top-p, min-p (jointly, on the tempered
    distribution) → argmax(score + noise)

The logits here are edited (`ops/score_edits.py`) and masked (`ops/score_edits.py`) already. A token
depends on them, on its request's parameters and on (seed, position) only, never on other requests
of the batch. Greedy requests take the argmax; ties go to the smallest token id.

Parameters, seeds and positions are tensors, so that a CUDA graph can replay the kernels. The
references read parameters on the host, to leave out sorts and noise that no request needs.

Token -1 means that no token can be drawn: the logits hold NaN or plus infinity, or nothing above
minus infinity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from serve_spec.ops.dispatch import has_kernel
from serve_spec.ops.draft_tree import likeliest_children
from serve_spec.ops.layout import on_host
from serve_spec.ops.noise import (
    MAX_CACHED,
    Stream,
    cached_noise,
    gumbel_noise,
    noise_keys,
    stream_seeds,
)

_WORD = 0xFFFFFFFF


class DrawParams(NamedTuple):
    """Sampling parameters of B sequences: device tensors [B], in the units of `SamplingParams`.

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
        """Return the parameters of the sequences `owners` [T] (-1: any)."""
        index = owners.clamp(min=0)
        return DrawParams(*(field.index_select(0, index) for field in self))

    @property
    def has_filters(self) -> bool:
        """Return whether any sequence has filters. The host waits for the device."""
        columns = (self.top_k.tolist(), self.top_p.tolist(), self.min_p.tolist())
        return any(k > 0 or p < 1.0 or m > 0.0 for k, p, m in zip(*columns, strict=True))

    @property
    def is_random(self) -> list[bool]:
        """Return which sequences sample. The host waits for the device."""
        return [inverse > 0 for inverse in self.inverse_temperature.tolist()]


@has_kernel
def draw_tokens(
    logits: Tensor,
    owners: Tensor,
    positions: Tensor,
    params: DrawParams,
    *,
    num_ids: int | None = None,
) -> Tensor:
    """Return the draw of every token: the likeliest if greedy, else argmax(log p + noise).

    p: the tempered, filtered distribution. A filtered token scores -inf and is never drawn.

    logits: [T, V], any float dtype, read as float32; columns from `num_ids` on are never drawn.
    owners: int32 [T], the sequence of each token, -1 for padding, which draws 0.
    positions: int64 [T], the position of each drawn token.
    Returns int64 [T]; -1 if no token can be drawn (see above).
    """
    return _likeliest(perturbed_scores(logits, owners, positions, params, num_ids=num_ids), owners)


@has_kernel
def sample_drafts(
    logits: Tensor,
    owners: Tensor,
    positions: Tensor,
    roots: Tensor,
    params: DrawParams,
    target_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the token each draft row draws from its own distribution, for rejection sampling.

    roots: int64 [T], the position that each row's round decides first; the noise is that of
    `Stream.DRAFT`, by draft id. Everything else as for `draw_children`.

    Returns target ids int64 [T], 0 for padding, -1 where no token can be drawn; and float32 [T],
    the logarithm of the largest probability of the distribution, which does not depend on what was
    drawn: so it may decide whether the draft is verified.
    """
    rows = params.of(owners)
    keys = noise_keys(stream_seeds(Stream.DRAFT, rows.seeds, roots), positions)
    noise = gumbel_noise(keys, logits.shape[1])
    scores = tempered(logits, rows.inverse_temperature)
    peaks = scores.amax(dim=1) - scores.logsumexp(dim=1)
    choice = _likeliest(scores + noise * _is_random(rows), owners)
    return _over_target_ids(choice, owners, target_ids), peaks


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
    """Return each row's topk most likely drafts of the target, and their log probabilities.

    They are the largest of log q / τ + noise, τ = sharpness · temperature, with the noise that
    decides the same position of the target, without filters. Any choice keeps the output exact;
    this one is likely accepted (Gumbel coupling, arXiv 2408.07978; τ slightly below the temperature
    measured better). The first is the draft of a chain.

    logits: [T, Vd], any float dtype, over draft ids. owners: int32 [T], the sequence of each row;
    padding (-1) drafts anything. positions: int64 [T], the position that each row's draft decides.
    sharpness: float32 [1], the drafts' temperature over their requests'.
    target_ids: int64 [Vd], the target's id of each draft id, or None where they are the same.

    Returns int64 [T, topk], target ids or -1, and float32 [T, topk], the logarithm of each one's
    log probability under the softmax of these numbers; see `draft_tree.likeliest_children`.
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
    """Return the scores whose argmax is drawn: float32 [T, num_ids], -inf if filtered."""
    rows = params.of(owners)
    if not any(rows.is_random):  # filters do nothing then
        return logits[:, :num_ids].float()
    scores = processed_scores(logits[:, :num_ids], rows, has_filters=rows.has_filters)
    return _with_noise(scores, rows, positions, None)


def processed_scores(logits: Tensor, rows: DrawParams, *, has_filters: bool) -> Tensor:
    """Return scores [T, V] whose softmax is drawn from: tempered, -inf if filtered.

    has_filters: False if no row has filters.
    """
    scores = tempered(logits, rows.inverse_temperature)
    if not has_filters:
        return scores
    return scores.masked_fill(~survivors(scores, rows), float("-inf"))


def survivors(scores: Tensor, rows: DrawParams) -> Tensor:
    """Return which tokens of tempered scores [T, V] the filters keep: bool [T, V].

    rank < top_k, mass of the likelier tokens < top_p, p ≥ min_p · max p, all on softmax(scores).
    Ties rank by token id. The likeliest token always survives, and every token of a greedy row.
    """
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    probs = ordered.softmax(dim=-1)
    rank = torch.arange(scores.shape[-1], device=scores.device)
    top_k, top_p, min_p = (x.unsqueeze(1) for x in (rows.top_k, rows.top_p, rows.min_p))
    mass_before = probs.cumsum(dim=-1) - probs
    keep = (rank < top_k) | (top_k < 1)
    # top_p = 1 keeps all, even if the cumulative sum rounds to 1 early.
    keep &= (mass_before < top_p) | (top_p >= 1.0)
    keep &= probs >= min_p * probs[:, :1]
    keep |= (rank == 0) | (_is_random(rows) == 0)
    return torch.zeros_like(keep).scatter(1, order, keep)


def tempered(logits: Tensor, inverse_temperature: Tensor) -> Tensor:
    """Return float32 scores [T, V] over temperature; greedy rows (0 [T]) are not scaled."""
    scale = inverse_temperature.where(inverse_temperature > 0, 1.0)
    return logits.float() * scale.unsqueeze(1)


def _with_noise(
    scores: Tensor, rows: DrawParams, positions: Tensor, target_ids: Tensor | None
) -> Tensor:
    """Return scores plus the noise of their target ids, in rows that sample."""
    is_random = rows.is_random
    if not any(is_random):
        return scores
    width = scores.shape[1] if target_ids is None else int(target_ids[: scores.shape[1]].max()) + 1
    if len(is_random) > MAX_CACHED:
        noise = gumbel_noise(noise_keys(rows.seeds, positions), width)
        noise = noise * (rows.inverse_temperature > 0).unsqueeze(1)
    else:
        none = scores.new_zeros(width)
        drawn = zip(is_random, rows.seeds.tolist(), positions.tolist(), strict=True)
        noise = torch.stack(
            [
                cached_noise(low & _WORD | high << 32, position, width, scores.device)[:width]
                if random
                else none
                for random, (low, high), position in drawn
            ]
        )
    if target_ids is not None:
        noise = noise.index_select(1, target_ids[: scores.shape[1]])
    return scores + noise


def _is_random(rows: DrawParams) -> Tensor:
    """Return 1.0 for rows that sample, 0.0 for greedy ones; [T, 1]."""
    return (rows.inverse_temperature > 0).float().unsqueeze(1)


def _likeliest(values: Tensor, owners: Tensor) -> Tensor:
    """Return the column of the largest value, the first of equals; -1 if none, 0 for padding."""
    scores = on_host(values)
    choice = scores.argmax(axis=1)
    choice[~np.isfinite(scores[np.arange(len(scores)), choice])] = -1
    choice[on_host(owners) < 0] = 0
    return torch.from_numpy(choice).to(values.device)


def _over_target_ids(choice: Tensor, owners: Tensor, target_ids: Tensor | None) -> Tensor:
    """Return draft ids [T] as target ids; -1 and padding are kept."""
    if target_ids is None:
        return choice
    return target_ids[choice.clamp(min=0)].where((choice >= 0) & (owners >= 0), choice)


_MAX_LOGITS = 2**23
"""Most logits at once: 64 rows of a vocabulary of 128k are 32 MiB."""


def score_tokens(
    logits: Tensor, token_ids: Tensor, rows: DrawParams, num_top: int, *, has_filters: bool
) -> Tensor:
    """Return log-probability, rank and top tokens for one token per row, in one tensor.

    The distribution is the one drawn from, without noise; greedy rows are the plain softmax.
    The host never waits for the device.

    logits: float32 [R, V]; token_ids: int64 [R]; rows: the parameters of each row, [R].
    has_filters: False if no row has filters.
    Returns int32 [R, 2 + 2·num_top] (num_top ≤ V): the token's log-probability (the bits of a
    float32), its rank (1: the likeliest; ties rank by id), the ids of the likeliest tokens, their
    log-probabilities. The token itself survives every filter.
    """
    scores = tempered(logits, rows.inverse_temperature)
    token = token_ids.unsqueeze(1)
    if has_filters:
        keep = survivors(scores, rows).scatter(1, token, True)
        scores = scores.masked_fill(~keep, float("-inf"))
    logprobs = scores.log_softmax(dim=-1)
    score = scores.gather(1, token)
    ids = torch.arange(scores.shape[1], device=scores.device)
    before = (scores > score) | ((scores == score) & (ids < token))
    top = scores.topk(num_top, dim=-1).indices
    return torch.cat(
        [
            logprobs.gather(1, token).view(torch.int32),
            before.sum(dim=1, keepdim=True, dtype=torch.int32) + 1,
            top.to(torch.int32),
            logprobs.gather(1, top).view(torch.int32),
        ],
        dim=1,
    )


def score_in_slices(
    logits_of: Callable[[slice], Tensor],
    vocab_size: int,
    token_ids: Tensor,
    rows: DrawParams,
    num_top: int,
    *,
    has_filters: bool,
) -> Tensor:
    """Run `score_tokens` on any number of rows in bounded memory.

    logits_of: float32 [n, V] of the rows of a slice; V = vocab_size.
    """
    size = max(1, _MAX_LOGITS // vocab_size)
    parts = (slice(first, first + size) for first in range(0, len(token_ids), size))
    return torch.cat(
        [
            score_tokens(
                logits_of(part),
                token_ids[part],
                DrawParams(*(field[part] for field in rows)),
                num_top,
                has_filters=has_filters,
            )
            for part in parts
        ]
    )
