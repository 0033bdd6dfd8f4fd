"""Verification of a step: draw a token at every position, accept drafts, advance the requests."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TypeAlias

import torch
from torch import Tensor

from serve_spec.log import get_logger
from serve_spec.ops import acceptance, draw, rejection, score_edits
from serve_spec.ops.acceptance import AcceptedPath, RequestTokens
from serve_spec.ops.rejection import Chains
from serve_spec.parallel.group import SINGLE, TensorParallel
from serve_spec.worker.forward import VerifiedTokens
from serve_spec.worker.step_buffers import StepBuffers

logger = get_logger(__name__)

Acceptance: TypeAlias = float | Sequence[float]
"""Synthetic acceptance, for load tests: an accept length ≥ 1, or probabilities by position.

As with SGLang's SGLANG_SIMULATE_ACC_LEN, a step runs in full, and only the number of accepted
drafts is random. The texts are not the model's.

A length holds at every depth that can reach it: the acceptance probability p of each draft solves
p + p² + ... + p^k = length - 1 for k drafts. Then all depths emit as much, so use a list of
probabilities to test a policy that chooses the depth. Positions past its end have the last one.
"""


class Verifier:
    """Verifies the drafts of a step and advances its request slots.

    synthetic_acceptance: see `Acceptance`.
    rejection_sample_method: how sampled drafts are verified, if there are `buffers.draft_logits`.
    """

    def __init__(
        self,
        max_depth: int,
        device: torch.device,
        synthetic_acceptance: Acceptance | None = None,
        rejection_sample_method: str = "coupled",
        parallel: TensorParallel = SINGLE,
    ) -> None:
        self.rejection_sample_method = rejection_sample_method
        self.parallel = parallel
        self.survival = None
        if synthetic_acceptance is not None:
            logger.warning(
                "synthetic_acceptance=%s: for load tests only; the texts are not the model's",
                synthetic_acceptance,
            )
            if max_depth:
                self.survival = survival_table(synthetic_acceptance, max_depth).to(device)

    def __call__(
        self, tokens: VerifiedTokens, buffers: StepBuffers, *, has_drafts: bool = True
    ) -> AcceptedPath:
        """Edit scores, draw, accept; write results, paths and request slots of `buffers`.

        has_drafts: False if no token can be a draft.
        """
        slots, layout = buffers.slots, tokens.layout
        num_requests = layout.query_starts.shape[0] - 1
        request_slots = buffers.request_slots[:num_requests]
        results = buffers.results[:num_requests]
        decided = layout.positions + 1
        parents, depths, backs = layout.offsets - 1, layout.offsets, None
        if tokens.parents is not None and tokens.depths is not None:
            parents, depths, backs = tokens.parents, tokens.depths, layout.offsets - tokens.parents
        edits = slots.edits
        score_edits.edit_scores(
            tokens.logits, layout.request_slots, decided, tokens.token_ids, depths, edits, backs
        )
        masks = buffers.masks
        score_edits.mask_scores(
            tokens.logits, layout.owners, layout.offsets, masks.places, masks.words
        )
        drawn = draw.draw_tokens(tokens.logits, layout.request_slots, decided, slots.params)
        forced = self._forced(buffers, request_slots)
        if buffers.draft_logits is not None and has_drafts:
            forced = rejection.reject_drafts(
                tokens.logits,
                Chains(tokens.token_ids, layout.query_starts, request_slots),
                drawn,
                decided,
                slots.params,
                buffers.draft_logits,
                self.rejection_sample_method,
            )
            self.parallel.broadcast(forced)
        # Request slots advance by these draws: the same ones on every rank.
        self.parallel.broadcast(drawn)
        accepted = acceptance.accept_and_advance(
            tokens.token_ids,
            parents,
            drawn,
            layout.query_starts,
            RequestTokens(slots.recent, slots.lengths, request_slots),
            results,
            forced=forced,
        )
        score_edits.count_tokens(request_slots, results, edits)
        if buffers.paths is not None:
            buffers.paths[:num_requests].copy_(accepted.path)
        return accepted

    def _forced(self, buffers: StepBuffers, request_slots: Tensor) -> Tensor | None:
        """Return how many drafts each request accepts at random; None: the target decides."""
        if self.survival is None:
            return None
        slots = buffers.slots
        return acceptance.forced_counts(
            slots.params.seeds.index_select(0, request_slots),
            slots.lengths.index_select(0, request_slots).long(),
            buffers.depths[: len(request_slots)],
            self.survival,
        )


def read_results(
    table: list[list[int]],
) -> tuple[list[list[int]], tuple[int, ...], tuple[int, ...]]:
    """Return the emitted tokens of `StepBuffers.results`, and two lists of requests.

    Those with a draft of -1, and those with a token of -1 (see `ops.draw`), which is left out: the
    target's logits held NaN, or nothing finite.
    """
    token_ids = [row[2 : row[0] + 3] for row in table]
    broken_drafts = tuple([b for b, row in enumerate(table) if row[1]])
    # A draft of -1 is never accepted, so only the last token can be -1.
    broken_logits = tuple([b for b, tokens in enumerate(token_ids) if tokens and tokens[-1] < 0])
    for b in broken_logits:
        token_ids[b].pop()
    return token_ids, broken_drafts, broken_logits


def survival_table(forced: Acceptance, max_depth: int) -> Tensor:
    """Return P(the first 1 .. k of n drafts are accepted), float64 [K + 1, K], in row n."""
    rows = []
    for depth in range(max_depth + 1):
        survival = [*accumulate(draft_probabilities(forced, depth), lambda a, b: a * b)]
        rows.append(survival + [0.0] * (max_depth - depth))
    return torch.tensor(rows, dtype=torch.float64)


def draft_probabilities(forced: Acceptance, depth: int) -> list[float]:
    """Return the acceptance probability of each of `depth` drafts, if those before it are."""
    if isinstance(forced, int | float):
        return [_probability_for(forced, depth)] * depth
    return [forced[min(i, len(forced) - 1)] for i in range(depth)]


def _probability_for(accept_length: float, depth: int) -> float:
    """Return p with 1 + p + ... + p^depth = accept_length; 1 if no p reaches it."""
    low, high = 0.0, 1.0
    for _ in range(60):  # halves the interval down to the last bits of a float
        middle = (low + high) / 2
        if sum(middle**i for i in range(depth + 1)) < accept_length:
            low = middle
        else:
            high = middle
    return high
