"""One answer in the router, whichever replicas fail: nothing is lost, repeated or left behind."""

import asyncio
import copy
import json
from collections import Counter
from contextlib import aclosing
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_spec import metrics
from serve_spec.core.errors import InvalidRequest
from serve_spec.core.request import FinishReason, SamplingParams, TokenDelta
from serve_spec.core.stats import SpeculationStats
from serve_spec.serving.errors import ApiError, ReplicaLost, client_too_slow, no_replica, queue_full
from serve_spec.serving.messages import Accepted, Failed, Refused
from serve_spec.serving.protocols.answers import AnswerHead, CompletionFormat
from serve_spec.serving.protocols.completion_answer import complete_answer, stream_frames
from serve_spec.serving.router import completions
from serve_spec.serving.router.admission import Admission
from serve_spec.serving.router.resume import resumed
from tests.serving.fake_engine import FakeLoop
from tests.serving.fakes import (
    FAR_S,
    FailingChoices,
    FailingFleet,
    LoopFleet,
    ScriptedFleet,
    Takes,
    delta,
    request,
    settle,
)


class CountingFleet(FailingFleet):
    """Every delta has the counts of speculation of its replica so far."""

    def __init__(self, *endings, forced):
        super().__init__(*endings)
        self.forced = forced

    async def generate(self, asked):
        counts = SpeculationStats(synthetic_acceptance=self.forced)
        async with aclosing(super().generate(asked)) as items:
            async for item in items:
                if isinstance(item, TokenDelta):
                    counts.observe(2 + len(self.requests), len(item.token_ids) - 1)
                    item = item._replace(speculation=copy.deepcopy(counts))
                yield item


def listen(fleet, asked, resume_timeout_s=FAR_S):
    """Return what a caller receives: what was accepted, and the deltas."""

    async def scenario():
        return [item async for item in resumed(fleet, asked, resume_timeout_s)]

    received = asyncio.run(scenario())
    accepted = [item for item in received if isinstance(item, Accepted)]
    return SimpleNamespace(accepted=accepted, deltas=received[len(accepted) :])


def content_of(answer):
    tokens = [token for d in answer.deltas for token in d.token_ids]
    return "".join(d.text for d in answer.deltas), tokens, answer.deltas[-1].finish_reason


ENDINGS = st.tuples(
    st.lists(st.integers(0, 12).map(Takes), max_size=2),
    st.lists(st.integers(0, 12), max_size=1),
    st.lists(st.integers(0, 12).map(Takes), max_size=2),
).map(lambda parts: [ending for part in parts for ending in part])
"""At most one replica fails; any number of times the router takes the request back."""


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 2**63),
    max_tokens=st.integers(1, 24),
    endings=ENDINGS,
    stop=st.lists(st.text("ab é", min_size=1, max_size=4), max_size=2),
    include_stop_str_in_output=st.booleans(),
    ignore_eos=st.booleans(),
    stop_token_ids=st.lists(st.sampled_from(list(b"ab ")), max_size=1),
)
def test_wherever_it_is_lost_or_taken_back_the_answer_is_that_of_one_replica_that_does_not_fail(
    endings, **params
):
    whole = listen(FailingFleet(), request("the prompt", **params))
    fleet = FailingFleet(*endings)
    broken = listen(fleet, request("the prompt", **params))
    assert content_of(broken) == content_of(whole)
    assert [a.num_prompt_tokens for a in broken.accepted] == [10]
    assert broken.deltas[-1].speculation is not None


@settings(deadline=None, max_examples=60)
@given(endings=ENDINGS, max_tokens=st.integers(1, 40), forced=st.booleans())
def test_speculation_is_added_up_and_forced_acceptance_labelled_over_all_replicas(
    endings, max_tokens, forced
):
    fleet = CountingFleet(*endings, forced=forced)
    answer = listen(fleet, request("x", seed=1, max_tokens=max_tokens, ignore_eos=True))
    counts = answer.deltas[-1].speculation
    assert counts.num_rounds == len(answer.deltas)
    assert counts.num_correct_drafts == max_tokens - len(answer.deltas)
    assert sum(counts.rounds_by_num_steps.values()) == counts.num_rounds
    drafts = sum(steps * rounds for steps, rounds in counts.rounds_by_num_steps.items())
    assert counts.num_draft_tokens == drafts
    used = endings[: len(fleet.requests) - 1]
    num_resumes = sum(not isinstance(ending, Takes) and ending > 0 for ending in used)
    assert counts.as_dict()["num_resumes"] == num_resumes
    assert counts.as_dict().get("synthetic_acceptance", False) is forced


def test_a_request_without_a_seed_gets_one_that_all_its_replicas_share():
    fleet = FailingFleet(3, Takes(3))
    listen(fleet, request("x", max_tokens=30, ignore_eos=True))
    seeds = {asked.params.seed for asked in fleet.requests}
    assert len(fleet.requests) == 3
    assert len(seeds) == 1
    assert None not in seeds
    other = FailingFleet()
    listen(other, request("x"))
    assert other.requests[0].params.seed not in seeds, "a fresh one for every request"


def test_replicas_that_lost_it_are_to_be_avoided_and_no_attempt_has_another_s_id():
    fleet = FailingFleet(Failed("boom", replica="sick"), Takes(2))
    listen(fleet, request("x", seed=1, max_tokens=30, ignore_eos=True))
    assert [asked.avoid for asked in fleet.requests] == [set(), {"sick"}, {"sick"}]
    assert [asked.is_resumption for asked in fleet.requests] == [False, True, False]
    assert len({asked.request_id for asked in fleet.requests}) == 3


SHUT_DOWN = ReplicaLost(no_replica("shutting down"), is_orderly=True)


@pytest.mark.parametrize("endings", [[3], [Takes(3)], [SHUT_DOWN] * 5], ids=str)
def test_what_has_begun_waits_for_a_replica_that_has_room(endings):
    """However often the ones before were shut down."""
    full = no_replica("none"), queue_full("full", 1), Failed("full", True)
    asked = request("x", seed=1, max_tokens=30, ignore_eos=True)
    whole = content_of(listen(FailingFleet(), asked))
    assert content_of(listen(FailingFleet(*endings, *full), asked)) == whole


def test_when_no_replica_takes_it_in_time_the_error_names_the_cause():
    fleet = FailingFleet(3, *[no_replica("none is running")] * 3)
    asked = request("x", seed=1, max_tokens=30, ignore_eos=True)
    with pytest.raises(ApiError, match="none is running"):
        listen(fleet, asked, resume_timeout_s=0)
    assert len(fleet.requests) == 2


@pytest.mark.parametrize("ending", [0, 3])
def test_a_request_that_has_lost_two_replicas_is_not_given_to_a_third(ending):
    fleet = FailingFleet(*[ending] * 9)
    with pytest.raises(ApiError, match="not retried") as caught:
        listen(fleet, request("x", seed=1, max_tokens=90, ignore_eos=True))
    assert caught.value.status == 500
    assert len(fleet.requests) == 2


def test_what_no_replica_could_answer_is_not_given_to_another():
    fleet = FailingFleet(Failed("NaN logits", replica="r1", is_final=True))
    (failed,) = listen(fleet, request()).deltas
    assert failed.message == "NaN logits"
    assert len(fleet.requests) == 1


@pytest.mark.parametrize("error", [no_replica("none"), queue_full("full", 1)], ids=str)
def test_what_nobody_took_yet_is_refused_at_once(error):
    fleet = FailingFleet(error)
    with pytest.raises(ApiError) as caught:
        listen(fleet, request())
    assert caught.value is error
    assert len(fleet.requests) == 1


def test_an_engine_that_shuts_down_has_not_finished_the_answer():
    aborted = delta("", finish=FinishReason.ABORT)
    fleet = ScriptedFleet([Accepted(1, "r1"), delta("a", 1), aborted])
    fleet.next = [no_replica("none is running")]
    with pytest.raises(ApiError, match="none is running"):
        listen(fleet, request(), resume_timeout_s=0)


def test_a_client_that_does_not_read_is_no_failure_of_its_replica():
    fleet = ScriptedFleet([Accepted(1, "r1"), delta("a", 1), client_too_slow(4096)])
    fleet.next = [Accepted(1, "r2"), delta("b", 2, finish=FinishReason.STOP)]
    with pytest.raises(ApiError) as caught:
        listen(fleet, request())
    assert caught.value.code == "client_too_slow"


ACCEPTED = Accepted(2, "here")
HEAD = AnswerHead("cmpl-1", "m", 0, "fp_1", include_usage=True)
FORM = CompletionFormat(HEAD)


def runner(fleet, admission, timeout_s=3600):
    return completions.CompletionRunner(fleet, admission, timeout_s=timeout_s, resume_timeout_s=0)


def open_door():
    return Admission(max_in_flight=4, max_queued=4)


async def frames(fleet, asked, num_prompts=1, timeout_s=3600):
    """Every frame of a stream, decoded; and that nothing is left behind."""
    admission = open_door()
    async with runner(fleet, admission, timeout_s).run(asked, num_prompts) as answer:
        sent = b"".join([frame async for frame in stream_frames(answer, FORM, "trace")])
    assert admission.in_flight == 0
    return [decoded(line) for line in sent.split(b"\n\n") if line]


def decoded(line):
    payload = line.decode().removeprefix("data: ").strip()
    return payload if payload == "[DONE]" else json.loads(payload)


async def test_a_round_that_completes_no_text_sends_nothing_but_counts():
    items = [ACCEPTED, delta("", 1, 2), delta("é", 3), delta("", 4, finish=FinishReason.STOP)]
    first, last, usage, done = await frames(ScriptedFleet(items), [request()])
    assert first["choices"][0]["text"] == "é"
    assert last["choices"][0]["finish_reason"] == "stop"
    assert usage["usage"]["completion_tokens"] == 4
    assert done == "[DONE]"


@pytest.mark.parametrize(
    ("items", "status", "param"),
    [
        ([Refused(InvalidRequest("top_k", 3, "no"))], 400, "top_k"),
        ([Refused(InvalidRequest("prompt", "x", "no", too_long=True))], 413, "prompt"),
        ([Failed("boom")], 500, None),
        ([ACCEPTED, Failed("boom", is_final=True)], 500, None),
        ([Failed("boom", overloaded=True)], 429, None),
        ([ACCEPTED, Failed("boom")], 500, None),
        ([no_replica("gone")], 503, None),
        ([ACCEPTED, no_replica("gone")], 500, None),
        ([], 500, None),
        ([ACCEPTED], 500, None),
    ],
    ids=str,
)
async def test_what_fails_before_the_first_token_sets_the_status(items, status, param):
    fleet, admission = ScriptedFleet(items), open_door()
    with pytest.raises(ApiError) as caught:
        async with runner(fleet, admission).run([request()]):
            pytest.fail("there is no first token")
    assert (caught.value.status, caught.value.param) == (status, param)
    assert (fleet.num_open, admission.in_flight) == (0, 0)


@pytest.mark.parametrize(
    ("end", "num_rounds"),
    [(Failed("boom"), 2), (no_replica("gone"), 2), (None, 2), (ZeroDivisionError("boom"), 1)],
    ids=repr,
)
async def test_what_fails_on_every_replica_is_an_error_frame_and_no_done(end, num_rounds):
    items = [ACCEPTED, delta("a", 1), *([end] if end else [])]
    *rounds, last = await frames(ScriptedFleet(items), [request()])
    assert [r["choices"][0]["text"] for r in rounds] == ["a"] * num_rounds, "one of each replica"
    assert list(last) == ["error"]
    assert set(last["error"]) == {"message", "type", "param", "code"}


async def test_a_deadline_that_passes_at_the_door_is_a_408():
    admission = Admission(max_in_flight=1, max_queued=4)
    async with admission.slot(asyncio.get_running_loop().time() + 3600):
        late = runner(LoopFleet(FakeLoop()), admission, 0).run([request()])
        with pytest.raises(ApiError, match="request_timeout_s=0") as caught:
            await late.__aenter__()
        assert caught.value.status == 408
        assert (admission.in_flight, admission.queue_len) == (1, 0)


def several(n, prompts=("a b c",), **params):
    return completions.choices_of("cmpl-1", "trace", prompts, SamplingParams(**params), n)


async def choose(fleet, asked, num_prompts=1):
    """The whole answer; and that nothing is left behind."""
    admission = open_door()
    async with runner(fleet, admission).run(asked, num_prompts) as answer:
        whole = await complete_answer(answer, FORM)
    assert admission.in_flight == 0
    return whole


def test_of_a_prompt_that_several_choices_share_what_one_had_to_compute_was_not_cached():
    class FleetWithCaches(ScriptedFleet):
        async def generate(self, request):
            choice = int(request.request_id.split("-")[-2])
            yield ACCEPTED
            yield delta("a", 1)._replace(num_cached_tokens=(0, 16, 16, 24)[choice])
            yield delta("b", 2, finish=FinishReason.LENGTH)

    answer = asyncio.run(choose(FleetWithCaches(()), several(2, ("a", "b")), num_prompts=2))
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0 + 16}


@pytest.mark.parametrize("is_whole", [True, False])
async def test_sizes_are_of_choices_and_of_prompts_that_are_answered_whole(is_whole):
    class FleetOfSizes(ScriptedFleet):
        async def generate(self, request):
            choice = int(request.request_id.split("-")[-2])
            yield ACCEPTED
            yield delta("a", *range(choice + 1))
            yield delta("b", 9, finish=FinishReason.LENGTH)

    seen = []
    running = replace(runner(FleetOfSizes(()), open_door()), record=seen.append)
    async with running.run(several(2, ("a", "b"), max_tokens=7), 2) as answer:
        if is_whole:
            await complete_answer(answer, FORM)
    sizes = Counter()
    for reading in seen:
        if reading.metric in metrics.SIZES:
            name = reading.metric.name.removeprefix("serve_spec_request_")
            sizes[name, reading.value] += reading.count
    assert sizes == ({
        ("prompt_tokens", 2): 4, ("generation_tokens", 2): 1, ("generation_tokens", 3): 1,
        ("generation_tokens", 4): 1, ("generation_tokens", 5): 1, ("params_max_tokens", 7): 4,
        ("max_num_generation_tokens", 3): 1, ("max_num_generation_tokens", 5): 1,
        ("params_n", 2): 2,
    } if is_whole else {})  # fmt: skip


SAMPLED = {"max_tokens": 24, "ignore_eos": True}


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(-(2**63), 2**63 - 1), n=st.integers(1, 4), ending=st.integers(0, 9))
def test_a_seeded_choice_is_the_same_for_every_n_and_any_lost_replica(seed, n, ending):
    def texts_of(ending, asked):
        choices = asyncio.run(choose(FailingChoices(ending), asked))["choices"]
        return [(choice["text"], choice["finish_reason"]) for choice in choices]

    whole = texts_of(FAR_S, several(4, seed=seed, **SAMPLED))
    assert len(set(whole)) == 4
    assert {reason for _, reason in whole} == {"length"}
    assert texts_of(FAR_S, [request("a b c", seed=seed, **SAMPLED)]) == whole[:1]
    assert texts_of(ending, several(n, seed=seed, **SAMPLED)) == whole[:n]


async def test_more_choices_than_turns_take_turns():
    """And the first of them is received before the last has begun."""
    loop, admission = FakeLoop(), Admission(max_in_flight=1, max_queued=4)
    asked = several(3, max_tokens=4)
    async with runner(LoopFleet(loop), admission).run(asked) as answer:
        assert admission.queue_len > 0
        whole = await complete_answer(answer, FORM)
    assert [choice["text"] for choice in whole["choices"]] == ["a b c a "] * 3
    assert (admission.in_flight, admission.queue_len) == (0, 0)


@pytest.mark.parametrize(
    ("prompts", "status", "param"),
    [(("hold on", "fail"), 500, None), (("hold on", "a " * 100), 413, "prompt")],
)
async def test_one_choice_that_fails_at_once_is_the_answer_to_all(prompts, status, param):
    loop, admission = FakeLoop(), open_door()
    with pytest.raises(ApiError) as caught:
        async with runner(LoopFleet(loop), admission).run(several(1, prompts, max_tokens=9), 2):
            pytest.fail("one of them has no first token")
    assert (caught.value.status, caught.value.param) == (status, param)
    assert (len(loop.streams), admission.in_flight) == (0, 0)


@pytest.mark.parametrize(
    ("prompts", "code"),
    [(("hold on", "break"), "replicas_lost"), (("hold on",) * 2, "request_timeout")],
)
async def test_one_choice_that_breaks_off_or_comes_too_late_ends_the_stream_with_one_error(
    prompts, code
):
    loop = FakeLoop()
    timeout_s = 0.05 if code == "request_timeout" else 3600
    lines = await frames(LoopFleet(loop), several(1, prompts, max_tokens=9), 2, timeout_s)
    assert not loop.streams
    assert [line["error"]["code"] for line in lines if "error" in line] == [code]
    assert "error" in lines[-1]


async def test_a_caller_who_leaves_ends_all_choices():
    loop, admission = FakeLoop(), open_door()
    started = asyncio.Event()

    async def listen():
        asked = several(3, ("hold on",), max_tokens=9)
        async with runner(LoopFleet(loop), admission).run(asked) as answer:
            started.set()
            async for _ in answer.deltas():
                pass

    task = asyncio.create_task(listen())
    await started.wait()
    assert (admission.in_flight, len(loop.streams)) == (3, 3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (admission.in_flight, len(loop.streams)) == (0, 0)


SEEDS = st.integers(-(2**63), 2**63 - 1)


@given(SEEDS, st.integers(1, 127))
def test_the_first_choice_has_the_requests_own_seed_and_the_others_have_others(seed, index):
    assert completions.choice_seed(seed, 0) == seed
    assert 0 <= completions.choice_seed(seed, index) < 2**63
    assert len({completions.choice_seed(seed, i) for i in range(index + 1)}) == index + 1


def test_derived_seeds_never_change():
    """A client repeats a request with the seed that it noted."""
    assert completions.choice_seed(7, 1) == 2114375518687650719


def test_choices_of_a_prompt_are_neighbours_and_the_same_as_if_it_came_alone():
    both = completions.choices_of("cmpl-1", "t", ["a", [1, 2]], SamplingParams(seed=3, top_k=5), 2)
    assert [c.request_id for c in both] == [f"cmpl-1-{i}" for i in range(4)]
    assert [c.prompt for c in both] == ["a", "a", [1, 2], [1, 2]]
    alone = completions.choices_of("cmpl-2", "t", [[1, 2]], SamplingParams(seed=3, top_k=5), 2)
    assert [c.params for c in both[2:]] == [c.params for c in alone]
    unseeded = completions.choices_of("cmpl-1", "t", ["a"], SamplingParams(), 3)
    assert [c.params.seed for c in unseeded] == [None] * 3, "each replica draws one"


async def test_what_a_reader_of_several_choices_does_not_take_stays_in_their_streams():
    taken = [0, 0]

    async def stream(index):
        for item in range(100):
            taken[index] += 1
            yield index, item

    async with aclosing(completions.interleaved([stream(0), stream(1)])) as items:
        await anext(items)
        await settle()
        assert sum(taken) <= 6
        rest = [item async for item in items]
    assert len(rest) == 199
    assert [item for index, item in rest if index == 1][-1] == 99


async def items(*given):
    for item in given:
        yield item
    await asyncio.Event().wait()


def at(delay_s):
    return completions.Deadline(asyncio.get_running_loop().time() + delay_s)


async def test_a_wait_that_is_too_long_ends_and_so_does_every_later_one_until_it_is_closed():
    deadline = at(0.01)
    source = items(1)
    assert await deadline.next(source) == 1
    for _ in range(2):
        with pytest.raises(TimeoutError):
            await deadline.next(source)
    assert asyncio.current_task().cancelling() == 0, "the task goes on"
    closed = at(0.01)
    closed.close()
    waiting = asyncio.create_task(closed.next(items()))
    await asyncio.sleep(0.03)
    assert not waiting.done()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
