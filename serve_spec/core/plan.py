"""Everything that crosses from the scheduler to a worker and back. Plain data, picklable."""

from __future__ import annotations

from dataclasses import dataclass

from serve_spec.core.request import SamplingParams


@dataclass(frozen=True)
class RowPlan:
    """One sequence's share of a round.

    The target computes `token_ids` (committed tokens, positions `start ..`) and, when the row
    `samples`, `num_steps` drafts after them; it then draws one token per verified row.
    `catch_up_ids` are the tokens of the draft entries still missing, `draft_start ..` (entry j
    carries token j+1); only a row with `num_steps > 0` has any.
    """

    request_id: str
    token_ids: tuple[int, ...]
    start: int
    samples: bool
    page_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    is_decode: bool = False
    num_steps: int = 0
    draft_start: int = 0
    catch_up_ids: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        """Committed tokens after this row: the position its first draw decides."""
        return self.start + len(self.token_ids)

    @property
    def query_len(self) -> int:
        """Rows of the target forward: committed tokens and drafts."""
        return len(self.token_ids) + self.num_steps


@dataclass(frozen=True)
class StepPlan:
    """One round: what every row computes and the tier that shapes it.

    `batch_size` counts decode rows (prefill rows excluded): the number the policy is asked about.
    """

    rows: tuple[RowPlan, ...]
    num_steps: int
    batch_size: int

    @property
    def sampling_rows(self) -> tuple[RowPlan, ...]:
        """The rows that draw a token this round, in order."""
        return tuple(row for row in self.rows if row.samples)


@dataclass(frozen=True)
class StepResult:
    """What a worker gives back: the tokens each sampling row emits, and where the time went."""

    token_ids: list[list[int]]
    draft_ms: float
    verify_ms: float
