"""What each request drafts in a step, and its entry in the plan."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from functools import partial
from typing import NamedTuple

from serve_spec.core.draft import TextDrafts
from serve_spec.core.draft_shape import PLAIN, DraftShape
from serve_spec.core.plan import EditedText, ScheduledRequest, WorkerLimits
from serve_spec.core.round import DecodeBatch, RoundSteps
from serve_spec.core.sequence import Sequence

SHORT_EXTEND = 32
"""Most missing draft KV entries whose tokens are sent for a request that does not draft."""


class RequestDrafts(NamedTuple):
    """What a request drafts. `from_text`: n-gram drafts instead of the draft model's."""

    shape: DraftShape
    from_text: bool = False

    def shortened(self) -> RequestDrafts:
        """Return the drafts to try if these do not fit: a chain one shorter, or none for a tree."""
        shape = self.shape
        return self._replace(shape=DraftShape.chain(shape.depth - 1) if shape.is_chain else PLAIN)


def max_committed(req: ScheduledRequest | None) -> int:
    """Return the most tokens a request in flight commits."""
    return 0 if req is None else req.num_steps + 1


def missing_after(seq: Sequence, req: ScheduledRequest | None) -> int:
    """Return the most draft KV entries `seq` lacks once `req`, in flight, is committed."""
    if req is not None and req.extends:
        return max_committed(req)
    return len(seq) - 1 - seq.num_draft_computed + max_committed(req)


def extend_limit(limits: WorkerLimits, drafts: list[RequestDrafts]) -> int:
    """Return up to how many missing entries requests without model drafts extend, too."""
    drafts_by_model = any(each.shape.depth and not each.from_text for each in drafts)
    return limits.max_missing if drafts_by_model else 0


def usable_steps(seq: Sequence, num_in_flight: int) -> int:
    """Return the most drafts a sequence can use while `num_in_flight` tokens are computed."""
    options = seq.params.speculative
    if not options.enabled or seq.has_broken_draft:
        return 0
    # The bonus token needs no draft: with r tokens to go, r-1 drafts can still be emitted.
    useful = max(0, seq.num_remaining - num_in_flight - 1)
    return useful if options.max_steps is None else min(useful, options.max_steps)


def wanted_steps(steps: RoundSteps, batch: DecodeBatch) -> list[int]:
    """Return the drafts per request that the policy wants, without n-gram drafts."""
    return [steps.shape.depth] * batch.size if steps.row_steps is None else list(steps.row_steps)


def text_steps(steps: RoundSteps, batch: DecodeBatch) -> list[int]:
    """Return the n-gram drafts per request; 0: a model drafts, if anything does."""
    if not any(batch.text_steps):
        return [0] * batch.size
    wanted = wanted_steps(steps, batch) if steps.text_steps is None else steps.text_steps
    return [min(want, found) for want, found in zip(wanted, batch.text_steps, strict=True)]


def usable_budget(
    steps: RoundSteps, reqs: SequenceOf[ScheduledRequest], *, may_choose: bool
) -> int | None:
    """Return the policy's budget of drafts; None if all may be verified.

    may_choose: whether the device may choose which drafts are verified.
    """
    num_drafts = sum([req.num_draft_tokens for req in reqs])
    if steps.budget is None or steps.budget >= num_drafts or not may_choose:
        return None
    return max(steps.budget, 0)


def _usable_steps(steps: RoundSteps, batch: DecodeBatch, from_texts: list[int]) -> list[int]:
    reqs = zip(from_texts, wanted_steps(steps, batch), batch.max_steps, strict=True)
    return [from_text or min(want, most) for from_text, want, most in reqs]


def _shared(num_drafts: list[int], batch: DecodeBatch) -> list[int]:
    """Return the drafts of every request, at most an even share of a room too small for all."""
    if sum(num_drafts) <= batch.max_draft_tokens:
        return num_drafts
    share = batch.max_draft_tokens // batch.size
    return [min(count, share) for count in num_drafts]


def fair_drafts(steps: RoundSteps, batch: DecodeBatch) -> list[RequestDrafts]:
    """Return what every request drafts: as much of the policy's shape as it can use and is granted.

    A room too small for all drafts is shared evenly.
    """
    shape, from_texts = steps.shape, text_steps(steps, batch)
    usable = _usable_steps(steps, batch, from_texts)
    if shape.is_chain:
        shapes = map(DraftShape.chain, _shared(usable, batch))
    else:
        sizes = _shared([shape.size_at(levels) for levels in usable], batch)
        shapes = map(partial(_tree, shape.topk), usable, sizes)
    reqs = zip(shapes, from_texts, strict=True)
    return [RequestDrafts(own, from_text=of_text > 0) for own, of_text in reqs]


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


def decode_request(
    seq: Sequence, drafts: RequestDrafts, num_missing: int, limit: int, *, in_flight: bool = False
) -> ScheduledRequest:
    """Return a request that verifies these drafts.

    num_missing: draft KV entries it lacks when the step starts. limit: see `extend_limit`.
    in_flight: a step in flight adds tokens that the host does not know.
    """
    last, shape = len(seq) - 1, drafts.shape
    # A request that does not draft sends a few missing tokens, too: the next step may need them.
    is_sent = shape.depth or last - seq.num_draft_computed <= SHORT_EXTEND
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
        draft_start=seq.num_draft_computed if is_sent else min(0, seq.num_draft_computed),
        # Draft entry j carries token j+1; entries up to last-1 exist once these are added.
        extend_ids=tuple(seq.token_ids[seq.num_draft_computed + 1 :]) if is_sent else (),
        extends=shape.depth > 0 or 0 < num_missing <= limit,
        num_missing=num_missing,
        request_slot=seq.request_slot,
        edited=None if in_flight else edited_text(seq),
        generated_ids=generated_ids(seq),
    )


def prefill_request(seq: Sequence, start: int, count: int, *, samples: bool) -> ScheduledRequest:
    """Return a prefill chunk of `count` tokens. If it `samples`, its last token draws."""
    end = start + count
    scored = seq.unscored(start, end)
    is_sent = end - 1 - seq.num_draft_computed <= SHORT_EXTEND
    return ScheduledRequest(
        request_id=seq.request_id,
        token_ids=tuple(seq.token_ids[start:end]),
        start=start,
        samples=samples,
        page_ids=tuple(seq.page_ids),
        params=seq.params,
        seed=seq.seed,
        draft_start=seq.num_draft_computed,
        extend_ids=tuple(seq.token_ids[seq.num_draft_computed + 1 : end]) if is_sent else (),
        request_slot=seq.request_slot,
        scored_start=scored.start,
        scored_ids=tuple(seq.token_ids[scored.start : scored.stop]),
        edited=edited_text(seq) if samples else None,
        generated_ids=generated_ids(seq) if samples else (),
    )


def ngram_request(
    seq: Sequence, drafts: RequestDrafts, found: TextDrafts, num_missing: int, limit: int
) -> ScheduledRequest:
    """Return a request that verifies n-gram drafts. A draft model sees one without drafts."""
    req = decode_request(seq, RequestDrafts(PLAIN), num_missing, limit)
    shape = drafts.shape
    return req._replace(
        shape=shape,
        draft_ids=found.token_ids[: shape.size],
        draft_parents=found.parents[: shape.size],
        draft_match=found.match,
    )
