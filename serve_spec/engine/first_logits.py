"""A check at start: two steps that refuse a target with broken logits."""

from __future__ import annotations

from pathlib import Path

from serve_spec.core.draft import PLAIN
from serve_spec.core.errors import BrokenLogits, CheckpointError
from serve_spec.core.request import SamplingParams
from serve_spec.core.round import RoundSteps
from serve_spec.core.sequence import Sequence
from serve_spec.log import get_logger
from serve_spec.scheduler.scheduler import Scheduler
from serve_spec.worker.worker import SpecWorker

logger = get_logger(__name__)

_MOST_PROMPT_TOKENS = 4


def check_first_logits(
    worker: SpecWorker, scheduler: Scheduler, prompt: list[int], target: Path, draft: Path | None
) -> None:
    """Run a short prompt and one step with drafts. Broken draft logits only give a warning.

    scheduler: an unused one, for this check only.

    Raises:
        CheckpointError: the target's logits hold NaN, or nothing finite.
        RankLost: so they do, and another rank failed first.
    """
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    token_ids = prompt[:_MOST_PROMPT_TOKENS] or [0]
    seq = Sequence("first logits", params, token_ids, len(token_ids), seed=0)
    shapes = sorted(shape for shape in worker.states if shape.is_chain and shape != PLAIN)
    shape = shapes[0] if shapes and draft is not None else PLAIN
    scheduler.queue.add(seq)
    for _ in range(2):  # the prompt, then the drafts
        plan = scheduler.plan(
            lambda batch: RoundSteps(shape if batch.size else PLAIN), worker.max_missing
        )
        assert plan is not None, "one short prompt always fits"
        try:
            result = worker.execute(plan)
        except BrokenLogits as error:
            raise CheckpointError(f"{target}: {error}") from error
        scheduler.commit(plan, result, lambda seq, token_ids: (len(token_ids), None))
    if seq.has_broken_draft:
        logger.warning(
            "%s: draft model produced NaN logits, its drafts are not used; check the checkpoint "
            "or use speculative_draft_dtype=float32",
            draft,
        )
    scheduler.queue.abort(seq.request_id)
