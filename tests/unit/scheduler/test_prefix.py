"""Laws of shared prefixes, with a worker whose caches hold what they were computed from."""

import random

import pytest

from serve_spec.config import SchedulerConfig
from serve_spec.core.draft import DraftShape, ModelDrafts
from serve_spec.core.plan import BatchResult
from serve_spec.core.request import FinishReason, SamplingParams, SpeculativeOptions, TokenLogprob
from serve_spec.core.round import RoundSteps
from serve_spec.core.sequence import Sequence
from serve_spec.kvcache.manager import KVCacheManager
from serve_spec.scheduler import queue as queue_module
from serve_spec.scheduler.queue import MIN_SHARED_TOKENS
from serve_spec.scheduler.scheduler import Scheduler

PAGE = 4
MAX_MISSING = 8
BUDGET = 24
TOPK = 3
TREES = [
    DraftShape(3, 8, TOPK),
    DraftShape(1, 2, TOPK),
    DraftShape(4, 30, TOPK),
    DraftShape(7, 7, TOPK),
]


def next_token(seed, text):
    """What the pretended target draws after a text: few words, so that texts part late."""
    return hash((seed, *text[-3:])) % 3


class RememberingWorker:
    """A cache entry is the text it was made of, `None` where it was made of drafts.

    Whatever a row reads has to be of its own text. Target entry p is of tokens 0..p, draft entry j
    of tokens 0..j+1, in the slot of position j + shift.
    """

    def __init__(self, cache, shift, rng):
        self.cache = cache
        self.shift = shift
        self.rng = rng
        self.target = {}
        self.draft = {}
        self.sequences = {}
        self.texts = {}
        """What the device knows of requests in flight: a round more than the host."""
        self.num_entries = {}
        self.counted = {}

    def execute(self, plan):
        known = set(self.cache.tree.page_ids)
        owners = {}
        drawn = []
        for row in plan.requests:
            assert row.token_ids, "an empty row"
            if not row.is_decode:
                self.texts[row.request_id] = tuple(self.sequences[row.request_id].token_ids)
                self.num_entries[row.request_id] = row.draft_start
            assert row.request_id in self.texts, "a text starts with a row of a prompt"
            text = self.texts[row.request_id]
            assert (row.shape.tree_size > 0) == (not plan.shape.is_chain and row.num_steps > 0)
            for page in set(row.page_ids) - known:
                assert owners.setdefault(page, row.request_id) == row.request_id
            self.read(self.target, row, range(row.start), text, 1)
            num_drafts = max(
                row.num_draft_tokens, TOPK * (row.num_steps - 1) * bool(row.shape.tree_size)
            )
            if row.extends:
                self.extend_draft(row, text, num_drafts)
                assert row.num_missing <= plan.max_missing
            tokens = []
            if row.samples:
                for _ in range(self.rng.randint(0, row.num_steps) + 1):
                    tokens.append(next_token(row.seed, (*text, *tokens)))
                drawn.append(tokens)
                self.texts[row.request_id] = (*text, *tokens)
                if row.params.counts_tokens:
                    assert plan.follows or row.edited is not None, "the host knows all of it"
                    self.count(row, text)
            end = len(text) if row.is_decode else row.length
            first = end - 1 if row.is_decode else row.start
            for position in range(first, end + num_drafts):
                slot = self.slot(row, position)
                assert slot // PAGE not in known, "pages that others may hold are written again"
                is_committed = position < end + max(0, len(tokens) - 1)
                whole = self.texts[row.request_id]
                self.target[slot] = whole[: position + 1] if is_committed else None
        scored = {
            row.request_id: tuple(TokenLogprob(token, 0.0, 1) for token in row.scored_ids)
            for row in plan.requests
            if row.scored_ids
        }
        return BatchResult(drawn, 0.0, 0.0, prompt_logprobs=scored)

    def count(self, row, text):
        """Check what a penalty counts: the text of the host, and the draws since."""
        if row.edited is not None:
            self.counted[row.request_id] = tuple(row.edited.token_ids)
        assert self.counted[row.request_id] == text
        self.counted[row.request_id] = self.texts[row.request_id]

    def extend_draft(self, row, text, num_drafts):
        made = self.num_entries[row.request_id]
        assert made <= len(text) - 2, "drafting starts from the output of the last entry"
        assert len(text) - 1 - made <= row.num_missing
        self.read(self.draft, row, range(-self.shift, made), text, 2)
        for entry in range(made, len(text) - 1):
            self.draft[self.slot(row, entry + self.shift)] = text[: entry + 2]
        for entry in range(len(text) - 1, len(text) - 2 + num_drafts):
            self.draft[self.slot(row, entry + self.shift)] = None
        self.num_entries[row.request_id] = len(text) - 1

    def read(self, pool, row, entries, text, more):
        shift = self.shift if pool is self.draft else 0
        for entry in entries:
            made_of = pool[self.slot(row, entry + shift)]
            assert made_of == text[: entry + more], f"{row.request_id}: entry {entry}"

    def slot(self, row, position):
        return row.page_ids[position // PAGE] * PAGE + position % PAGE

    def check_published(self):
        """Assert that shared pages were computed from committed tokens."""
        for page, text, has_draft in self.cache.tree.page_texts():
            end = len(text) - 1
            for position in range(end - PAGE, end):
                slot = page * PAGE + position % PAGE
                assert self.target[slot] == tuple(text[: position + 1])
                if has_draft:
                    made_of = self.draft[slot]
                    assert made_of == tuple(text[: position - self.shift + 2])


def cut(seq, tokens):
    most = seq.num_remaining
    stop = seq.params.stop_token_ids
    for count, _ in enumerate(tokens, start=1):
        if count == most:
            return count, FinishReason.LENGTH
        if stop and tuple(tokens[count - 1 : count]) == stop and seq.num_output_tokens > 9:
            return count, FinishReason.STOP
    return len(tokens), None


def slots_past(shape):
    """The slots of a shape's drafts, or of the beams that grow them."""
    return max(shape.size, shape.topk * (shape.depth - 1))


def make(num_pages, *, shift=0, prefix_caching=True, **limits):
    settings = {"max_num_seqs": 6, "max_num_batched_tokens": BUDGET}
    cache = KVCacheManager(num_pages, PAGE, prefix_caching=prefix_caching)
    drafts = ModelDrafts(slots_past, first_entry=-shift)
    return Scheduler(SchedulerConfig(**{**settings, **limits}), cache, model_drafts=drafts)


def any_steps(rng, batch):
    shape = rng.choice([None, *TREES]) or DraftShape.chain(rng.choice([0, 1, 3, 7]))
    rows = [rng.randint(0, shape.depth) for _ in range(batch.size)]
    return RoundSteps(shape, rng.choice([None, rows]))


def traffic(rng):
    """Prompts that go on where others did, under two seeds, so that texts are alike as well."""
    prompts = [[0]]
    for number in range(10_000):
        begin = rng.choice(prompts)
        prompt = [
            *begin[: rng.randint(1, 30)],
            *(rng.randrange(2) for _ in range(rng.randint(0, 9))),
        ]
        seed = rng.randrange(2)
        while len(prompt) < 40 and rng.random() < 0.9:
            prompt.append(next_token(seed, tuple(prompt)))
        prompts = [*prompts[-5:], prompt]
        stops = (1,) if rng.random() < 0.5 else ()
        scored = 0 if rng.random() < 0.1 else None
        params = SamplingParams(
            max_tokens=rng.randint(1, 24),
            stop_token_ids=stops,
            prompt_logprobs=scored,
            speculative=SpeculativeOptions(rng.random() < 0.8, rng.choice([None, 0, 2])),
            frequency_penalty=rng.choice([0, 1]),
        )
        yield Sequence(str(number), params, list(prompt), len(prompt), seed)


@pytest.mark.parametrize(
    ("shift", "runs_ahead", "num_pages"),
    [(0, False, 26), (0, True, 60), (1, False, 60), (1, True, 26)],
)
def test_what_is_read_is_of_ones_own_text_and_what_is_known_was_committed(
    shift, runs_ahead, num_pages, monkeypatch
):
    """Arrivals, cancellations, preemptions, evictions, stops, depth changes, in any order.

    No token and no page is lost. One round is in flight while another is planned, or none.
    """
    monkeypatch.setattr(queue_module, "MIN_SHARED_TOKENS", 8)  # the texts of this test are short
    rng = random.Random(num_pages + shift)
    scheduler = make(num_pages, shift=shift)
    worker = RememberingWorker(scheduler.cache, shift, rng)
    arrivals = traffic(rng)
    lengths_at_abort = {}
    flight = None
    num_finished = num_prompts_ahead = 0
    counts = []

    def run(under_way):
        plan = scheduler.plan(lambda batch: any_steps(rng, batch), MAX_MISSING, under_way)
        if plan is None:
            return None
        assert sum(row.query_len for row in plan.requests) <= BUDGET
        return plan, worker.execute(plan)

    for step in range(1200):
        if step < 1000 and rng.random() < 0.3 and len(scheduler.queue.waiting) < 4:
            seq = next(arrivals)
            worker.sequences[seq.request_id] = seq
            scheduler.queue.add(seq)
        if rng.random() < 0.02 and scheduler.queue.has_work:
            victim = rng.choice(list(scheduler.queue.sequences()))
            assert scheduler.queue.abort(victim.request_id) is victim
            lengths_at_abort[victim.request_id] = len(victim)
        flight = flight or run(None)
        if flight is None:
            assert not scheduler.queue.has_work
            continue
        following = run(flight[0]) if runs_ahead else None
        if following is not None:
            num_prompts_ahead += not all(row.is_decode for row in following[0].requests)
        committed = scheduler.commit(*flight, cut)
        num_finished += sum(row.seq.finished for row in committed)
        scheduler.queue.check_integrity()
        worker.check_published()
        counts.append(scheduler.queue.take_prefix_counts())
        flight = following
    assert not scheduler.queue.has_work, "two hundred rounds end whatever is left"
    assert scheduler.cache.num_free_pages == num_pages
    assert num_finished > 100
    assert len(lengths_at_abort) > 5
    assert (num_prompts_ahead > 20) == runs_ahead
    assert scheduler.cache.tree.num_evicted > 20
    assert (scheduler.queue.num_preemptions > 5) == (num_pages == 26)
    queries, hits = map(sum, zip(*counts, strict=True))
    assert 0.2 < hits / queries < 1, "the test needs texts that share, and some that do not"
    for seq in worker.sequences.values():
        check_ended(seq, lengths_at_abort)


def check_ended(seq, lengths_at_abort):
    """Assert that a text is what was drawn, to its end, and that its prompt was scored once."""
    assert seq.finished
    assert len(seq) == lengths_at_abort.get(seq.request_id, len(seq))
    assert seq.num_output_tokens <= seq.params.max_tokens
    for position in range(seq.num_prompt_tokens, len(seq)):
        assert seq.token_ids[position] == next_token(seq.seed, tuple(seq.token_ids[:position]))
    scored = [entry.token_id for entry in seq.prompt_logprobs]
    if seq.request_id not in lengths_at_abort:
        is_asked = seq.params.prompt_logprobs is not None
        assert scored == (seq.token_ids[1 : seq.num_prompt_tokens] if is_asked else [])


def sequence(name, token_ids, **params):
    return Sequence(name, SamplingParams(**params), list(token_ids), len(token_ids), 0)


def run(scheduler, *sequences):
    """Run sequences to their end; return the requests of each round."""
    worker = RememberingWorker(scheduler.cache, 0, random.Random(0))
    for seq in sequences:
        worker.sequences[seq.request_id] = seq
        scheduler.queue.add(seq)
    rounds = []
    while scheduler.queue.has_work:
        plan = scheduler.plan(lambda _: RoundSteps(DraftShape.chain(0)), 0)
        rounds.append(list(plan.requests))
        scheduler.commit(plan, worker.execute(plan), cut)
    return rounds


LONG = [token % 7 for token in range(2 * MIN_SHARED_TOKENS)]


def first_round_of(rounds, name):
    return next(i for i, rows in enumerate(rounds) if any(row.request_id == name for row in rows))


def test_several_answers_to_a_prompt_wait_a_round_and_compute_it_once():
    scheduler = make(512, max_num_batched_tokens=4096)
    same = [sequence(name, LONG, max_tokens=3) for name in "abc"]
    other = sequence("d", [6, 6, 6, *LONG], max_tokens=3)
    rounds = run(scheduler, *same, other)
    prompts = [row for rows in rounds for row in rows if not row.is_decode]
    computed = {row.request_id: len(row.token_ids) for row in prompts}
    assert computed == {"a": len(LONG), "b": PAGE, "c": PAGE, "d": len(LONG) + 3}
    assert [first_round_of(rounds, name) for name in "abcd"] == [0, 1, 1, 0]
    assert [seq.num_cached_tokens for seq in same] == [0, len(LONG) - PAGE, len(LONG) - PAGE]


def test_what_others_compute_is_waited_for_only_where_it_pays():
    """Short prompts, prompts that part early, prompts whose tokens are scored: all at once."""
    for shared, num_own in (
        (MIN_SHARED_TOKENS - 1, 0),
        (MIN_SHARED_TOKENS + 8, 2 * MIN_SHARED_TOKENS),
    ):
        scheduler = make(512, max_num_batched_tokens=4096)
        texts = [[*LONG[:shared], *[token] * (num_own + 1)] for token in (3, 4)]
        sequences = [sequence(str(i), text, max_tokens=3) for i, text in enumerate(texts)]
        assert first_round_of(run(scheduler, *sequences), "1") == 0
    scheduler = make(512, max_num_batched_tokens=4096)
    scored = sequence("b", LONG, max_tokens=3, prompt_logprobs=0)
    assert first_round_of(run(scheduler, sequence("a", LONG, max_tokens=3), scored), "b") == 0
    assert scored.num_cached_tokens == 0
    assert [entry.token_id for entry in scored.prompt_logprobs] == LONG[1:]


def test_room_that_a_hit_brings_lets_a_text_in_that_would_not_fit_beside_others():
    """9 pages: 5 are of the first text, 4 are free, and the second text needs 6 in all."""
    text = LONG[:20]
    for prefix_caching in (True, False):
        scheduler = make(9, prefix_caching=prefix_caching, max_num_batched_tokens=64)
        first = sequence("a", text[:19], max_tokens=4)
        worker = RememberingWorker(scheduler.cache, 0, random.Random(0))
        second = sequence("b", [*text[:17], *text[:3]], max_tokens=1)
        for seq in (first, second):
            worker.sequences[seq.request_id] = seq
        scheduler.queue.add(first)
        for _ in range(2):
            plan = scheduler.plan(lambda _: RoundSteps(DraftShape.chain(0)), 0)
            scheduler.commit(plan, worker.execute(plan), cut)
            scheduler.queue.add(second) if second not in scheduler.queue.waiting else None
        plan = scheduler.plan(lambda _: RoundSteps(DraftShape.chain(0)), 0)
        assert len(plan.requests) == (2 if prefix_caching else 1)
        scheduler.queue.check_integrity()


def test_a_text_whose_draft_broke_leaves_none_of_its_entries():
    scheduler = make(64)
    seq = sequence("a", LONG[:20], max_tokens=2)
    seq.num_computed = seq.num_draft_computed = 18
    scheduler.cache.reserve(seq, 20)
    scheduler.cache.publish(seq)
    again = sequence("b", LONG[:20])
    assert scheduler.cache.find(again).num_draft_pages == 4
    scheduler = make(64)
    seq.page_ids, seq.has_broken_draft = [], True
    scheduler.cache.reserve(seq, 20)
    scheduler.cache.publish(seq)
    hit = scheduler.cache.find(again)
    assert (len(hit.page_ids), hit.num_draft_pages) == (4, 0)
