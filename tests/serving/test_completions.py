"""One answer in the router: whatever ends it, its turns and its replicas are given back."""

import asyncio
import json
from contextlib import aclosing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_spec.core.errors import InvalidRequest
from serve_spec.core.request import FinishReason, SamplingParams
from serve_spec.serving import completions
from serve_spec.serving.admission import Admission
from serve_spec.serving.answers import AnswerHead, CompletionFormat
from serve_spec.serving.errors import ApiError, no_replica
from serve_spec.serving.messages import Accepted, Failed, Refused
from tests.serving.fake_engine import FakeLoop
from tests.serving.fakes import (
    FAR_S,
    FleetOfMortals,
    LoopFleet,
    ScriptedFleet,
    delta,
    request,
    settle,
)

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
        sent = b"".join([frame async for frame in completions.stream_frames(answer, FORM, "trace")])
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
    ("end", "num_said"),
    [(Failed("boom"), 2), (no_replica("gone"), 2), (None, 2), (ZeroDivisionError("boom"), 1)],
    ids=repr,
)
async def test_what_fails_on_every_replica_is_an_error_frame_and_no_done(end, num_said):
    items = [ACCEPTED, delta("a", 1), *([end] if end else [])]
    *rounds, last = await frames(ScriptedFleet(items), [request()])
    assert [r["choices"][0]["text"] for r in rounds] == ["a"] * num_said, "one of each replica"
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
        whole = await completions.whole_answer(answer, FORM)
    assert admission.in_flight == 0
    return whole


def test_of_a_prompt_that_several_choices_share_what_one_had_to_compute_was_not_cached():
    class FleetWithCaches(ScriptedFleet):
        async def generate(self, request):
            choice = int(request.request_id.split("-")[-2])
            yield ACCEPTED
            yield delta("a", 1)._replace(num_cached_tokens=(0, 16, 16, 24)[choice])
            yield delta("b", 2, finish=FinishReason.LENGTH)

    said = asyncio.run(choose(FleetWithCaches(()), several(2, ("a", "b")), num_prompts=2))
    assert said["usage"]["prompt_tokens_details"] == {"cached_tokens": 0 + 16}


LAWFUL = {"max_tokens": 24, "ignore_eos": True}


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(-(2**63), 2**63 - 1), n=st.integers(1, 4), lives=st.integers(0, 9))
def test_a_seeded_choice_says_the_same_whatever_n_is_and_whoever_dies(seed, n, lives):
    def said(life, asked):
        choices = asyncio.run(choose(FleetOfMortals(life), asked))["choices"]
        return [(choice["text"], choice["finish_reason"]) for choice in choices]

    whole = said(FAR_S, several(4, seed=seed, **LAWFUL))
    assert len(set(whole)) == 4
    assert {reason for _, reason in whole} == {"length"}
    assert said(FAR_S, [request("a b c", seed=seed, **LAWFUL)]) == whole[:1]
    assert said(lives, several(n, seed=seed, **LAWFUL)) == whole[:n]


async def test_more_choices_than_turns_take_turns():
    """And the first of them is heard before the last has begun."""
    loop, admission = FakeLoop(), Admission(max_in_flight=1, max_queued=4)
    asked = several(3, max_tokens=4)
    async with runner(LoopFleet(loop), admission).run(asked) as answer:
        assert admission.queue_len > 0
        whole = await completions.whole_answer(answer, FORM)
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


async def test_a_wait_that_is_too_long_ends_and_so_does_every_later_one():
    deadline = at(0.01)
    source = items(1)
    assert await deadline.next(source) == 1
    for _ in range(2):
        with pytest.raises(TimeoutError):
            await deadline.next(source)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0, "the task goes on"
