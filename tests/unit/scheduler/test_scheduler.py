"""Laws of continuous batching, with a worker that only pretends to compute."""

import random

import pytest

from serve_spec.config import SchedulerConfig
from serve_spec.core.draft_shape import DraftShape
from serve_spec.core.grammar import Grammar
from serve_spec.core.plan import (
    BatchResult,
    EditedText,
    ScheduledBatch,
    ScheduledRequest,
    WorkerLimits,
)
from serve_spec.core.request import FinishReason, SamplingParams, SpeculativeOptions
from serve_spec.core.round import DecodeBatch, RoundSteps
from serve_spec.core.sequence import Sequence
from serve_spec.kvcache.manager import KVCacheManager
from serve_spec.scheduler.scheduler import Scheduler

TOPK = 3
TREES = [
    DraftShape(3, 8, TOPK),
    DraftShape(1, 2, TOPK),
    DraftShape(4, 30, TOPK),
    DraftShape(7, 7, TOPK),
]


def token_at(seed: int, position: int) -> int:
    """The only token the pretended target ever draws there."""
    return hash((seed, position)) % 1000


class PretendedWorker:
    """Executes plans by arithmetic and checks what a real worker would rely on."""

    def __init__(self, page_size: int, rng: random.Random) -> None:
        self.page_size = page_size
        self.rng = rng
        self.draft_entries: dict[str, int] = {}

    def execute(self, plan: ScheduledBatch) -> BatchResult:
        owners: dict[int, str] = {}
        drawn = []
        for row in plan.rows:
            assert row.token_ids, "an empty row"
            written = max(row.num_draft_tokens, TOPK * (row.num_steps - 1) * bool(row.tree_drafts))
            assert row.length + written <= len(row.page_ids) * self.page_size
            assert (row.tree_drafts > 0) == (not plan.shape.is_chain and row.num_steps > 0)
            for page in row.page_ids:
                assert owners.setdefault(page, row.request_id) == row.request_id
            if row.num_steps:
                assert len(row.extend_ids) == row.start - row.draft_start >= 1
                # Entries made while drafting are stale; only those of a catch-up may be trusted.
                assert row.draft_start in (0, self.draft_entries.get(row.request_id, 0))
                self.draft_entries[row.request_id] = row.start
            if row.samples:
                count = self.rng.randint(0, row.num_steps) + 1
                drawn.append([token_at(row.seed, row.length + i) for i in range(count)])
        return BatchResult(drawn, 0.0, 0.0)


def cut(seq: Sequence, tokens: list[int]) -> tuple[int, FinishReason | None]:
    for count, token in enumerate(tokens, start=1):
        if token in seq.params.stop_token_ids:
            return count, FinishReason.STOP
        if seq.num_output_tokens + count == seq.params.max_tokens:
            return count, FinishReason.LENGTH
    return len(tokens), None


def make(num_pages: int = 64, **limits: int | bool) -> Scheduler:
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "chunked_prefill": True}
    cache = KVCacheManager(num_pages, 4)
    return Scheduler(SchedulerConfig(**{**settings, **limits}), cache)


def sequence(name: str, num_prompt: int, **params: object) -> Sequence:
    seed = int(name)
    ids = [token_at(seed, p) for p in range(num_prompt)]
    return Sequence(name, SamplingParams(**params), ids, num_prompt, seed)


def any_steps(rng: random.Random, batch: DecodeBatch) -> RoundSteps:
    """Any tier, and any share of it for each row."""
    shape = rng.choice([None, *TREES]) or DraftShape.chain(rng.choice([0, 1, 3, 7]))
    rows = [rng.randint(0, shape.depth) for _ in range(batch.size)]
    return RoundSteps(shape, rng.choice([None, rows]))


def run_to_the_end(scheduler: Scheduler, worker: PretendedWorker, num_steps: int) -> None:
    while scheduler.has_work:
        plan = scheduler.plan(lambda _: RoundSteps(DraftShape.chain(num_steps)), WorkerLimits(0))
        assert plan is not None, "work is left, but no round can run"
        scheduler.commit(plan, worker.execute(plan), cut)
        scheduler.check_integrity()


def test_two_thousand_random_rounds_keep_integrity_and_return_every_page() -> None:
    """Admissions, cancellations, preemptions, stops and tier changes in any order."""
    rng = random.Random(0)
    scheduler = make(num_pages=24, max_num_batched_tokens=24)
    worker = PretendedWorker(4, rng)
    everyone: list[Sequence] = []
    finished = cancelled = 0
    for step in range(2000):
        if rng.random() < 0.25 and len(scheduler.waiting) < 6:
            stops = (rng.randrange(1000),) if rng.random() < 0.5 else ()
            options = SpeculativeOptions(rng.random() < 0.8, rng.choice([None, 0, 2]))
            seq = sequence(
                str(step),
                rng.randint(1, 40),
                max_tokens=rng.randint(1, 40),
                stop_token_ids=stops,
                speculative=options,
            )
            everyone.append(seq)
            scheduler.add(seq)
        if rng.random() < 0.03 and scheduler.has_work:
            victim = rng.choice(list(scheduler.sequences()))
            assert scheduler.abort(victim.request_id) is victim
            cancelled += 1
            scheduler.check_integrity()
        plan = scheduler.plan(lambda batch: any_steps(rng, batch), WorkerLimits(0))
        if plan is None:
            assert not scheduler.has_work
            continue
        committed = scheduler.commit(plan, worker.execute(plan), cut)
        finished += sum(row.seq.finished for row in committed)
        scheduler.check_integrity()
    run_to_the_end(scheduler, worker, 3)
    assert scheduler.cache.num_free_pages == 24
    assert finished > 100
    assert cancelled > 20
    assert scheduler.num_preemptions > 20, "the pool must be small enough to force preemption"
    for seq in everyone:
        expected = [token_at(seq.seed, p) for p in range(len(seq))]
        assert seq.token_ids == expected, "a token was lost or repeated"
        assert seq.num_output_tokens <= seq.params.max_tokens


@pytest.mark.parametrize("num_steps", [0, 1, 3, 7])
def test_no_text_ever_exceeds_max_tokens(num_steps: int) -> None:
    scheduler = make()
    sequences = [sequence(str(i), 5, max_tokens=i + 1) for i in range(10)]
    for seq in sequences:
        scheduler.add(seq)
    run_to_the_end(scheduler, PretendedWorker(4, random.Random(1)), num_steps)
    assert [seq.num_output_tokens for seq in sequences] == [i + 1 for i in range(10)]
    assert all(seq.finish_reason is FinishReason.LENGTH for seq in sequences)


def test_a_stop_token_inside_an_accepted_run_ends_the_text_there() -> None:
    scheduler = make()
    seq = sequence("3", 4, max_tokens=50, stop_token_ids=(token_at(3, 9),))
    scheduler.add(seq)
    run_to_the_end(scheduler, PretendedWorker(4, random.Random(2)), 7)
    assert seq.finish_reason is FinishReason.STOP
    assert seq.token_ids[-1] == token_at(3, 9)
    assert seq.token_ids.count(token_at(3, 9)) == 1


def test_chunked_prefill_mixes_with_decoding_inside_the_token_budget() -> None:
    scheduler = make(max_num_batched_tokens=16)
    worker = PretendedWorker(4, random.Random(3))
    scheduler.add(sequence("1", 3, max_tokens=30))
    plan = scheduler.plan(lambda _: RoundSteps(DraftShape.chain(3)), WorkerLimits(0))
    assert plan is not None
    scheduler.commit(plan, worker.execute(plan), cut)
    scheduler.add(sequence("2", 40, max_tokens=3))
    plan = scheduler.plan(lambda _: RoundSteps(DraftShape.chain(3)), WorkerLimits(0))
    assert plan is not None
    decode, prefill = plan.rows
    assert (decode.num_steps, decode.samples, plan.batch_size) == (3, True, 1)
    assert (len(prefill.token_ids), prefill.samples) == (12, False)


@pytest.mark.parametrize("num_steps", [0, 3, 7])
def test_drafts_never_keep_a_prompt_from_its_share_of_the_budget(num_steps: int) -> None:
    """Four decoding rows could eat a budget of 32 whole; the prompt still answers in two rounds."""
    scheduler = make(max_num_batched_tokens=32)
    worker = PretendedWorker(4, random.Random(7))
    for name in ("1", "2", "3", "4"):
        scheduler.add(sequence(name, 2, max_tokens=40))
    for round_number in range(4):
        if round_number == 2:
            scheduler.add(arriving := sequence("9", 20, max_tokens=4))
        plan = scheduler.plan(lambda _: RoundSteps(DraftShape.chain(num_steps)), WorkerLimits(0))
        assert plan is not None
        assert sum(row.query_len for row in plan.rows) <= 32
        scheduler.commit(plan, worker.execute(plan), cut)
    assert arriving.num_output_tokens >= 1


@pytest.mark.parametrize("num_prompt_tokens", [1, 8, 30])
def test_requests_draft_beside_a_prompt_that_arrives_during_a_step(
    num_prompt_tokens: int,
) -> None:
    scheduler = make(num_pages=100)
    worker = PretendedWorker(4, random.Random(11))
    ahead = WorkerLimits(8, async_scheduling=True)
    for name in ("1", "2", "3", "4"):
        scheduler.add(sequence(name, 3, max_tokens=60))
    under_way = scheduler.plan(lambda _: RoundSteps(DraftShape.chain(0)), ahead)
    assert under_way is not None
    scheduler.add(arriving := sequence("5", num_prompt_tokens, max_tokens=60))
    plan = scheduler.plan(lambda _: RoundSteps(DraftShape.chain(7)), ahead, under_way)
    assert plan is not None
    assert [row.is_decode for row in plan.rows] == [True] * 4 + [False]
    assert all(row.num_steps > 0 for row in plan.rows[:4])
    assert plan.rows[4].token_ids == tuple(arriving.token_ids)
    scheduler.commit(under_way, worker.execute(under_way), cut)
    # The next one knows the prompt to be done, whatever it drew.
    after = scheduler.plan(lambda _: RoundSteps(DraftShape.chain(7)), ahead, plan)
    assert after is not None
    assert [row.is_decode for row in after.rows] == [True] * 5
    assert after.rows[4].num_missing == num_prompt_tokens


def test_a_long_prompt_is_cut_beside_a_step_in_flight_and_leaves_room_for_drafts() -> None:
    scheduler = make(num_pages=100, max_num_batched_tokens=20)
    worker = PretendedWorker(4, random.Random(11))
    ahead = WorkerLimits(8, async_scheduling=True)
    scheduler.add(sequence("1", 3, max_tokens=60))
    plan = scheduler.plan(lambda _: RoundSteps(DraftShape.chain(0)), ahead)
    assert plan is not None
    scheduler.add(sequence("2", 30, max_tokens=3))
    cut_at = []
    while plan is not None and len(cut_at) < 2:
        following = scheduler.plan(lambda _: RoundSteps(DraftShape.chain(7)), ahead, plan)
        assert following is not None
        cut_at += [row.length for row in following.rows if not row.is_decode]
        assert following.rows[0].num_steps == 7
        scheduler.commit(plan, worker.execute(plan), cut)
        plan = following
    assert cut_at == [12, 24]


def put_off(scheduler: Scheduler, num_ending: int, num_steps: int = 3) -> None:
    """Makes a policy choose drafts for texts whose next round has to wait for want of pages.

    All but the first end then, if that many are to.
    """
    worker = PretendedWorker(4, random.Random(12))
    for number in range(scheduler.cache.num_free_pages // 2 + 1):
        stops = (token_at(number, 4),) if number and number <= num_ending else ()
        scheduler.add(sequence(str(number), 3, max_tokens=60, stop_token_ids=stops))
    plan = scheduler.plan(lambda _: RoundSteps(DraftShape.chain(0)), AHEAD)
    assert plan is not None
    scheduler.commit(plan, worker.execute(plan), cut)
    # Texts of four tokens, in a page of four each: with one more each they need another.
    under_way = scheduler.plan(lambda _: RoundSteps(DraftShape.chain(0)), AHEAD)
    assert under_way is not None
    assert (
        scheduler.plan(lambda _: RoundSteps(DraftShape.chain(num_steps)), AHEAD, under_way) is None
    )
    scheduler.commit(under_way, worker.execute(under_way), cut)


def test_a_choice_that_has_to_wait_is_not_asked_for_again() -> None:
    """A policy counts its answers: dwell, budgets and probes go by rounds."""
    scheduler = make(num_pages=3)
    put_off(scheduler, num_ending=0)
    plan = scheduler.plan(lambda _: pytest.fail("asked twice"), AHEAD)
    assert plan is not None
    assert plan.shape.depth == 3
    assert any(row.num_steps for row in plan.rows)


@pytest.mark.parametrize("num_steps", [0, 3])
def test_a_round_that_waited_for_its_drafts_says_so_and_the_next_does_not(num_steps: int) -> None:
    scheduler = make(num_pages=3)
    put_off(scheduler, num_ending=0, num_steps=num_steps)
    for was_postponed in (num_steps > 0, False):
        plan = scheduler.plan(lambda _: RoundSteps(DraftShape.chain(3)), AHEAD)
        assert plan is not None
        assert plan.was_postponed == was_postponed


def test_a_prompt_moves_on_even_where_decode_rows_fill_the_budget() -> None:
    scheduler = make(max_num_batched_tokens=3)
    worker = PretendedWorker(4, random.Random(10))
    for name in ("1", "2", "3"):
        scheduler.add(sequence(name, 1, max_tokens=60))
    for round_number in range(15):
        if round_number == 4:
            scheduler.add(arriving := sequence("9", 8, max_tokens=4))
        plan = scheduler.plan(lambda _: RoundSteps(DraftShape.chain(3)), WorkerLimits(0))
        assert plan is not None
        scheduler.commit(plan, worker.execute(plan), cut)
    assert len(scheduler.running) >= 3, "the others must still be decoding"
    assert arriving.num_output_tokens >= 1


def test_a_whole_prompt_is_served_under_a_stream_of_short_ones() -> None:
    """Without chunks, a prompt longer than what is left must not wait for ever."""
    scheduler = make(max_num_batched_tokens=48, chunked_prefill=False)
    worker = PretendedWorker(4, random.Random(8))
    scheduler.add(sequence("1", 3, max_tokens=100))
    for round_number in range(2, 8):
        scheduler.add(sequence(str(round_number), 46 if round_number == 3 else 3, max_tokens=50))
        plan = scheduler.plan(lambda _: RoundSteps(DraftShape.chain(3)), WorkerLimits(0))
        assert plan is not None
        scheduler.commit(plan, worker.execute(plan), cut)
    long_prompt = next(seq for seq in scheduler.sequences() if seq.request_id == "3")
    assert long_prompt.num_output_tokens >= 1


def test_a_last_chunk_of_one_token_is_prefill_not_a_round() -> None:
    counts = []
    for budget in (16, 18):
        scheduler = make(max_num_batched_tokens=budget)
        seq = sequence("1", 17, max_tokens=4)
        scheduler.add(seq)
        run_to_the_end(scheduler, PretendedWorker(4, random.Random(9)), 0)
        counts.append((seq.stats.num_rounds, seq.stats.accept_length))
    assert counts[0] == counts[1] == (3, 1.0)


def test_without_chunked_prefill_a_prompt_is_computed_in_one_round() -> None:
    scheduler = make(max_num_batched_tokens=48, chunked_prefill=False)
    for name in ("1", "2"):
        scheduler.add(sequence(name, 40, max_tokens=2))
    plan = scheduler.plan(lambda _: RoundSteps(DraftShape.chain(3)), WorkerLimits(0))
    assert plan is not None
    assert [len(row.token_ids) for row in plan.rows] == [40]
    assert plan.rows[0].samples


def test_prefill_rows_do_not_count_in_the_batch_size_the_policy_sees() -> None:
    scheduler = make(max_num_batched_tokens=8)
    for name in ("1", "2", "3"):
        scheduler.add(sequence(name, 20, max_tokens=4))
    asked: list[int] = []
    plan = scheduler.plan(
        lambda batch: asked.append(batch.size) or RoundSteps(DraftShape.chain(3)), WorkerLimits(0)
    )
    assert plan is not None
    assert asked == []
    assert plan.batch_size == 0


def test_the_policy_knows_the_prompts_that_share_the_round_and_their_rows() -> None:
    scheduler = make(max_num_batched_tokens=32)
    scheduler.add(sequence("1", 20, max_tokens=9))
    asked: list[tuple[int, int]] = []

    def choose(batch: DecodeBatch) -> RoundSteps:
        asked.append((batch.num_prompts, batch.num_prompt_rows))
        return RoundSteps(DraftShape.chain(0))

    worker = PretendedWorker(4, random.Random(0))
    for name, num_prompt in (("2", 0), ("3", 5), ("4", 40)):
        if num_prompt:
            scheduler.add(sequence(name, num_prompt, max_tokens=1))
        plan = scheduler.plan(choose, WorkerLimits(0))
        assert plan is not None
        scheduler.commit(plan, worker.execute(plan), cut)
    assert asked == [(1, 5), (1, 31)]


def test_drafts_give_way_to_other_texts_before_anyone_is_preempted() -> None:
    """Two texts that just fit: rounds shrink their drafts instead of evicting."""
    scheduler = make(num_pages=6)
    for name in ("1", "2"):
        scheduler.add(sequence(name, 4, max_tokens=8))
    run_to_the_end(scheduler, PretendedWorker(4, random.Random(4)), 7)
    assert scheduler.num_preemptions == 0


def test_known_mistake_5_pages_are_held_for_the_drafts_of_the_round_and_returned_after_it() -> None:
    """Not for the deepest tier there is, and not for drafts that were rejected."""
    scheduler = make()
    worker = PretendedWorker(4, random.Random(7))
    seq = sequence("1", 5, max_tokens=200)
    scheduler.add(seq)
    for turn in range(60):
        steps = (7, 0, 1, 3)[turn % 4]
        plan = scheduler.plan(
            lambda _, steps=steps: RoundSteps(DraftShape.chain(steps)), WorkerLimits(0)
        )
        assert plan is not None
        (row,) = plan.rows
        assert len(row.page_ids) == -(-(row.length + row.num_steps) // 4)
        scheduler.commit(plan, worker.execute(plan), cut)
        held = 64 - scheduler.cache.num_free_pages
        assert held <= -(-len(seq) // 4), "what was rejected is free again"


def test_a_request_can_cap_or_refuse_speculation_for_itself_alone() -> None:
    scheduler = make()
    worker = PretendedWorker(4, random.Random(5))
    options = [None, SpeculativeOptions(max_steps=2), SpeculativeOptions(enabled=False)]
    for i, option in enumerate(options):
        scheduler.add(
            sequence(str(i), 4, max_tokens=40, speculative=option or SpeculativeOptions())
        )
    for _ in range(2):
        plan = scheduler.plan(lambda _: RoundSteps(DraftShape.chain(7)), WorkerLimits(0))
        assert plan is not None
        scheduler.commit(plan, worker.execute(plan), cut)
    assert [row.num_steps for row in plan.rows] == [7, 2, 0]


def test_aborting_while_a_round_runs_drops_its_result() -> None:
    scheduler = make()
    worker = PretendedWorker(4, random.Random(6))
    first, second = sequence("1", 4, max_tokens=9), sequence("2", 4, max_tokens=9)
    scheduler.add(first)
    scheduler.add(second)
    plan = scheduler.plan(lambda _: RoundSteps(DraftShape.chain(3)), WorkerLimits(0))
    assert plan is not None
    result = worker.execute(plan)
    scheduler.abort("1")
    committed = scheduler.commit(plan, result, cut)
    assert [row.seq for row in committed] == [second]
    assert first.finish_reason is FinishReason.ABORT
    assert first.num_output_tokens == 0
    scheduler.check_integrity()


AHEAD = WorkerLimits(8, async_scheduling=True)


class AheadWorker(PretendedWorker):
    """Runs rounds of which the host learns one round late, as a device would."""

    def __init__(self, page_size: int, rng: random.Random) -> None:
        super().__init__(page_size, rng)
        self.lengths: dict[str, int] = {}
        self.counted: dict[str, list[int]] = {}

    def execute(self, plan: ScheduledBatch) -> BatchResult:
        drawn = []
        for row in plan.rows:
            if not (plan.follows and row.is_decode):
                self.lengths[row.request_id] = row.length
            length = self.lengths[row.request_id]
            assert length + row.num_steps <= len(row.page_ids) * self.page_size
            if row.extends:
                made = self.draft_entries.get(row.request_id, 0)
                made = made if plan.follows else row.draft_start
                assert 1 <= length - 1 - made <= row.num_missing <= plan.max_missing
                self.draft_entries[row.request_id] = length - 1
            if row.samples:
                count = self.rng.randint(0, row.num_steps) + 1
                drawn.append([token_at(row.seed, length + i) for i in range(count)])
                self.lengths[row.request_id] += count
                if row.params.counts_tokens:
                    self.count(row, length, drawn[-1])
        return BatchResult(drawn, 0.0, 0.0)

    def count(self, row: ScheduledRequest, length: int, drawn: list[int]) -> None:
        """What a penalty counts: what the host last told, and what the device drew since."""
        if row.edited is not None:
            self.counted[row.request_id] = list(row.edited.token_ids)
        assert self.counted[row.request_id] == [token_at(row.seed, p) for p in range(length)]
        self.counted[row.request_id] += drawn


def test_rounds_planned_before_the_last_is_known_change_no_text_and_lose_no_page() -> None:
    """Admissions, cancellations, stops and tier changes in any order, one round in flight."""
    rng = random.Random(1)
    scheduler = make(num_pages=30, max_num_batched_tokens=24)
    worker = AheadWorker(4, rng)
    everyone: list[Sequence] = []
    num_ahead = num_prompts_ahead = 0
    flight: tuple[ScheduledBatch, BatchResult] | None = None
    for step in range(3000):
        if step < 2500 and rng.random() < 0.1 and len(scheduler.waiting) < 4:
            stops = (rng.randrange(1000),) if rng.random() < 0.5 else ()
            options = SpeculativeOptions(rng.random() < 0.8, rng.choice([None, 0, 2]))
            params = {"max_tokens": rng.randint(1, 40), "speculative": options}
            params["frequency_penalty"] = rng.choice([0, 1])
            seq = sequence(str(step), rng.randint(1, 40), stop_token_ids=stops, **params)
            everyone.append(seq)
            scheduler.add(seq)
        if rng.random() < 0.02 and scheduler.has_work:
            scheduler.abort(rng.choice(list(scheduler.sequences())).request_id)
        if flight is None:
            plan = scheduler.plan(lambda batch: any_steps(rng, batch), AHEAD)
            if plan is None:
                assert not scheduler.has_work
                continue
            flight = plan, worker.execute(plan)
        ahead = scheduler.plan(lambda batch: any_steps(rng, batch), AHEAD, flight[0])
        following = None
        if ahead is not None:
            num_ahead += 1
            num_prompts_ahead += not all(row.is_decode for row in ahead.rows)
            following = ahead, worker.execute(ahead)
        scheduler.commit(*flight, cut)
        scheduler.check_integrity()
        flight = following
    assert not scheduler.has_work, "two hundred rounds end whatever is left"
    assert scheduler.cache.num_free_pages == 30
    assert num_ahead > 500
    assert num_prompts_ahead > 20
    assert scheduler.num_preemptions > 20, "the pool must be small enough to force preemption"
    for seq in everyone:
        expected = [
            token_at(seq.seed, seq.num_prompt_tokens + i) for i in range(seq.num_output_tokens)
        ]
        assert seq.output_token_ids == expected


def test_a_row_that_edits_scores_names_its_text_unless_a_round_is_adding_to_it() -> None:
    scheduler = make(num_pages=30, max_num_batched_tokens=24)
    worker = AheadWorker(4, random.Random(0))
    seq = sequence("1", 30, max_tokens=40, presence_penalty=1.0)
    scheduler.add(seq)

    def zero(batch: DecodeBatch) -> RoundSteps:
        return RoundSteps(DraftShape.chain(0))

    first = scheduler.plan(zero, AHEAD)
    assert first is not None
    assert [row.edited for row in first.rows] == [None], "a piece of a prompt draws nothing"
    second = scheduler.plan(zero, AHEAD, first)
    assert second is not None
    assert [row.edited for row in second.rows] == [EditedText(30, tuple(seq.token_ids))]
    scheduler.commit(first, worker.execute(first), cut)
    third = scheduler.plan(zero, AHEAD, second)
    assert third is not None
    assert [row.edited for row in third.rows] == [None]
    scheduler.commit(second, worker.execute(second), cut)
    scheduler.commit(third, worker.execute(third), cut)
    fourth = scheduler.plan(zero, AHEAD)
    assert fourth is not None
    assert [row.edited for row in fourth.rows] == [EditedText(30, tuple(seq.token_ids))]


def test_only_what_penalties_count_is_named() -> None:
    scheduler = make()
    scheduler.add(sequence("1", 3, logit_bias={5: 1.0}))
    scheduler.add(sequence("2", 3))
    plan = scheduler.plan(lambda _: RoundSteps(DraftShape.chain(0)), WorkerLimits(0))
    assert plan is not None
    assert [row.edited for row in plan.rows] == [EditedText(3), None]


def test_rows_by_a_grammar_name_what_is_generated_and_follow_no_round_under_way() -> None:
    scheduler = make(num_pages=60, max_num_batched_tokens=24)
    worker = AheadWorker(4, random.Random(0))

    def zero(batch: DecodeBatch) -> RoundSteps:
        return RoundSteps(DraftShape.chain(0))

    def run(plan: ScheduledBatch | None) -> ScheduledBatch:
        assert plan is not None
        scheduler.commit(plan, worker.execute(plan), cut)
        return plan

    scheduler.add(sequence("1", 3, max_tokens=9))
    free = scheduler.plan(zero, AHEAD)
    assert free is not None
    scheduler.add(ruled := sequence("2", 3, max_tokens=9, grammar=Grammar.regex("a+")))
    assert scheduler.plan(zero, AHEAD, free) is None
    run(free)
    for _ in range(3):
        said = ruled.output_token_ids
        plan = run(scheduler.plan(zero, AHEAD))
        assert [row.generated_ids for row in plan.rows] == [(), tuple(said)]
        assert plan.has_grammars
        assert scheduler.plan(zero, AHEAD, plan) is None
    scheduler.abort("2")
    following = scheduler.plan(zero, AHEAD)
    assert following is not None
    assert scheduler.plan(zero, AHEAD, following) is not None
