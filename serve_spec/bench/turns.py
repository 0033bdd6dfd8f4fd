"""Arms that take turns on one machine, so that its slow seconds hit all of them alike.

A turn is a share of the phase's work, not of its time: in every cycle each arm emits the next n-th
of its tokens, in an order that is drawn anew. So all are as far as the others whenever a cycle
ends, and all end in the same one; nobody is left over to meet the weather alone.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence

from serve_spec.adaptive import AdaptiveController
from serve_spec.bench.closed_loop import ClosedLoop
from serve_spec.bench.phases import Phase
from serve_spec.engine.engine import SpecEngine
from serve_spec.scheduler.scheduler import Scheduler

MIN_ROUNDS = 2
"""The first round of a turn meets caches that another arm left."""


def engine_beside(engine: SpecEngine, controller: AdaptiveController) -> SpecEngine:
    """Return an engine with requests and a policy of its own, on the worker and pages of `engine`.

    Each has to be drained before another one runs.
    """
    of = engine.scheduler
    return SpecEngine(
        Scheduler(
            of.limits,
            of.cache,
            text_drafter=None if of.text_drafts is None else copy.deepcopy(of.text_drafts.drafter),
            first_draft_entry=of.first_draft_entry,
            has_draft_model=of.has_draft_model,
            vocab_size=of.vocab_size,
        ),
        engine.worker,
        controller,
        engine.tokenizer,
        eos_token_ids=engine.eos_token_ids,
        max_model_len=engine.max_model_len,
    )


def turns_of(phase: Phase, plain_round_ms: float, turn_ms: float) -> int:
    """Turns that a phase is cut into; 1 if `turn_ms` is 0.

    Of plain decoding they hold about `turn_ms` each, and `MIN_ROUNDS` at least.
    """
    if not turn_ms:
        return 1
    num_rounds = phase.total_tokens / phase.batch_size
    rounds_per_turn = max(MIN_ROUNDS, turn_ms / plain_round_ms)
    return max(1, round(num_rounds / rounds_per_turn))


def run_in_turns(
    loops: Sequence[ClosedLoop],
    controllers: Sequence[AdaptiveController],
    num_turns: int,
    rng: random.Random,
) -> None:
    """Runs all loops to their end, `num_turns` turns each; one turn: one loop after the other.

    Turns change no text. They change rounds only where steps are planned ahead: the first of a turn
    follows none.

    loops: over engines of their own, or, of one turn each, over one and the same.
    controllers: of every loop; its engine has it while the loop runs.
    """
    pairs = list(zip(loops, controllers, strict=True))
    for turn in range(1, num_turns + 1):
        for loop, controller in rng.sample(pairs, len(pairs)):
            loop.engine.controller = controller
            loop.advance(loop.num_tokens * turn // num_turns)
