"""Laws of continuous batching, with a worker that only pretends to compute."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.config import SchedulerConfig
from serve_spec.core.draft import DraftShape
from serve_spec.core.grammar import Grammar
from serve_spec.core.plan import BatchResult, EditedText
from serve_spec.core.request import FinishReason, SamplingParams
from serve_spec.core.round import RoundSteps
from serve_spec.core.sequence import Sequence
from serve_spec.kvcache.manager import KVCacheManager
from serve_spec.scheduler.scheduler import Scheduler

ALONE, AHEAD = 0, 8
"""Most missing draft KV entries that a step makes."""


def token_at(seed, position):
    return hash((seed, position)) % 1000


class PretendedWorker:
    """Executes plans by arithmetic; `test_prefix.py` has one that checks what it is given."""

    def __init__(self, rng):
        self.rng = rng

    def execute(self, plan):
        drawn = []
        for row in plan.requests:
            if row.samples:
                count = self.rng.randint(0, row.num_steps) + 1
                drawn.append([token_at(row.seed, row.length + i) for i in range(count)])
        return BatchResult(drawn, 0.0, 0.0)


def cut(seq, tokens):
    for count, token in enumerate(tokens, start=1):
        if token in seq.params.stop_token_ids:
            return count, FinishReason.STOP
        if seq.num_output_tokens + count == seq.params.max_tokens:
            return count, FinishReason.LENGTH
    return len(tokens), None


def make(num_pages=64, **limits):
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 64}
    cache = KVCacheManager(num_pages, 4)
    return Scheduler(SchedulerConfig(**{**settings, **limits}), cache)


def sequence(name, num_prompt, **params):
    seed = int(name)
    ids = [token_at(seed, p) for p in range(num_prompt)]
    return Sequence(name, SamplingParams(**params), ids, num_prompt, seed)


def planned(scheduler, num_steps, limits=ALONE, under_way=None):
    plan = scheduler.plan(lambda _: RoundSteps(DraftShape.chain(num_steps)), limits, under_way)
    assert plan is not None, "work is left, but no round can run"
    return plan


def step(scheduler, worker, num_steps, limits=ALONE):
    plan = planned(scheduler, num_steps, limits)
    scheduler.commit(plan, worker.execute(plan), cut)
    scheduler.queue.check_integrity()
    return plan


@pytest.mark.parametrize(
    ("num_steps", "budget", "num_others", "num_prompt", "num_rounds"),
    [(0, 32, 4, 20, 2), (7, 32, 4, 20, 2), (3, 3, 3, 8, 11)],
)
def test_requests_that_could_use_all_of_the_budget_never_keep_a_prompt_from_its_tokens(
    num_steps, budget, num_others, num_prompt, num_rounds
):
    scheduler = make(max_num_batched_tokens=budget)
    worker = PretendedWorker(random.Random(7))
    for name in range(num_others):
        scheduler.queue.add(sequence(str(name), 1, max_tokens=60))
    for round_number in range(4 + num_rounds):
        if round_number == 4:
            scheduler.queue.add(arriving := sequence("9", num_prompt, max_tokens=4))
        plan = step(scheduler, worker, num_steps)
        assert sum(row.query_len for row in plan.requests) <= max(budget, num_others + 1)
    assert len(scheduler.queue.running) >= num_others, "the others must still be decoding"
    assert arriving.num_output_tokens >= 1


@pytest.mark.parametrize("num_prompt_tokens", [1, 8, 30])
def test_requests_draft_beside_a_prompt_that_arrives_during_a_step(num_prompt_tokens):
    scheduler = make(num_pages=100)
    worker = PretendedWorker(random.Random(11))
    for name in ("1", "2", "3", "4"):
        scheduler.queue.add(sequence(name, 3, max_tokens=60))
    under_way = planned(scheduler, 0, AHEAD)
    scheduler.queue.add(arriving := sequence("5", num_prompt_tokens, max_tokens=60))
    plan = planned(scheduler, 7, AHEAD, under_way)
    assert [row.is_decode for row in plan.requests] == [True] * 4 + [False]
    assert all(row.num_steps > 0 for row in plan.requests[:4])
    assert plan.requests[4].token_ids == tuple(arriving.token_ids)
    scheduler.commit(under_way, worker.execute(under_way), cut)
    # The next one knows the prompt to be done, whatever it drew.
    after = planned(scheduler, 7, AHEAD, plan)
    assert [row.is_decode for row in after.requests] == [True] * 5
    assert after.requests[4].num_missing == num_prompt_tokens


def test_a_long_prompt_is_cut_beside_a_step_in_flight_and_leaves_room_for_drafts():
    scheduler = make(num_pages=100, max_num_batched_tokens=20)
    worker = PretendedWorker(random.Random(11))
    scheduler.queue.add(sequence("1", 3, max_tokens=60))
    plan = planned(scheduler, 0, AHEAD)
    scheduler.queue.add(sequence("2", 30, max_tokens=3))
    cut_at = []
    while plan is not None and len(cut_at) < 2:
        following = planned(scheduler, 7, AHEAD, plan)
        cut_at += [row.length for row in following.requests if not row.is_decode]
        assert following.requests[0].num_steps == 7
        scheduler.commit(plan, worker.execute(plan), cut)
        plan = following
    assert cut_at == [12, 24]


def put_off(num_steps=3):
    """Return a scheduler of texts whose next round, with drafts, had to wait for want of pages."""
    scheduler, worker = make(num_pages=3), PretendedWorker(random.Random(12))
    for number in range(2):
        scheduler.queue.add(sequence(str(number), 3, max_tokens=60))
    step(scheduler, worker, 0, AHEAD)
    # Texts of four tokens, in a page of four each: with one more each they need another.
    under_way = planned(scheduler, 0, AHEAD)
    steps = RoundSteps(DraftShape.chain(num_steps))
    assert scheduler.plan(lambda _: steps, AHEAD, under_way) is None
    scheduler.commit(under_way, worker.execute(under_way), cut)
    return scheduler


@pytest.mark.parametrize("num_steps", [0, 3])
def test_a_round_that_waited_for_its_drafts_is_marked_and_the_policy_asked_once(num_steps):
    """A policy counts its decisions: dwell, budgets and probes go by rounds."""
    scheduler = put_off(num_steps)
    plan = scheduler.plan(lambda _: pytest.fail("asked twice"), AHEAD)
    assert plan.shape.depth == num_steps
    assert any(row.num_steps for row in plan.requests) == plan.was_postponed == (num_steps > 0)
    assert not planned(scheduler, 3, AHEAD).was_postponed


def test_without_chunks_a_prompt_is_computed_in_one_round_and_waits_for_no_stream_of_others():
    scheduler = make(max_num_batched_tokens=48, chunked_prefill_size=None)
    for name in ("1", "2"):
        scheduler.queue.add(sequence(name, 40, max_tokens=2))
    (row,) = planned(scheduler, 3).requests
    assert (len(row.token_ids), row.samples) == (40, True)
    scheduler = make(max_num_batched_tokens=48, chunked_prefill_size=None)
    worker = PretendedWorker(random.Random(8))
    scheduler.queue.add(sequence("1", 3, max_tokens=100))
    for round_number in range(2, 8):
        scheduler.queue.add(
            sequence(str(round_number), 46 if round_number == 3 else 3, max_tokens=50)
        )
        step(scheduler, worker, 3)
    long_prompt = next(seq for seq in scheduler.queue.sequences() if seq.request_id == "3")
    assert long_prompt.num_output_tokens >= 1


def test_a_last_chunk_of_one_token_is_prefill_not_a_round():
    counts = []
    for budget in (16, 18):
        scheduler = make(max_num_batched_tokens=budget)
        seq = sequence("1", 17, max_tokens=4)
        scheduler.queue.add(seq)
        worker = PretendedWorker(random.Random(9))
        while scheduler.queue.has_work:
            step(scheduler, worker, 0)
        counts.append((seq.stats.num_rounds, seq.stats.accept_length))
    assert counts[0] == counts[1] == (3, 1.0)


@pytest.mark.parametrize(
    ("chunk", "chosen", "sizes"),
    [(2, None, [30, 2, 2]), (2, 9, [30, 2, 2]), ("auto", 9, [30, 9, 6]), (None, 9, [30, 15, 0])],
)
def test_prompts_are_cut_while_others_decode_and_whole_otherwise(chunk, chosen, sizes):
    """A round with a long chunk would delay all decoding requests."""
    scheduler = make(chunked_prefill_size=chunk)
    worker = PretendedWorker(random.Random(4))
    scheduler.queue.add(sequence("1", 30, max_tokens=50))
    found = []
    for _ in range(3):
        steps = RoundSteps(DraftShape.chain(3), prompt_tokens=chosen)
        plan = scheduler.plan(lambda _, steps=steps: steps, ALONE)
        found.append(plan.num_prefill_tokens)
        scheduler.commit(plan, worker.execute(plan), cut)
        if len(found) == 1:
            scheduler.queue.add(sequence("2", 15, max_tokens=50))
    assert found == sizes


def prefilled(scheduler, worker, arrivals, num_steps):
    """Run steps; return the names of prompts by their last chunk. arrivals: by step."""
    done = []
    for number in range(num_steps):
        for each in arrivals.get(number, ()):
            scheduler.queue.add(each)
        plan = step(scheduler, worker, 0)
        done += [req.request_id for req in plan.prefill_requests if req.samples]
    return done


def test_a_short_prompt_passes_a_long_one():
    scheduler = make(max_num_batched_tokens=9, chunked_prefill_size=8)
    arrivals = {
        0: [sequence("1", 1, max_tokens=60)],
        1: [sequence("2", 48, max_tokens=9)],
        3: [sequence("3", 8, max_tokens=9), sequence("4", 8, max_tokens=9, priority=1)],
    }
    assert prefilled(scheduler, PretendedWorker(random.Random(1)), arrivals, 10) == list("1324")


def test_a_long_prompt_lets_pass_no_more_tokens_than_it_has():
    scheduler = make(max_num_batched_tokens=9, chunked_prefill_size=8)
    arrivals = {0: [sequence("1", 1, max_tokens=99), sequence("2", 40, max_tokens=9)]}
    arrivals |= {n: [sequence(str(n + 2), 8, max_tokens=1)] for n in range(1, 20)}
    done = prefilled(scheduler, PretendedWorker(random.Random(2)), arrivals, 20)
    assert 4 <= done.index("2") <= 6


def test_the_policy_knows_the_prompts_of_the_round_and_their_tokens():
    scheduler = make(max_num_batched_tokens=32)
    scheduler.queue.add(sequence("1", 20, max_tokens=9))
    asked = []

    def choose(batch):
        asked.append((batch.prompts, batch.max_prompt_tokens))
        return RoundSteps(DraftShape.chain(0))

    worker = PretendedWorker(random.Random(0))
    for name, num_prompt in (("2", 0), ("3", 5), ("4", 40)):
        if num_prompt:
            scheduler.queue.add(sequence(name, num_prompt, max_tokens=1))
        plan = scheduler.plan(choose, 0)
        assert plan is not None
        scheduler.commit(plan, worker.execute(plan), cut)
    assert asked == [([(0, 5)], 5), ([(0, 40)], 31)]


def test_drafts_give_way_to_other_texts_before_a_request_is_preempted():
    """Two texts that just fit: rounds shrink their drafts instead of evicting."""
    scheduler = make(num_pages=6)
    for name in ("1", "2"):
        scheduler.queue.add(sequence(name, 4, max_tokens=8))
    worker = PretendedWorker(random.Random(4))
    while scheduler.queue.has_work:
        step(scheduler, worker, 7)
    assert scheduler.queue.num_preemptions == 0


def test_known_mistake_5_pages_are_held_for_the_drafts_of_the_round_and_returned_after_it():
    scheduler = make()
    worker = PretendedWorker(random.Random(7))
    seq = sequence("1", 5, max_tokens=200)
    scheduler.queue.add(seq)
    for turn in range(60):
        (row,) = step(scheduler, worker, (7, 0, 1, 3)[turn % 4]).requests
        assert len(row.page_ids) == -(-(row.length + row.num_steps) // 4)
        held = 64 - scheduler.cache.num_free_pages
        assert held <= -(-len(seq) // 4), "what was rejected is free again"


def test_requests_wait_by_priority_and_then_by_arrival():
    queue = make(max_num_seqs=2).queue
    priorities = {"1": 0, "2": 5, "3": 0, "4": -1, "5": 5}
    for name, priority in priorities.items():
        queue.add(sequence(name, 4, priority=priority))
    queue.admit()
    assert [seq.request_id for seq in queue.running] == ["4", "1"]
    queue.preempt(queue.running[1])
    assert [seq.request_id for seq in queue.waiting] == ["1", "3", "2", "5"]
    queue.add(sequence("6", 4, priority=1))
    assert [seq.request_id for seq in queue.waiting] == ["1", "3", "6", "2", "5"]
    queue.preempt(queue.running[0])
    assert [seq.request_id for seq in queue.waiting] == ["4", "1", "3", "6", "2", "5"]


@given(data=st.data(), num_pages=st.integers(8, 14))
def test_the_least_urgent_and_youngest_request_is_preempted_and_every_text_stays(data, num_pages):
    scheduler = make(num_pages)
    worker = PretendedWorker(random.Random(num_pages))
    queue, start = scheduler.queue, scheduler.cache.start
    numbers, admitted = itertools.count(), {}

    def note_start(seq, hit):
        admitted[seq] = seq.params.priority, next(numbers)
        start(seq, hit)

    def check(seq):
        if not seq.finished:
            assert all(admitted[other] < admitted[seq] for other in queue.running)

    scheduler.cache.start, scheduler.on_leave = note_start, check
    for name in range(data.draw(st.integers(2, 6))):
        priority = data.draw(st.integers(-1, 1))
        queue.add(sequence(str(name), 3 + 2 * name, max_tokens=16, priority=priority))
        for _ in range(data.draw(st.integers(0, 3))):
            step(scheduler, worker, data.draw(st.integers(0, 3)))
    while queue.has_work:
        step(scheduler, worker, 2)
    for seq in admitted:
        assert seq.token_ids == [token_at(seq.seed, place) for place in range(len(seq))]
        assert seq.num_output_tokens == 16


def test_a_plan_holds_the_text_of_requests_with_score_edits_only():
    scheduler = make()
    scheduler.queue.add(sequence("1", 3, logit_bias={5: 1.0}))
    scheduler.queue.add(sequence("2", 3))
    plan = planned(scheduler, 0)
    assert [row.edited for row in plan.requests] == [EditedText(3), None]


def test_requests_with_a_grammar_send_their_text_and_follow_no_round_in_flight():
    scheduler = make(num_pages=60, max_num_batched_tokens=24)
    worker, zero = PretendedWorker(random.Random(0)), RoundSteps(DraftShape.chain(0))
    scheduler.queue.add(sequence("1", 3, max_tokens=9))
    free = planned(scheduler, 0, AHEAD)
    scheduler.queue.add(ruled := sequence("2", 3, max_tokens=9, grammar=Grammar.regex("a+")))
    assert scheduler.plan(lambda _: zero, AHEAD, free) is None
    scheduler.commit(free, worker.execute(free), cut)
    for _ in range(3):
        generated = ruled.output_token_ids
        plan = step(scheduler, worker, 0, AHEAD)
        assert [row.generated_ids for row in plan.requests] == [(), tuple(generated)]
        assert plan.has_masks
        assert scheduler.plan(lambda _: zero, AHEAD, plan) is None
    scheduler.queue.abort("2")
    planned(scheduler, 0, AHEAD, planned(scheduler, 0, AHEAD))
