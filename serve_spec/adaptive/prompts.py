"""How many prompt tokens a step computes beside decoding requests.

More of them let prompts end sooner, so that more requests decode together; fewer leave the gaps
between tokens short, and use arithmetic that is free while weights are read. A closed queue says
what pays: of S requests those that do not decode share one server, the chunks of the steps.

    W = prompt / chunk · (1 + (S - 1) · W / (R + W))    rounds in prefill
    speed = S / (R + W) · tokens / (round ms + share of rounds with a chunk · ms of a chunk)

R are the rounds that a request decodes. W is the mean wait of approximate mean value analysis
(Schweitzer 1979), a quadratic equation. The smallest chunk that is hardly slower than the best is
the goal; every step stays within `max_step_ratio` and `max_inter_token_ms`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from serve_spec.adaptive.costs import Work, bucket
from serve_spec.adaptive.curves import Floats
from serve_spec.adaptive.prompt_costs import PromptCosts
from serve_spec.adaptive.state import State, array
from serve_spec.config import SchedulerConfig
from serve_spec.core.draft import DraftShape
from serve_spec.core.record import StepRecord
from serve_spec.core.round import DecodeBatch, PendingPrompt, RoundSteps

_CHUNK_FADE = 1.0 - 1.0 / 64.0
_FEW = 16
"""Prompt tokens that every step may compute, whatever it takes."""
_SIZES = tuple(round(_FEW * 2.0 ** (k / 4)) for k in range(41))
"""Chunks that are weighed where any number of tokens costs its own: up to 16,384."""
_AS_FAST = 0.99


@dataclass(frozen=True)
class Load:
    """Batch that rounds are planned for, and the prompts that come with it."""

    work: Work  # its rounds, without drafts
    prompts: float = 0.0  # prompt tokens per emitted token: requests that end make room for others
    chunk: float = 0.0  # prompt tokens of a round that computes some
    prompt: float = 0.0  # prompt tokens of a request
    pairs: float = 0.0  # of attention, by prompt token

    @property
    def emitted(self) -> float:
        """Tokens that a request emits; infinite if there are no prompts."""
        return self.prompt / self.prompts if self.prompts else math.inf


class PromptLoad:
    """Observes the prompts that come with requests, for `Load`."""

    def __init__(self) -> None:
        # Of requests that ended lately: prompt tokens, emitted tokens, and their number.
        self._ended: Floats = np.zeros(3)
        # Of rounds with prompts lately: prompt tokens, pairs, and their number.
        self._chunks: Floats = np.zeros(3)

    def observe(self, record: StepRecord) -> None:
        """Add a round."""
        if (tokens := record.num_prefill_tokens) and record.batch_size:
            self._chunks = _CHUNK_FADE * self._chunks + (tokens, record.num_prefill_pairs, 1.0)
        if num := record.num_ended:
            self._ended *= math.exp(-num / 32.0)
            self._ended += record.num_ended_prompt_tokens, record.num_ended_tokens, num

    def load(self, work: Work) -> Load:
        """Return the load of a batch whose plain rounds are `work`."""
        prompt, emitted, num = map(float, self._ended)
        tokens, pairs, rounds = map(float, self._chunks)
        chunk, of_one = tokens / max(rounds, 1.0), prompt / max(num, 1.0)
        return Load(work, prompt / max(emitted, 1.0), chunk, of_one, pairs / max(tokens, 1.0))

    def state(self) -> State:
        """Return what outlives a restart."""
        return {"ended": self._ended.tolist(), "chunks": self._chunks.tolist()}

    def restore(self, state: State) -> None:
        """Continue from a state; raise ValueError if it is none."""
        ended, chunks = (array(state, name, (3,), 0.0) for name in ("ended", "chunks"))
        self._ended, self._chunks = ended, chunks


@dataclass(frozen=True)
class PromptLimits:
    """What bounds the prompt tokens of a step.

    token_counts: tokens of captured steps with prompts, ascending; empty: any number costs its own.
    """

    config: SchedulerConfig
    token_counts: Sequence[int] = ()


NO_LIMITS = PromptLimits(SchedulerConfig())


class PromptSizer:
    """Plans a chunk for some rounds, and fits it to every one of them."""

    def __init__(self, costs: PromptCosts, limits: PromptLimits) -> None:
        self.costs, self.limits = costs, limits
        self.goal = math.inf
        self._usual_ms = 0.0

    def plan(self, load: Load, num_prompts: int, round_ms: float, tokens: float) -> None:
        """Choose the chunk for rounds of `round_ms` without prompts, that emit `tokens`.

        num_prompts: requests in prefill now.
        """
        self._usual_ms, self.goal = round_ms, math.inf
        size, rate = load.work.size, tokens / load.work.size
        if not load.prompts or not self.costs.is_known:
            return
        chunks = self._chunks(size, self.limits.config.max_num_batched_tokens)
        if chunks:
            self.goal = self._goal(load, np.array(chunks, dtype=float), num_prompts, rate)

    def _goal(self, load: Load, chunks: Floats, num_prompts: int, rate: float) -> float:
        """Return the smallest chunk that is hardly slower than the best. rate: tokens a request."""
        size, round_ms = load.work.size, self._usual_ms
        drafts = size * (rate - 1.0)
        curve = self.costs.curve_ms(size, drafts, chunks)
        more = self.costs.more_ms(np.full(len(chunks), round_ms), curve, chunks * load.pairs)
        requests, decodes = size + num_prompts, load.emitted / rate
        alone = load.prompt / chunks
        lacks = alone * requests - decodes
        waits = 0.5 * (lacks + np.sqrt(lacks**2 + 4.0 * alone * decodes))
        rate_of_requests = requests / (decodes + waits)
        share = np.minimum(1.0, rate_of_requests * alone)
        speeds = rate_of_requests / (round_ms + share * more)
        return float(chunks[int((speeds >= _AS_FAST * speeds.max()).argmax())])

    def tokens(self, batch: DecodeBatch, drafts: int, round_ms: float) -> int:
        """Return the prompt tokens of a step that verifies `drafts`, `round_ms` without them."""
        most = batch.max_prompt_tokens
        if most <= _FEW or not self.costs.is_known:
            return most
        chunks = [*self._chunks(batch.size + drafts, most), most]
        at = next((k for k, chunk in enumerate(chunks) if chunk >= self.goal), len(chunks) - 1)
        limit = self._limit_ms()
        if drafts:
            limit -= self.costs.entry_ms * sum(batch.num_missing_entries)
        while at and chunks[at] > _FEW and limit < math.inf:
            curve = self.costs.curve_ms(batch.size, drafts, np.array(float(chunks[at])))
            pairs = np.array(pairs_of(batch.prompts, chunks[at]))
            if round_ms + self.costs.more_ms(np.array(round_ms), curve, pairs) <= limit:
                break
            at -= 1
        return chunks[at]

    def snapshot(self) -> dict[str, float | None]:
        """Return the chunk that keeps the batch full, and what a step may take, JSON-able.

        None: not known yet, or not limited.
        """
        goal, limit = self.goal, self._limit_ms()
        return {
            "goal": None if math.isinf(goal) else goal,
            "max_step_ms": None if math.isinf(limit) else round(limit, 3),
        }

    def _limit_ms(self) -> float:
        """Return the most milliseconds of a step with prompts."""
        limit = self.limits.config.max_step_ratio * (self._usual_ms or math.inf)
        bound = self.limits.config.max_inter_token_ms
        return limit if bound is None else min(limit, bound / self.costs.margin)

    def _chunks(self, num_rows: int, most: int) -> list[int]:
        """Return chunks below `most`, ascending, that fill a step of `num_rows` other tokens."""
        counts = self.limits.token_counts
        if not counts:
            return [size for size in _SIZES if size < most]
        sizes = [count - num_rows for count in counts]
        beyond = range(counts[-1] + 512 - num_rows, most, 512)
        return [size for size in (*sizes, *beyond) if _FEW <= size < most]


def pairs_of(prompts: Sequence[PendingPrompt], num_tokens: int) -> int:
    """Return the pairs of attention of the next tokens of some prompts."""
    pairs = 0
    for prompt in prompts:
        count = min(prompt.num_tokens, num_tokens)
        pairs += PendingPrompt(prompt.start, count).pairs
        num_tokens -= count
        if not num_tokens:
            break
    return pairs


class MeasuredPrompts:
    """Sizes chunks under a policy that has no costs, by the rounds that ran."""

    PLAN_ROUNDS = 16

    def __init__(self, limits: PromptLimits) -> None:
        self.sizer = PromptSizer(PromptCosts(), limits)
        self._load = PromptLoad()
        self._round_ms: dict[tuple[int, DraftShape], float] = {}
        self._rate = 1.0  # tokens per request and round
        self._rounds_left = 0

    def observe(self, record: StepRecord) -> None:
        """Learn from a round."""
        self._load.observe(record)
        size, ms, prompts = record.num_planned_seqs, record.step_ms, record.num_prefill_tokens
        if ms <= 0.0 or not record.batch_size:
            return
        usual = self._usual_ms(size, record.shape)
        drafts, entries = record.num_planned_drafts, record.num_extend_tokens
        is_usual = prompts <= _FEW and entries <= size * (record.shape.depth + 1)
        if is_usual or (usual is not None and ms < usual):
            self._follow(record, ms)
        elif usual is not None:
            work = size, drafts, prompts, record.num_prefill_pairs, entries
            self.sizer.costs.learn(work, usual, ms)

    def _follow(self, record: StepRecord, ms: float) -> None:
        """Average a round that hardly computes prompts, or is faster than those that do not."""
        key = bucket(record.num_planned_seqs), record.shape
        known = self._round_ms.get(key, ms)
        self._round_ms[key] = known + 0.125 * (min(ms, 2.0 * known) - known)
        self._rate += 0.05 * (record.num_output_tokens / record.batch_size - self._rate)

    def _usual_ms(self, size: int, shape: DraftShape) -> float | None:
        """Return the time of rounds without prompts near a batch size: of this shape, if it ran."""
        near = {of: ms for (at, of), ms in self._round_ms.items() if at == bucket(size)}
        return near.get(shape, max(near.values(), default=None))

    def tokens(self, batch: DecodeBatch, steps: RoundSteps) -> int:
        """Return the prompt tokens of a step; few, if its time without them is not known."""
        usual = self._usual_ms(batch.size, steps.shape)
        if usual is None or not self.sizer.costs.is_known:
            return min(batch.max_prompt_tokens, _FEW if usual is None else 16 * _FEW)
        self._rounds_left -= 1
        if self._rounds_left <= 0:
            self._rounds_left = self.PLAN_ROUNDS
            load = self._load.load(Work(batch.size, batch.context))
            self.sizer.plan(load, batch.num_prompts, usual, self._rate * batch.size)
        return self.sizer.tokens(batch, steps.shape.size * batch.size, usual)
