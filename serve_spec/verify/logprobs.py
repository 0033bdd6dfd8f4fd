"""Log-probabilities of what a round emits, and of prompts: for the rows that ask, and no others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from serve_spec.core.draft import VerifyResult
from serve_spec.core.logprobs import TokenLogprob
from serve_spec.core.plan import RowPlan, StepPlan
from serve_spec.core.request import SamplingParams
from serve_spec.ops.logprobs import score_rows
from serve_spec.ops.sampling import draw_params
from serve_spec.ops.sending import sent
from serve_spec.runtime.lane_round import LaneRound

Logprobs: TypeAlias = Mapping[str, tuple[TokenLogprob, ...]]
"""By request id."""

# Nobody drew a prompt: its tokens are seen as the model itself gives them.
_AS_THE_MODEL_GIVES = SamplingParams(temperature=1.0)


@dataclass(frozen=True)
class ScoredTokens:
    """Tokens of one request and the row that decides each."""

    request_id: str
    token_ids: Sequence[int]
    rows: Sequence[int]
    params: SamplingParams
    num_top: int


def emitted_tokens(plan: StepPlan, verdict: VerifyResult) -> list[ScoredTokens]:
    """What the rows that ask emit; rows are those of the round's logits."""
    found = []
    for one in _asking(plan.sampling_rows):
        tokens = verdict.token_ids[one.number]
        path = range(len(tokens)) if verdict.paths is None else verdict.paths[one.number]
        rows = [one.first_row + offset for offset in path]
        found.append(ScoredTokens(one.row.request_id, tokens, rows, one.row.params, one.num_top))
    return found


def prompt_tokens(plan: StepPlan) -> list[ScoredTokens]:
    """The tokens of prompts that are to be scored; rows are those of the round's hidden states."""
    found = []
    first = 0
    for row in plan.rows:
        if row.scored_ids:
            num_top = row.params.prompt_logprobs
            assert num_top is not None, "only who asks is scored"
            at = first + row.scored_start - 1 - row.start
            rows = range(at, at + len(row.scored_ids))
            found.append(
                ScoredTokens(row.request_id, row.scored_ids, rows, _AS_THE_MODEL_GIVES, num_top)
            )
        first += row.query_len
    return found


def read_logprobs(
    scored: Sequence[ScoredTokens],
    logits_of: Callable[[Tensor], Tensor],
    vocab_size: int,
    device: torch.device,
) -> Logprobs:
    """Their log-probabilities; the host waits for them, once.

    logits_of: float32 [n, vocab_size] of the rows [n] it is given, a bounded number at a time.
    """
    if not scored:
        return {}
    params = [entry.params for entry in scored for _ in entry.token_ids]
    at = torch.tensor([row for entry in scored for row in entry.rows], device=device)
    table = score_rows(
        lambda piece: logits_of(at[piece]),
        vocab_size,
        torch.tensor([token for entry in scored for token in entry.token_ids], device=device),
        draw_params(params, [0] * len(params), device),  # nothing is drawn: any seed will do
        min(max(entry.num_top for entry in scored), vocab_size),
        has_filters=any(p.filters for p in params),
    )
    return _by_request(scored, table.cpu())


class LaneLogprobs:
    """Log-probabilities of a round on lanes, under way: nobody knows yet how many are wanted.

    Every verified row of a chain that asks is looked at, as if its draft were kept; of a tree as
    many as its walk may visit. To be made after the verification, before any other stage runs, and
    read after the verdict.
    """

    def __init__(
        self, rows: Sequence[RowPlan], logits: Tensor, round: LaneRound, *, trees: bool = False
    ) -> None:
        """logits: float32 [T, V] of the round's verified rows. trees: whether drafts branch."""
        self._asking = [*_asking(rows)]
        places = [
            (one.first_row, one.number, i)
            for one in self._asking
            for i in range(one.row.num_steps + 1)
        ]
        first, member, column = _send(places, logits.device).unbind(1)
        at = first + (round.paths[member, column] if trees and round.paths is not None else column)
        vocab_size = logits.shape[1]
        table = score_rows(
            lambda piece: logits.index_select(0, at[piece]),
            vocab_size,
            # Behind the count and the flags. Of a token that could not be drawn the host hears.
            round.verdicts[member, column + 2].clamp(min=0).long(),
            round.lanes.params.of(round.members[member]),
            min(max(one.num_top for one in self._asking), vocab_size),
            has_filters=any(one.row.params.filters for one in self._asking),
        )
        self._table = _start_reading(table)

    def read(self, token_ids: Sequence[Sequence[int]]) -> Logprobs:
        """Of the tokens that every row of the round emitted."""
        found = {}
        first = 0
        for one in self._asking:
            tokens = token_ids[one.number]
            table = self._table[first : first + len(tokens)]
            found[one.row.request_id] = _entries(table, tokens, one.num_top)
            first += one.row.num_steps + 1
        return found


class _Asking(NamedTuple):
    """A row that asks, its number among those that sample, and the first of its logits rows."""

    row: RowPlan
    number: int
    first_row: int
    num_top: int


def _asking(rows: Sequence[RowPlan]) -> Iterator[_Asking]:
    """Those of the sampling rows that ask. Each draws once per draft and once more."""
    first_row = 0
    for number, row in enumerate(rows):
        if row.params.logprobs is not None:
            yield _Asking(row, number, first_row, row.params.logprobs)
        first_row += row.num_draft_tokens + 1


def _by_request(scored: Sequence[ScoredTokens], table: Tensor) -> Logprobs:
    parts = table.split([len(entry.token_ids) for entry in scored])
    return {
        entry.request_id: _entries(part, entry.token_ids, entry.num_top)
        for entry, part in zip(scored, parts, strict=True)
    }


def _entries(table: Tensor, token_ids: Sequence[int], num_top: int) -> tuple[TokenLogprob, ...]:
    """One entry per row of a table of `score_tokens` on the host."""
    width = (table.shape[1] - 2) // 2
    logprobs = table.view(torch.float32)
    chosen, ranks = logprobs[:, 0].tolist(), table[:, 1].tolist()
    top_ids = table[:, 2 : 2 + width].tolist()
    top_logprobs = logprobs[:, 2 + width :].tolist()
    return tuple(
        TokenLogprob(token, logprob, rank, _top(ids, values, num_top))
        for token, logprob, rank, ids, values in zip(
            token_ids, chosen, ranks, top_ids, top_logprobs, strict=True
        )
    )


def _top(
    ids: Sequence[int], logprobs: Sequence[float], num_top: int
) -> tuple[tuple[int, float], ...]:
    """The first of them, without those that filters removed; equals by token id."""
    left = [(t, p) for t, p in zip(ids, logprobs, strict=True) if p > float("-inf")]
    return tuple(sorted(left, key=lambda entry: (-entry[1], entry[0]))[:num_top])


def _send(rows: Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
    """int64 [len(rows), columns] on the device; the host does not wait."""
    return sent(torch.tensor(rows, dtype=torch.int64), device)


def _start_reading(table: Tensor) -> Tensor:
    """The same on the host, to be looked at once the stream has passed this point."""
    if not table.is_cuda:
        return table
    read_back = torch.empty(table.shape, dtype=table.dtype, pin_memory=True)
    return read_back.copy_(table, non_blocking=True)
