"""One answer at the door: whatever ends it, its turns and its replicas are given back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_spec.core.errors import InvalidRequest
from serve_spec.core.logprobs import TokenLogprob
from serve_spec.core.request import FinishReason, SamplingParams
from serve_spec.engine.spelling import Spelling
from serve_spec.serving.admission import Admission
from serve_spec.serving.answers import AnswerHead, ChatFormat, CompletionFormat, Usage
from serve_spec.serving.batching import Batcher
from serve_spec.serving.choices import choices_of
from serve_spec.serving.completions import CompletionRunner, stream_frames, whole_answer
from serve_spec.serving.errors import ApiError, no_replica
from serve_spec.serving.messages import (
    Accepted,
    Cancellation,
    Failed,
    GenerateRequest,
    Items,
    Refused,
    ReplicaItem,
    Submission,
)
from tests.serving.fake_engine import FakeLoop
from tests.serving.fakes import FleetOfMortals, LoopFleet, ScriptedFleet, delta, request

ACCEPTED = Accepted(2, "here")
HEAD = AnswerHead("cmpl-1", "m", 0, "fp_1", include_usage=True)
FORM = CompletionFormat(HEAD)


def runner(fleet: Any, door: Admission, timeout_s: float = 3600) -> CompletionRunner:
    return CompletionRunner(fleet, door, timeout_s=timeout_s, resume_timeout_s=0)


def open_door() -> Admission:
    return Admission(max_in_flight=4, max_queued=4)


async def frames(fleet: Any, prompt: str = "a b", timeout_s: float = 3600, **params: Any) -> Any:
    """Every frame of a stream, decoded; and that nothing is left behind."""
    door = open_door()
    async with runner(fleet, door, timeout_s).run([request(prompt, **params)]) as completion:
        lines = [f async for f in stream_frames(completion, FORM, "trace")]
    assert door.in_flight == 0
    return [decoded(line) for line in lines]


def decoded(line: bytes) -> Any:
    payload = line.decode().removeprefix("data: ").strip()
    return payload if payload == "[DONE]" else json.loads(payload)


def test_a_stream_is_a_chunk_per_round_then_usage_then_done() -> None:
    chunks = asyncio.run(frames(LoopFleet(FakeLoop()), "a b c", max_tokens=5))
    *rounds, last, done = chunks
    assert [r["choices"][0]["text"] for r in rounds] == ["a b ", "c a ", "b "]
    assert [r["choices"][0]["finish_reason"] for r in rounds] == [None, None, "length"]
    assert last["usage"]["completion_tokens"] == 5
    assert last["usage"]["prompt_tokens"] == 3
    assert last["usage"]["speculation"]["num_rounds"] == 3
    assert done == "[DONE]"


def test_a_round_that_completes_no_text_sends_nothing_but_counts() -> None:
    items = [ACCEPTED, delta("", 1, 2), delta("é", 3), delta("", 4, finish=FinishReason.STOP)]
    first, last, usage, done = asyncio.run(frames(ScriptedFleet(items)))
    assert first["choices"][0]["text"] == "é"
    assert last["choices"][0]["finish_reason"] == "stop"
    assert usage["usage"]["completion_tokens"] == 4
    assert done == "[DONE]"


async def test_a_round_that_completes_no_text_still_sends_its_log_probabilities() -> None:
    entries = [TokenLogprob(token, -1.0, 1) for token in (0xC3, 0xA9)]
    half = delta("", 0xC3)._replace(logprobs=(entries[0],))
    whole = delta("é", 0xA9, finish=FinishReason.LENGTH)._replace(logprobs=(entries[1],))
    form = CompletionFormat(HEAD, spell=lambda token: Spelling(bytes([token])))
    items: list[Any] = [ACCEPTED, half, whole]
    async with runner(ScriptedFleet(items), open_door()).run([request()]) as answer:
        first, last, *_ = [decoded(f) async for f in stream_frames(answer, form, "trace")]
    shown = [chunk["choices"][0]["logprobs"]["tokens"] for chunk in (first, last)]
    assert shown == [["bytes:\\xc3"], ["bytes:\\xa9"]]
    assert [chunk["choices"][0]["text"] for chunk in (first, last)] == ["", "é"]


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
async def test_what_fails_before_the_first_token_sets_the_status(
    items: list[Any], status: int, param: str | None
) -> None:
    fleet, door = ScriptedFleet(items), open_door()
    with pytest.raises(ApiError) as caught:
        async with runner(fleet, door).run([request()]):
            pytest.fail("there is no first token")
    assert (caught.value.status, caught.value.param) == (status, param)
    assert (fleet.num_open, door.in_flight) == (0, 0)


def test_a_defect_in_the_middle_is_an_error_frame_too() -> None:
    items = [ACCEPTED, delta("a", 1), ZeroDivisionError("boom")]
    said, last = asyncio.run(frames(ScriptedFleet(items)))
    assert said["choices"][0]["text"] == "a"
    assert last["error"]["type"] == "server_error"
    assert "ZeroDivisionError" in last["error"]["message"]


@pytest.mark.parametrize("end", [Failed("boom"), no_replica("gone"), None], ids=str)
def test_what_fails_on_every_replica_is_an_error_frame_and_no_done(end: Any) -> None:
    items = [ACCEPTED, delta("a", 1), *([end] if end else [])]
    *rounds, last = asyncio.run(frames(ScriptedFleet(items)))
    assert [r["choices"][0]["text"] for r in rounds] == ["a"] * 2, "one of each replica"
    assert list(last) == ["error"]
    assert set(last["error"]) == {"message", "type", "param", "code"}


async def test_a_deadline_that_passes_at_the_door_is_a_408() -> None:
    door = Admission(max_in_flight=1, max_queued=4)
    async with door.slot(asyncio.get_running_loop().time() + 3600):
        late = runner(LoopFleet(FakeLoop()), door, 0).run([request()])
        with pytest.raises(ApiError, match="request_timeout_s=0") as caught:
            await late.__aenter__()
        assert caught.value.status == 408
        assert door.in_flight == 1


def test_a_deadline_in_the_middle_is_an_error_frame_and_ends_the_request() -> None:
    loop = FakeLoop()
    chunks = asyncio.run(frames(LoopFleet(loop), "hold on", timeout_s=0.05, max_tokens=9))
    assert chunks[-1]["error"]["code"] == "request_timeout"
    assert not loop.streams


async def test_a_caller_who_leaves_frees_turn_and_engine() -> None:
    loop, door = FakeLoop(), open_door()
    started = asyncio.Event()

    async def listen() -> None:
        listening = runner(LoopFleet(loop), door).run([request("hold on", max_tokens=9)])
        async with listening as completion:
            async for _ in completion.deltas():
                started.set()

    task = asyncio.create_task(listen())
    await started.wait()
    assert (door.in_flight, len(loop.streams)) == (1, 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (door.in_flight, len(loop.streams)) == (0, 0)


class Choices:
    """What became of every choice of one answer."""

    def __init__(self, num_choices: int) -> None:
        self.texts = [""] * num_choices
        self.reasons: list[str | None] = [None] * num_choices
        self.usage: Usage | None = None


def several(
    n: int, prompts: tuple[str | list[int], ...] = ("a b c",), **params: Any
) -> list[GenerateRequest]:
    return choices_of("cmpl-1", "trace", prompts, SamplingParams(**params), n)


async def choose(
    fleet: Any, asked: list[GenerateRequest], num_prompts: int = 1, door: Admission | None = None
) -> Choices:
    """Runs choices to their ends; and that nothing is left behind."""
    door = door or open_door()
    said = Choices(len(asked))
    async with runner(fleet, door).run(asked, num_prompts) as answer:
        async for index, delta in answer.deltas():
            said.texts[index] += delta.text
            said.reasons[index] = delta.finish_reason or said.reasons[index]
    said.usage = answer.usage
    assert door.in_flight == 0
    return said


def test_usage_is_summed_over_choices_and_a_prompt_counted_once() -> None:
    loop = FakeLoop()
    asked = several(2, ("a b c", [7, 8]), max_tokens=5)
    said = asyncio.run(choose(LoopFleet(loop), asked, num_prompts=2))
    assert said.texts == ["a b c a b "] * 2 + ["<7> <8> <7> <8> <7> "] * 2
    assert (said.usage["prompt_tokens"], said.usage["completion_tokens"]) == (3 + 2, 4 * 5)
    assert said.usage["speculation"]["num_rounds"] == 4 * 3
    assert said.usage["speculation"]["rounds_by_num_steps"] == {"3": 4 * 3}


def test_of_a_prompt_that_several_choices_share_what_one_had_to_compute_was_not_cached() -> None:
    class FleetWithCaches(ScriptedFleet):
        async def generate(self, request: GenerateRequest) -> AsyncGenerator[ReplicaItem, None]:
            choice = int(request.request_id.split("-")[-2])
            yield ACCEPTED
            yield delta("a", 1)._replace(num_cached_tokens=(0, 16, 16, 24)[choice])
            yield delta("b", 2, finish=FinishReason.LENGTH)

    said = asyncio.run(choose(FleetWithCaches(()), several(2, ("a", "b")), num_prompts=2))
    assert said.usage["prompt_tokens_details"] == {"cached_tokens": 0 + 16}


LAWFUL: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(-(2**63), 2**63 - 1), n=st.integers(1, 4), lives=st.integers(0, 9))
def test_a_seeded_choice_says_the_same_whatever_n_is_and_whoever_dies(
    seed: int, n: int, lives: int
) -> None:
    whole = asyncio.run(choose(FleetOfMortals(), several(4, seed=seed, **LAWFUL)))
    first = asyncio.run(choose(FleetOfMortals(), [request("a b c", seed=seed, **LAWFUL)]))
    assert first.texts == whole.texts[:1]
    assert len(set(whole.texts)) == 4
    fewer = asyncio.run(choose(FleetOfMortals(lives), several(n, seed=seed, **LAWFUL)))
    assert fewer.texts == whole.texts[:n]
    assert set(fewer.reasons) == {"length"}


class Line:
    """A transport that keeps what is sent and never answers."""

    def __init__(self) -> None:
        self.sent: list[Submission] = []

    async def send(self, submission: Submission) -> AsyncGenerator[Items, None]:
        self.sent.append(submission)
        await asyncio.Event().wait()
        yield []

    async def cancel(self, cancellation: Cancellation) -> None:
        pass


async def test_choices_of_one_request_travel_together() -> None:
    line = Line()
    batcher: Any = Batcher(line, "me", batch_wait_s=0, max_batch_size=8)
    task = asyncio.create_task(choose(batcher, several(3)))
    while not line.sent:
        await asyncio.sleep(0)
    (submission,) = line.sent
    assert [r.request_id for r in submission.requests] == [f"cmpl-1-{i}-1" for i in range(3)]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_more_choices_than_turns_take_turns() -> None:
    """And the first of them is heard before the last has begun."""
    loop, door = FakeLoop(), Admission(max_in_flight=1, max_queued=4)
    asked = several(3, max_tokens=4)
    async with runner(LoopFleet(loop), door).run(asked) as answer:
        assert door.queue_len > 0
        whole = await whole_answer(answer, FORM)
    assert [choice["text"] for choice in whole["choices"]] == ["a b c a "] * 3
    assert (door.in_flight, door.queue_len) == (0, 0)


@pytest.mark.parametrize(
    ("prompts", "status", "param"),
    [
        (("hold on", "fail"), 500, None),
        (("hold on", "a " * 100), 413, "prompt"),
    ],
)
async def test_one_choice_that_fails_at_once_is_the_answer_to_all(
    prompts: tuple[str, ...], status: int, param: str | None
) -> None:
    loop, door = FakeLoop(), open_door()
    with pytest.raises(ApiError) as caught:
        async with runner(LoopFleet(loop), door).run(several(1, prompts, max_tokens=9), 2):
            pytest.fail("one of them has no first token")
    assert (caught.value.status, caught.value.param) == (status, param)
    assert (len(loop.streams), door.in_flight) == (0, 0)


async def test_one_choice_that_breaks_off_ends_the_stream_with_one_error() -> None:
    loop, door = FakeLoop(), open_door()
    asked = several(1, ("hold on", "break"), max_tokens=9)
    async with runner(LoopFleet(loop), door).run(asked, 2) as answer:
        lines = [decoded(f) async for f in stream_frames(answer, FORM, "trace")]
    assert (len(loop.streams), door.in_flight) == (0, 0)
    *_, last = lines = lines
    assert list(last) == ["error"]
    assert sum("error" in line for line in lines) == 1


def test_one_deadline_covers_all_choices() -> None:
    async def scenario() -> list[Any]:
        loop = FakeLoop()
        held = runner(LoopFleet(loop), open_door(), 0.05)
        async with held.run(several(1, ("hold on", "hold it"), max_tokens=9), 2) as answer:
            lines = [decoded(f) async for f in stream_frames(answer, FORM, "trace")]
        assert not loop.streams
        return lines

    assert asyncio.run(scenario())[-1]["error"]["code"] == "request_timeout"


async def test_a_caller_who_leaves_ends_all_choices() -> None:
    loop, door = FakeLoop(), open_door()
    started = asyncio.Event()

    async def listen() -> None:
        asked = several(3, ("hold on",), max_tokens=9)
        async with runner(LoopFleet(loop), door).run(asked) as answer:
            started.set()
            async for _ in answer.deltas():
                pass

    task = asyncio.create_task(listen())
    await started.wait()
    assert (door.in_flight, len(loop.streams)) == (3, 3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (door.in_flight, len(loop.streams)) == (0, 0)


async def test_a_chat_stream_gives_every_choice_a_role_then_text_then_a_reason() -> None:
    fleet = LoopFleet(FakeLoop())
    async with runner(fleet, open_door()).run(several(2, max_tokens=3)) as answer:
        *chunks, last, done = [
            decoded(f) async for f in stream_frames(answer, ChatFormat(HEAD), "trace")
        ]
    for index in range(2):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"].get("content", "") for c in mine) == "a b c "
        assert [c["finish_reason"] for c in mine[-2:]] == [None, "length"]
    assert last["usage"]["completion_tokens"] == 6
    assert done == "[DONE]"
