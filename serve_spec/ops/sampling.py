"""The sampling law: one ordered pipeline from logits to a token, for plain and verified rows alike.

edits → masks by grammar → temperature → top-k → top-p → min-p (joint on the tempered distribution)
→ argmax(score + noise)

The logits here come edited (`ops/score_edits.py`) and masked (`ops/token_masks.py`) where their
request asks for it. A row's token depends on them, its parameters and (seed, position) alone: never
on the other rows of the batch. Greedy rows are argmax; ties go to the smallest token id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from serve_spec.core.request import SamplingParams
from serve_spec.core.round import DRAFT_SHARPNESS
from serve_spec.ops import draw
from serve_spec.ops.draft_tree import likeliest_children
from serve_spec.ops.draw import DrawParams
from serve_spec.ops.noise import gumbel_noise, row_keys, seed_words


@dataclass(frozen=True)
class SamplingRows:
    """The parameters of R logits rows, and the noise of each, drawn once for draft and target.

    Row r draws the token at `positions[r]` (absolute) from `seeds[r]`.
    `inverse_temperature` and `is_random` are [R, 1] float32; greedy rows hold 1 and 0.
    `noise` [R, V] is None when every row is greedy. `filtered` lists the rows with filters.
    Drafts are drawn at `draft_sharpness` times a row's temperature.
    On a GPU `drawn` takes the place of these: kernels make the noise they need, the very ones of
    rounds on lanes, so that a token is the same wherever it is drawn.
    """

    params: tuple[SamplingParams, ...]
    seeds: tuple[int, ...]
    positions: tuple[int, ...]
    inverse_temperature: Tensor
    is_random: Tensor
    noise: Tensor | None
    filtered: tuple[int, ...]
    draft_sharpness: float
    drawn: DrawnRows | None = None

    def spread(self, index: Tensor, params: Sequence[SamplingParams]) -> SamplingRows:
        """Rows that draw as those at `index` [R] do: several of a tree decide one position.

        params: of these rows. Their seeds and positions the host does not know.
        """
        drawn = self.drawn
        if drawn is not None:
            owners, positions = drawn.owners[index], drawn.positions[index]
            drawn = DrawnRows(owners, positions, drawn.params, drawn.draft_sharpness)
            empty = self.inverse_temperature
            known = tuple(params), (), (), empty, empty, None, ()
            return SamplingRows(*known, self.draft_sharpness, drawn)
        return SamplingRows(
            params=tuple(params),
            seeds=(),
            positions=(),
            inverse_temperature=self.inverse_temperature[index],
            is_random=self.is_random[index],
            noise=None if self.noise is None else self.noise[index],
            filtered=tuple(r for r, p in enumerate(params) if p.filters and not p.is_greedy),
            draft_sharpness=self.draft_sharpness,
        )

    @classmethod
    def create(
        cls,
        params: list[SamplingParams],
        seeds: list[int],
        positions: list[int],
        vocab_size: int,
        device: torch.device,
        draft_sharpness: float = DRAFT_SHARPNESS,
    ) -> SamplingRows:
        """Rows that draw the token at `positions[r]` (absolute) under `params[r]`, `seeds[r]`."""
        if device.type == "cuda":
            empty = torch.empty(0, device=device)
            drawn = DrawnRows.create(params, seeds, positions, device, draft_sharpness)
            known = tuple(params), tuple(seeds), tuple(positions)
            return cls(*known, empty, empty, None, (), draft_sharpness, drawn)
        is_random = [not p.is_greedy for p in params]
        inverse = [1.0 if p.is_greedy else 1.0 / p.temperature for p in params]
        noise = None
        if any(is_random):
            noise = gumbel_noise(row_keys(seeds, positions).to(device), vocab_size)
        return cls(
            params=tuple(params),
            seeds=tuple(seeds),
            positions=tuple(positions),
            inverse_temperature=torch.tensor(inverse, device=device).unsqueeze(1),
            is_random=torch.tensor(is_random, dtype=torch.float32, device=device).unsqueeze(1),
            noise=noise,
            filtered=tuple(r for r, p in enumerate(params) if p.filters and not p.is_greedy),
            draft_sharpness=draft_sharpness,
        )

    def select(self, rows: Sequence[int]) -> SamplingRows:
        """These of the rows."""
        chosen = replace(
            self,
            params=tuple(self.params[r] for r in rows),
            seeds=tuple(self.seeds[r] for r in rows),
            positions=tuple(self.positions[r] for r in rows),
        )
        index = torch.tensor(rows, dtype=torch.int64, device=self.inverse_temperature.device)
        if self.drawn is not None:
            drawn = self.drawn
            drawn = replace(drawn, owners=drawn.owners[index], positions=drawn.positions[index])
            return replace(chosen, drawn=drawn)
        return replace(
            chosen,
            inverse_temperature=self.inverse_temperature[index],
            is_random=self.is_random[index],
            noise=None if self.noise is None else self.noise[index],
            filtered=tuple(n for n, r in enumerate(rows) if r in self.filtered),
        )


@dataclass(frozen=True)
class DrawnRows:
    """The same rows as `draw.draw_tokens` takes them: every row its own sequence."""

    owners: Tensor
    positions: Tensor
    params: DrawParams
    draft_sharpness: Tensor

    @classmethod
    def create(
        cls,
        params: list[SamplingParams],
        seeds: list[int],
        positions: list[int],
        device: torch.device,
        draft_sharpness: float,
    ) -> DrawnRows:
        """See `SamplingRows.create`."""
        return cls(
            owners=torch.arange(len(params), dtype=torch.int32, device=device),
            positions=torch.tensor(positions, dtype=torch.int64).to(device, non_blocking=True),
            params=draw_params(params, seeds, device),
            draft_sharpness=torch.full((1,), draft_sharpness, device=device),
        )


def draw_params(
    params: Sequence[SamplingParams], seeds: Sequence[int], device: torch.device
) -> DrawParams:
    """The parameters of rows, each with its seed, on a device."""
    inverse = [0.0 if p.is_greedy else 1.0 / p.temperature for p in params]
    words = [seed_words(seed) for seed in seeds]

    def tensor(values: Sequence[object], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

    return DrawParams(
        inverse_temperature=tensor(inverse, torch.float32),
        seeds=tensor(words, torch.int32).reshape(len(words), 2),
        top_k=tensor([max(0, p.top_k) for p in params], torch.int32),
        top_p=tensor([p.top_p for p in params], torch.float32),
        min_p=tensor([p.min_p for p in params], torch.float32),
    )


def sample(logits: Tensor, rows: SamplingRows) -> Tensor:
    """The law. logits: float32 [R, V].

    Returns token ids int64 [R], -1 where the logits hold a NaN or nothing finite.
    """
    if rows.drawn is not None:
        drawn = rows.drawn
        return draw.draw_tokens(logits, drawn.owners, drawn.positions, drawn.params)
    if rows.noise is None:
        return _likeliest(logits)
    scores = logits * rows.inverse_temperature
    if rows.filtered:
        index = torch.tensor(rows.filtered, device=logits.device)
        kept = filter_scores(scores[index], [rows.params[r] for r in rows.filtered])
        scores = scores.index_copy(0, index, kept)
    # -inf + finite noise stays -inf: a filtered token can not win.
    return _likeliest(scores + rows.noise * rows.is_random)


def _likeliest(scores: Tensor) -> Tensor:
    """The first of the highest scores [R, V], -1 where that is not finite."""
    best = scores.argmax(dim=-1, keepdim=True)
    return best.masked_fill_(~scores.gather(-1, best).isfinite(), -1).squeeze(-1)


def sample_coupled(
    logits: Tensor, rows: SamplingRows, index: Tensor, target_ids: Tensor | None
) -> Tensor:
    """A draft's choice under the target's own noise: argmax(log q / τ + noise), τ = sharpness·T.

    logits: float32 [B, Vd], draft row b proposes what logits row `index[b]` of `rows` will decide.
    target_ids: [Vd] target id of each draft id, or None for a full vocabulary.
    Returns target token ids int64 [B], -1 where the logits hold a NaN or nothing finite. Any choice
    keeps the output exact; this one is likely kept (Gumbel coupling, arXiv 2408.07978; τ slightly
    below T measured better than T).
    """
    if rows.drawn is not None:
        owners, positions = rows.drawn.owners[index], rows.drawn.positions[index]
        params, sharpness = rows.drawn.params, rows.drawn.draft_sharpness
        return draw.draw_drafts(logits, owners, positions, params, sharpness, target_ids)
    best, choice = _coupled_scores(logits, rows, index, target_ids).max(dim=-1)
    chosen = choice if target_ids is None else target_ids[choice]
    return chosen.masked_fill_(~best.isfinite(), -1)


def sample_children(
    logits: Tensor,
    rows: SamplingRows,
    index: Tensor,
    target_ids: Tensor | None,
    topk: int,
) -> tuple[Tensor, Tensor]:
    """The topk best choices of `sample_coupled`, the best first, and how likely each is.

    Returns int64 and float32 [B, topk]; see `draft_tree.likeliest_children`.
    """
    if rows.drawn is not None:
        owners, positions = rows.drawn.owners[index], rows.drawn.positions[index]
        params, sharpness = rows.drawn.params, rows.drawn.draft_sharpness
        return draw.draw_children(logits, owners, positions, params, sharpness, target_ids, topk)
    scores = _coupled_scores(logits, rows, index, target_ids)
    return likeliest_children(scores, topk, target_ids)


def _coupled_scores(
    logits: Tensor, rows: SamplingRows, index: Tensor, target_ids: Tensor | None
) -> Tensor:
    """Tempered scores [B, Vd] of draft rows, with the noise of random ones."""
    if rows.noise is None:
        return logits
    is_random = rows.is_random[index]
    scale = (rows.inverse_temperature[index] / rows.draft_sharpness).where(is_random > 0, 1.0)
    noise = rows.noise[index]
    noise = noise if target_ids is None else noise[:, target_ids]
    return logits * scale + noise * is_random


def filter_scores(scores: Tensor, params: list[SamplingParams]) -> Tensor:
    """Tempered scores [R, V] with the tokens that top-k, top-p or min-p remove set to -inf.

    The three act jointly on softmax(scores): rank < top_k, mass of the likelier tokens < top_p,
    p ≥ min_p · max p. The likeliest token always survives. Equal scores rank by token id.
    """
    device = scores.device
    top_k = torch.tensor([[p.top_k if p.top_k > 0 else scores.shape[-1]] for p in params])
    top_p = torch.tensor([[p.top_p] for p in params])
    min_p = torch.tensor([[p.min_p] for p in params])
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    probs = ordered.softmax(dim=-1)
    rank = torch.arange(scores.shape[-1], device=device)
    keep = rank < top_k.to(device)
    # top_p = 1 keeps all: a cumulative sum that rounds to 1 early must not cut the tail.
    mass_before = probs.cumsum(dim=-1) - probs
    top_p = top_p.to(device)
    keep &= (mass_before < top_p) | (top_p >= 1.0)
    keep &= probs >= min_p.to(device) * probs[:, :1]
    keep[:, 0] = True
    keep = torch.zeros_like(keep).scatter(1, order, keep)
    return scores.masked_fill(~keep, float("-inf"))
