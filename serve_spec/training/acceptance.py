"""Compute acceptance from match tables: accept length, survival by position, repetition loops."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Acceptance:
    """Acceptance of chains of `num_steps` drafts over a set of sequences."""

    num_steps: int
    accept_length: float  # tokens emitted per round: accepted drafts + 1
    standard_error: float  # of accept_length, over sequences
    survival: list[float]  # share of rounds that accept at least 1, 2, .. num_steps drafts
    rounds: int


def walk(matches: Tensor, counted: Tensor | None = None) -> Acceptance:
    """Return the acceptance of chains, from the rounds of every sequence.

    Args:
        matches: bool [K, B, R]; matches[k, b, r] is true if the k-th draft of a round whose root is
            at place r equals the emitted token at place r + 1 + k.
        counted: bool [B, R]; only rounds whose root is counted are included. Default: all.

    A round at root r accepts m drafts (the matches before the first miss), emits m + 1 tokens, and
    the next root is r + m + 1.

        matches of one sequence, K=2:   r:      0 1 2 3
                                        k=0:    1 0 1 1
                                        k=1:    0 1 1 0
        rounds: root 0 accepts 1, root 2 accepts 2 -> accept length (2 + 3) / 2
    """
    matches = matches.cpu()
    steps, rows, places = matches.shape
    accepted = matches.int().cumprod(0).sum(0)
    if counted is None:
        counted = torch.ones(rows, places, dtype=torch.bool)
    counted = counted.cpu()
    root = torch.zeros(rows, dtype=torch.long)
    tally = torch.zeros(rows, steps + 1, dtype=torch.long)
    every = torch.arange(rows)
    while bool((root < places).any()):
        inside = root < places
        at = root.clamp(max=places - 1)
        correct = accepted[every, at].long()
        use = inside & counted[every, at]
        tally[every[use], correct[use]] += 1
        root = root + correct + 1
    return _summary(tally, steps)


def _summary(tally: Tensor, steps: int) -> Acceptance:
    """Return figures from rounds per sequence and number of accepted drafts, [B, K + 1]."""
    rounds = int(tally.sum())
    if rounds == 0:
        return Acceptance(steps, float("nan"), float("nan"), [], 0)
    lengths = torch.arange(1, steps + 2, dtype=torch.double)
    per_row_rounds = tally.sum(1).double()
    per_row_tokens = (tally.double() * lengths).sum(1)
    mean = float(per_row_tokens.sum() / rounds)
    # Ratio estimator: residual tokens of each sequence around the common mean.
    residual = per_row_tokens - mean * per_row_rounds
    error = float(residual.square().sum().sqrt() / rounds)
    at_least = tally.sum(0).flip(0).cumsum(0).flip(0)[1:]
    survival = [round(float(count) / rounds, 4) for count in at_least]
    return Acceptance(steps, round(mean, 4), round(error, 4), survival, rounds)


def in_loop(tokens: Tensor, longest: int) -> Tensor:
    """Return which tokens are in a repetition loop: bool, the shape of `tokens` [B, T].

    A token is in a loop if, for some n <= `longest`, the last n tokens up to and including it
    occur three times in a row.
    """
    looping = torch.zeros_like(tokens, dtype=torch.bool)
    for period in range(1, min(longest, tokens.shape[1] // 3) + 1):
        same = torch.zeros_like(looping)
        same[:, period:] = tokens[:, period:] == tokens[:, :-period]
        # Length of the current run of matches at distance `period`: places since the last miss.
        place = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        last_miss = torch.where(same, torch.full_like(place, -1), place).cummax(1).values
        looping |= place - last_miss >= 2 * period
    return looping
