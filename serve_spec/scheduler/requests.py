"""What one sequence does in a round: how much it drafts, and its row of the plan."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from serve_spec.core.draft import TextDrafts
from serve_spec.core.draft_shape import PLAIN, DraftShape
from serve_spec.core.plan import EditedText, ScheduledRequest, WorkerLimits
from serve_spec.core.round import DecodeBatch, RoundSteps
from serve_spec.core.sequence import Sequence

SHORT_EXTEND = 32
"""Draft entries a row that does not draft still names."""


class RowDrafts(NamedTuple):
    """What a request drafts.

    `from_text`: it was found in its text, where a model would have drafted something else.
    """

    shape: DraftShape
    from_text: bool = False

    def less(self) -> RowDrafts:
        """Return what is drafted where this has no room: a shorter chain; of a tree, nothing."""
        shape = self.shape
        return self._replace(shape=DraftShape.chain(shape.depth - 1) if shape.is_chain else PLAIN)


def most_coming(row: ScheduledRequest | None) -> int:
    """Most tokens a row that still runs commits."""
    return 0 if row is None else row.num_steps + 1


def missing_after(seq: Sequence, row: ScheduledRequest | None) -> int:
    """Most draft entries `seq` lacks once the round of `row`, which still runs, is committed."""
    if row is not None and row.extends:
        return most_coming(row)
    return len(seq) - 1 - seq.num_draft_computed + most_coming(row)


def kept_up_to(limits: WorkerLimits, drafts: list[RowDrafts]) -> int:
    """Backlogs up to this are made up for rows for which no model drafts, if one drafts at all."""
    has_model_drafts = any(of_row.shape.depth and not of_row.from_text for of_row in drafts)
    return limits.max_missing if has_model_drafts else 0


def usable_steps(seq: Sequence, coming: int) -> int:
    """Most drafts a sequence wants and can still use, when `coming` tokens are on their way."""
    options = seq.params.speculative
    if not options.enabled or seq.has_broken_draft:
        return 0
    # The final token needs no draft: with r tokens to go, r-1 drafts can still be emitted.
    useful = max(0, seq.num_remaining - coming - 1)
    return useful if options.max_steps is None else min(useful, options.max_steps)


def wanted_steps(steps: RoundSteps, batch: DecodeBatch) -> list[int]:
    """Drafts per row of the policy's answer, but for those from texts."""
    return [steps.shape.depth] * batch.size if steps.row_steps is None else list(steps.row_steps)


def text_steps(steps: RoundSteps, batch: DecodeBatch) -> list[int]:
    """Drafts per row from its text instead of a model; 0: its drafts are a model's, if any."""
    if not any(batch.text_steps):
        return [0] * batch.size
    wanted = wanted_steps(steps, batch) if steps.text_steps is None else steps.text_steps
    return [min(want, found) for want, found in zip(wanted, batch.text_steps, strict=True)]


def fair_steps(steps: RoundSteps, batch: DecodeBatch) -> list[int]:
    """Drafts per row: what the policy wants, what the row can use, an even share of the room."""
    return _shared(_usable_steps(steps, batch, text_steps(steps, batch)), batch)


def _usable_steps(steps: RoundSteps, batch: DecodeBatch, from_texts: list[int]) -> list[int]:
    rows = zip(from_texts, wanted_steps(steps, batch), batch.max_steps, strict=True)
    return [from_text or min(want, most) for from_text, want, most in rows]


def _shared(num_drafts: list[int], batch: DecodeBatch) -> list[int]:
    """The drafts of every row; where there is no room for all, an even share of it at most."""
    if sum(num_drafts) <= batch.max_draft_tokens:
        return num_drafts
    share = batch.max_draft_tokens // batch.size
    return [min(count, share) for count in num_drafts]


def fair_drafts(steps: RoundSteps, batch: DecodeBatch) -> list[RowDrafts]:
    """Return what every request drafts: of the policy's shape as many levels as it can use."""
    shape, from_texts = steps.shape, text_steps(steps, batch)
    usable = _usable_steps(steps, batch, from_texts)
    if shape.is_chain:
        shapes = map(DraftShape.chain, _shared(usable, batch))
    else:
        sizes = _shared([shape.size_at(levels) for levels in usable], batch)
        shapes = map(partial(_tree, shape.topk), usable, sizes)
    rows = zip(shapes, from_texts, strict=True)
    return [RowDrafts(own, from_text=of_text > 0) for own, of_text in rows]


def _tree(topk: int, levels: int, size: int) -> DraftShape:
    return DraftShape(min(levels, size), size, topk) if size else PLAIN


def edited_text(seq: Sequence) -> EditedText | None:
    """See `ScheduledRequest.edited`."""
    params = seq.params
    if not params.edits_scores:
        return None
    counted = tuple(seq.token_ids) if params.counts_tokens else ()
    return EditedText(seq.num_prompt_tokens, counted, seq.held_token_ids)


def generated_ids(seq: Sequence) -> tuple[int, ...]:
    """See `ScheduledRequest.generated_ids`."""
    return () if seq.params.grammar is None else tuple(seq.output_token_ids)


def decode_row(
    seq: Sequence, drafts: RowDrafts, num_missing: int, kept_up: int, *, is_under_way: bool = False
) -> ScheduledRequest:
    """Return a request that verifies these drafts.

    num_missing: draft KV entries it lacks when the step starts. kept_up: see `kept_up_to`.
    is_under_way: a step in flight adds tokens that the host does not know.
    """
    last, shape = len(seq) - 1, drafts.shape
    # A request that does not draft names a few missing entries, too: the next step may need them.
    is_named = shape.depth or last - seq.num_draft_computed <= SHORT_EXTEND
    return ScheduledRequest(
        request_id=seq.request_id,
        token_ids=(seq.token_ids[last],),
        start=last,
        samples=True,
        page_ids=tuple(seq.page_ids),
        params=seq.params,
        seed=seq.seed,
        is_decode=True,
        shape=shape,
        draft_start=seq.num_draft_computed if is_named else min(0, seq.num_draft_computed),
        # Draft entry j carries token j+1; entries up to last-1 exist once these are added.
        extend_ids=tuple(seq.token_ids[seq.num_draft_computed + 1 :]) if is_named else (),
        extends=shape.depth > 0 or 0 < num_missing <= kept_up,
        num_missing=num_missing,
        request_slot=seq.request_slot,
        edited=None if is_under_way else edited_text(seq),
        generated_ids=generated_ids(seq),
    )


def prompt_row(seq: Sequence, start: int, count: int, *, samples: bool) -> ScheduledRequest:
    """A row that computes `count` tokens from `start` on; with the last of them it samples."""
    end = start + count
    scored = seq.unscored(start, end)
    is_named = end - 1 - seq.num_draft_computed <= SHORT_EXTEND
    return ScheduledRequest(
        request_id=seq.request_id,
        token_ids=tuple(seq.token_ids[start:end]),
        start=start,
        samples=samples,
        page_ids=tuple(seq.page_ids),
        params=seq.params,
        seed=seq.seed,
        draft_start=seq.num_draft_computed,
        extend_ids=tuple(seq.token_ids[seq.num_draft_computed + 1 : end]) if is_named else (),
        request_slot=seq.request_slot,
        scored_start=scored.start,
        scored_ids=tuple(seq.token_ids[scored.start : scored.stop]),
        edited=edited_text(seq) if samples else None,
        generated_ids=generated_ids(seq) if samples else (),
    )


def text_drafted_row(
    seq: Sequence, drafts: RowDrafts, found: TextDrafts, num_missing: int, kept_up: int
) -> ScheduledRequest:
    """A row that verifies the first of what was found; to a draft model, if there is one, a row
    without any drafts."""
    row = decode_row(seq, RowDrafts(PLAIN), num_missing, kept_up)
    shape = drafts.shape
    return row._replace(
        shape=shape,
        draft_ids=found.token_ids[: shape.size],
        draft_parents=found.parents[: shape.size],
    )
