"""The verdict on sampled drafts: rejection instead of the walk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from serve_spec.core.draft import DraftChain, DraftLaws, VerifyResult
from serve_spec.core.request import SamplingParams
from serve_spec.ops.draw import processed_scores
from serve_spec.ops.noise import Stream, StreamKeys, stream_keys, uniform_noise
from serve_spec.ops.rejection import keep_or_replace, over_target_ids
from serve_spec.ops.sampling import SamplingRows, draw_params
from serve_spec.verify.verifier import Walk, judge, walk

_NUMBERS_AT_ONCE = 2**24
"""Bounds the probabilities looked at together: 64 MiB of the target's, as much of the draft's."""


class RejectionVerdict:
    """A `Verdict` that keeps sampled drafts by their probabilities (`ops/rejection.py`).

    Rows that are greedy, or do not draft, are judged by the walk as ever. So is the token after
    drafts that were all kept: a draw of the sampling law, whose noise nothing else has seen.
    """

    def __init__(self, method: str, keys_of: StreamKeys = stream_keys) -> None:
        """method: a key of `RULES`. keys_of: see `stream_keys`."""
        self._method = method
        self._keys_of = keys_of

    def __call__(self, logits: Tensor, drafts: DraftChain, sampling: SamplingRows) -> VerifyResult:
        """What every row emits; shapes as for `judge`, and one read-back as there."""
        if drafts.laws is None:
            return judge(logits, drafts, sampling)
        walked = walk(logits, drafts, sampling)
        chains = _sampled_chains(drafts, sampling)
        at_once = max(1, _NUMBERS_AT_ONCE // (walked.drawn.shape[1] * logits.shape[1]))
        for first in range(0, len(chains), at_once):
            self._decide(chains[first : first + at_once], logits, drafts, drafts.laws, walked)
        return walked.read()

    def _decide(
        self,
        chains: Sequence[_Chain],
        logits: Tensor,
        drafts: DraftChain,
        laws: DraftLaws,
        walked: Walk,
    ) -> None:
        """Puts into `walked` what these keep and emit instead."""
        device, depth = logits.device, drafts.token_ids.shape[1]
        row, drafting, steps = torch.tensor(
            [(chain.row, chain.drafting, chain.num_steps) for chain in chains], device=device
        ).unbind(1)
        tokens = drafts.token_ids[row]
        # A chain ends before a draft that is none, as if no more had been asked for.
        steps = torch.minimum(steps, (tokens >= 0).long().cumprod(dim=1).sum(dim=1))
        target = _target_probs(logits, chains, depth)
        scores = laws.scores[drafting]
        draft = over_target_ids(scores.softmax(dim=-1), laws.target_ids, logits.shape[1])
        coins = uniform_noise(self._keys(Stream.ACCEPT, chains, depth)).view(-1, depth).to(device)
        keys = self._keys(Stream.RECOVER, chains, 1).to(device)
        correct, recovered = keep_or_replace(
            self._method, tokens, draft, target, steps, coins, keys
        )
        bonus = walked.drawn[row, steps]
        final = bonus.where(correct == steps, recovered)
        emitted = torch.nn.functional.pad(tokens, (0, 1))
        emitted = emitted.scatter(1, correct.unsqueeze(1), final.unsqueeze(1))
        walked.correct.index_copy_(0, row, correct)
        walked.drawn.index_copy_(0, row, emitted)

    def _keys(self, stream: Stream, chains: Sequence[_Chain], width: int) -> Tensor:
        """Of the first `width` positions that each of them decides."""
        draws = [(chain, i) for chain in chains for i in range(width)]
        return self._keys_of(
            stream,
            [chain.seed for chain, _ in draws],
            [chain.position for chain, _ in draws],
            [chain.position + i for chain, i in draws],
        )


class _Chain(NamedTuple):
    """The drafts of a sampled row: its number, that among the rows that draft, its first logits
    row, and what that row draws by."""

    row: int
    drafting: int
    root: int
    num_steps: int
    params: SamplingParams
    seed: int
    position: int


def _sampled_chains(drafts: DraftChain, sampling: SamplingRows) -> list[_Chain]:
    found = []
    drafting = root = 0
    for row, steps in enumerate(drafts.num_steps):
        params = sampling.params[root]
        if steps and not params.is_greedy:
            seed, position = sampling.seeds[root], sampling.positions[root]
            found.append(_Chain(row, drafting, root, steps, params, seed, position))
        drafting += steps > 0
        root += steps + 1
    return found


def _target_probs(logits: Tensor, chains: Sequence[_Chain], depth: int) -> Tensor:
    """What every logits row of these draws from, [S, depth + 1, V]; shorter ones repeat a row."""
    at = [chain.root + min(i, chain.num_steps) for chain in chains for i in range(depth + 1)]
    params = [chain.params for chain in chains for _ in range(depth + 1)]
    scores = processed_scores(
        logits[torch.tensor(at, device=logits.device)],
        draw_params(params, [0] * len(params), logits.device),  # nothing is drawn: any seed
        has_filters=any(p.filters for p in params),
    )
    return scores.softmax(dim=-1).view(len(chains), depth + 1, -1)
