"""The verdict of a round: what every sampling row emits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from serve_spec.core.draft import DraftChain, VerifyResult
from serve_spec.core.errors import BrokenLogits
from serve_spec.ops.acceptance import accept_chain
from serve_spec.ops.sampling import SamplingRows, sample


def judge(logits: Tensor, drafts: DraftChain, sampling: SamplingRows) -> VerifyResult:
    """Draws a token from every logits row, then keeps the drafts the draws confirm.

    logits: float32 [R, V], R = sum of (num_steps + 1) over the B sampling rows, in order.
    The single host read-back of a round happens here.
    """
    if not any(drafts.num_steps):  # plain decoding: there is nothing to walk
        return read_verdicts([[0, 0, token] for token in sample(logits, sampling).tolist()])
    return walk(logits, drafts, sampling).read()


@dataclass(frozen=True)
class Walk:
    """What B rows keep and emit, on the device.

    `correct` int64 [B]: drafts kept. `is_broken` bool [B]: whether one was no token. `drawn` int64
    [B, K + 1]: the row emits the first `correct + 1` of them.
    """

    correct: Tensor
    is_broken: Tensor
    drawn: Tensor

    def read(self) -> VerifyResult:
        """The same on the host, in one read-back of [B, K + 3] integers."""
        flags = self.is_broken.unsqueeze(1)
        return read_verdicts(torch.cat([self.correct.unsqueeze(1), flags, self.drawn], 1).tolist())


def walk(logits: Tensor, drafts: DraftChain, sampling: SamplingRows) -> Walk:
    """See `judge`."""
    device = logits.device
    drawn = sample(logits, sampling)
    num_steps = torch.tensor(drafts.num_steps, device=device)
    first = (num_steps + 1).cumsum(0) - (num_steps + 1)
    column = torch.arange(drafts.token_ids.shape[1] + 1, device=device)
    # Padding columns repeat the row's last draw; accept_chain never looks past num_steps.
    drawn = drawn[first.unsqueeze(1) + torch.minimum(column, num_steps.unsqueeze(1))]
    correct = accept_chain(drafts.token_ids, drawn, num_steps)
    return Walk(correct, (drafts.token_ids < 0).any(dim=1), drawn)


def read_verdicts(table: list[list[int]]) -> VerifyResult:
    """The verdict of a round from what the host reads of it.

    One row per sequence: drafts kept, whether a draft was broken, then the tokens drawn.

    Raises:
        BrokenLogits: the target's logits held NaN, or nothing finite (-1: see `ops.draw`).
    """
    token_ids = [row[2 : row[0] + 3] for row in table]
    if any(token < 0 for tokens in token_ids for token in tokens):
        raise BrokenLogits
    return VerifyResult(token_ids, tuple(b for b, row in enumerate(table) if row[1]))
