"""Admit the drafts that are most likely to survive to verification, as many as a budget allows.

All drafted tokens of a batch ("slots") compete. The logit of the logprob that a draft's score had
when it was drawn predicts the probability that the draft is kept, given that its parent was:

    probability = sigmoid(weight · logit(p) + bias)      weight and bias by kind of request, level
    survival = probability · survival of the parent      1 for the root

    budget 4     request 0   .9 ── .8 ── .3             request 1   .6 ── .5 ── .4
    admitted                 .9 ── .8                               .6 ── .5

A slot never has a larger survival than its parent and stands behind it, so what is admitted holds
the parents of all its slots: chains keep a prefix. All shapes are fixed and nothing is read back: a
CUDA graph replays it with other budgets.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from serve_spec.ops.dispatch import has_kernel

LARGEST_LOGIT = 15.0
LEAST_SURVIVAL = 2.0**-126
"""The smallest normal float32: every slot that exists has at least this survival."""


class Admission(NamedTuple):
    """The slots of B requests that are verified: tensors on the device, N drafts each at most.

    query_lens: int32 [B], 1 + admitted drafts; 0 for padding requests.
    survival: float32 [B, N], of every slot in the order given, admitted or not; 0 for slots that do
        not exist.
    drafts: int64 [B, N], the admitted drafts of each request in order. parents: int32 [B, N], the
        draft before each, counted from 1, 0 for the root. Trees have 0 past the admitted drafts;
        chains hold the drafts given, and no parents.
    """

    query_lens: Tensor
    survival: Tensor
    drafts: Tensor | None
    parents: Tensor | None


@has_kernel
def admit_drafts(
    logprobs: Tensor,
    query_lens: Tensor,
    depth_limits: Tensor,
    kinds: Tensor,
    calibration: Tensor,
    budget: Tensor,
    drafts: Tensor | None = None,
    parents: Tensor | None = None,
) -> Admission:
    """Admit the slots of the largest survival.

    Equal survivals rank by request, then by place.

    logprobs: float32 [B, N], each draft's log probability under the scores it was drawn from; may
        be the first columns of a wider table.
        Neither a draft of -inf or NaN nor one behind it is admitted.
    query_lens: int32 [B], 1 + drafts that exist; 0 for padding requests.
    depth_limits: int32 [B]; only drafts of the first `depth_limits[b]` levels exist.
    kinds: int32 [B], each request's row of the calibration.
    calibration: float32 [kinds, D, 2], weight and bias by level; (1, 0) leaves a logprob as it is.
        Drafts past level D do not exist.
    budget: int32 [1], the slots that may be admitted.
    drafts, parents: int64 and int32 [B, N], for trees. Parents are numbered as in `Admission`, all
        in 0..N, and come before their children. Without them draft j follows draft j - 1.
    """
    num_requests, width = logprobs.shape
    place = torch.arange(width, device=logprobs.device)
    above = (place if parents is None else parents.long()).expand(num_requests, width)
    exists = place < query_lens.unsqueeze(1) - 1
    probabilities = _probabilities(logprobs, above, depth_limits, kinds, calibration).where(
        exists, -1.0
    )
    survival = _survival(probabilities, above, calibration.shape[1])
    ranked = survival.flatten().argsort(descending=True, stable=True)
    ranks = torch.empty_like(ranked)
    ranks[ranked] = torch.arange(len(ranked), device=logprobs.device)
    admitted = (ranks.view_as(survival) < budget) & (survival > 0)
    places = admitted.cumsum(1)
    counts = places[:, -1:]
    query_lens = (counts[:, 0] + 1).where(query_lens > 0, 0).to(torch.int32)
    if parents is None:
        return Admission(query_lens, survival, drafts, None)
    assert drafts is not None, "a tree has drafts and parents"
    places = torch.cat([torch.zeros_like(counts), places], dim=1)
    order = admitted.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    drafts = drafts.gather(1, order).where(place < counts, 0)
    parents = places.gather(1, above).gather(1, order).where(place < counts, 0).to(torch.int32)
    return Admission(query_lens, survival, drafts, parents)


def _probabilities(
    logprobs: Tensor, above: Tensor, depth_limits: Tensor, kinds: Tensor, calibration: Tensor
) -> Tensor:
    """Return each draft's probability [B, N] if its parent is kept, -1 if it does not exist."""
    depth = calibration.shape[1]
    levels = logprobs.new_zeros(logprobs.shape[0], logprobs.shape[1] + 1, dtype=torch.int64)
    levels[:, 0] = -1  # the root's; after n turns all levels below n are right
    for _ in range(depth):
        levels[:, 1:] = levels.gather(1, above) + 1
    level = levels[:, 1:]
    weight, bias = calibration[kinds.long().unsqueeze(1), level.clamp(max=depth - 1)].unbind(2)
    logprob = logprobs.clamp(max=0)
    logit = (logprob - (-logprob.expm1()).log()).clamp(-LARGEST_LOGIT, LARGEST_LOGIT)
    probabilities = (weight * logit + bias).sigmoid()
    exists = (logprob > float("-inf")) & (level < depth_limits.clamp(max=depth).unsqueeze(1))
    return probabilities.where(exists & (probabilities >= 0), -1.0)


def _survival(probabilities: Tensor, above: Tensor, depth: int) -> Tensor:
    """Return the products [B, N] of `probabilities` from the root on, multiplied in this order."""
    survival = torch.nn.functional.pad(probabilities, (1, 0), value=1.0)
    for _ in range(depth):
        before = survival.gather(1, above)
        product = (before * probabilities).clamp(min=LEAST_SURVIVAL)
        survival[:, 1:] = product.where((before > 0) & (probabilities >= 0), 0.0)
    return survival[:, 1:].contiguous()
