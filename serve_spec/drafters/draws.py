"""How a round's drafts are drawn: under the target's own noise, or on their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from serve_spec.core.draft import DraftLaws
from serve_spec.ops.noise import Stream, StreamKeys, gumbel_noise, stream_keys
from serve_spec.ops.sampling import SamplingRows, sample_coupled


class DraftDraws(Protocol):
    """Draws the drafts of one round, one position of some rows at a time."""

    def draw(self, logits: Tensor, index: Tensor, step: int) -> Tensor:
        """Draft number `step` of the rows `index` [R]; logits float32 [R, Vd].

        Returns target token ids int64 [R], -1 where the logits hold a NaN or nothing finite.
        """
        ...

    @property
    def laws(self) -> DraftLaws | None:
        """From what they were drawn, where that is kept."""
        ...


BeginDraws: TypeAlias = Callable[
    [SamplingRows, Sequence[int], int, Tensor | None, torch.device], DraftDraws
]
"""Of a round: its rows, each drafting row's root among them, K, target ids, where to draw."""


class CoupledDraws:
    """Under the target's noise: see `sample_coupled`."""

    laws = None

    def __init__(
        self,
        sampling: SamplingRows,
        root_draws: Sequence[int],
        depth: int,
        target_ids: Tensor | None,
        device: torch.device,
    ) -> None:
        self._sampling = sampling
        self._roots = torch.tensor(root_draws, device=device)
        self._target_ids = target_ids

    def draw(self, logits: Tensor, index: Tensor, step: int) -> Tensor:
        """See `DraftDraws`."""
        return sample_coupled(logits, self._sampling, self._roots[index] + step, self._target_ids)


class SampledDraws:
    """From the draft's own distributions at the requests' temperatures, which are kept.

    Greedy requests take the likeliest. Filters are the target's affair: any law of drafts is right.
    """

    def __init__(
        self,
        sampling: SamplingRows,
        root_draws: Sequence[int],
        depth: int,
        target_ids: Tensor | None,
        device: torch.device,
        keys_of: StreamKeys = stream_keys,
    ) -> None:
        params = [sampling.params[root] for root in root_draws]
        inverse = [[0.0 if p.is_greedy else 1.0 / p.temperature] for p in params]
        first = [sampling.positions[root] for root in root_draws for _ in range(depth)]
        seeds = [sampling.seeds[root] for root in root_draws for _ in range(depth)]
        positions = [root + i % depth for i, root in enumerate(first)]
        keys = keys_of(Stream.DRAFT, seeds, first, positions)
        self._keys = keys.view(len(params), depth, 2).to(device)
        self._inverse = torch.tensor(inverse).to(device)
        self._target_ids = target_ids
        self._scores = torch.zeros(len(params), depth, 0, device=device)

    def draw(self, logits: Tensor, index: Tensor, step: int) -> Tensor:
        """See `DraftDraws`."""
        if not self._scores.shape[2]:
            self._scores = logits.new_zeros(*self._scores.shape[:2], logits.shape[1])
        inverse = self._inverse[index]
        scores = logits * inverse.where(inverse > 0, 1.0)
        self._scores[index, step] = scores
        noise = gumbel_noise(self._keys[index, step], scores.shape[1])
        best, choice = (scores + noise * (inverse > 0)).max(dim=-1)
        chosen = choice if self._target_ids is None else self._target_ids[choice]
        return chosen.masked_fill(~best.isfinite(), -1)

    @property
    def laws(self) -> DraftLaws:
        """See `DraftDraws`."""
        return DraftLaws(self._scores, self._target_ids)


DRAWS: dict[str, BeginDraws] = {
    "coupled": CoupledDraws,
    "standard": SampledDraws,
    "block": SampledDraws,
}
"""By `rejection_sample_method`."""
