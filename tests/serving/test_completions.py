"""One completion at the door: whatever ends it, its turn and its replica are given back."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from serve_spec.core.errors import InvalidRequest
from serve_spec.core.request import FinishReason
from serve_spec.serving.admission import Admission
from serve_spec.serving.answers import CompletionFormat
from serve_spec.serving.completions import CompletionRunner, stream_frames, whole_answer
from serve_spec.serving.errors import ApiError, no_replica
from serve_spec.serving.messages import Accepted, Failed, Refused
from tests.serving.fake_engine import FakeLoop
from tests.serving.fakes import LoopFleet, ScriptedFleet, delta, request

ACCEPTED = Accepted(2, "here")
FORM = CompletionFormat("cmpl-1", "m", 0, include_usage=True)


def runner(fleet: Any, door: Admission, timeout_s: float = 3600) -> CompletionRunner:
    return CompletionRunner(fleet, door, timeout_s=timeout_s, resume_timeout_s=0)


def open_door() -> Admission:
    return Admission(max_in_flight=4, max_queued=4)


async def frames(fleet: Any, prompt: str = "a b", timeout_s: float = 3600, **params: Any) -> Any:
    """Every frame of a stream, decoded; and that nothing is left behind."""
    door = open_door()
    async with runner(fleet, door, timeout_s).run(request(prompt, **params)) as completion:
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


def test_without_stream_the_pieces_are_one_text() -> None:
    async def scenario() -> Any:
        fleet = LoopFleet(FakeLoop())
        async with runner(fleet, open_door()).run(request("a b c", max_tokens=5)) as completion:
            return await whole_answer(completion, FORM)

    answer = asyncio.run(scenario())
    assert answer["choices"][0]["text"] == "a b c a b "
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 8


@pytest.mark.parametrize(
    ("items", "status", "param"),
    [
        ([Refused(InvalidRequest("top_k", 3, "no"))], 400, "top_k"),
        ([Refused(InvalidRequest("prompt", "x", "no", too_long=True))], 413, "prompt"),
        ([Failed("boom")], 500, None),
        ([Failed("boom", overloaded=True)], 429, None),
        ([ACCEPTED, Failed("boom")], 500, None),
        ([no_replica("gone")], 503, None),
        ([ACCEPTED, no_replica("gone")], 503, None),
        ([], 500, None),
        ([ACCEPTED], 500, None),
    ],
    ids=str,
)
def test_what_fails_before_the_first_token_sets_the_status(
    items: list[Any], status: int, param: str | None
) -> None:
    async def scenario() -> None:
        fleet, door = ScriptedFleet(items), open_door()
        with pytest.raises(ApiError) as caught:
            async with runner(fleet, door).run(request()):
                pytest.fail("there is no first token")
        assert (caught.value.status, caught.value.param) == (status, param)
        assert (fleet.num_open, door.in_flight) == (0, 0)

    asyncio.run(scenario())


@pytest.mark.parametrize("end", [Failed("boom"), no_replica("gone"), None], ids=str)
def test_what_fails_on_every_replica_is_an_error_frame_and_no_done(end: Any) -> None:
    items = [ACCEPTED, delta("a", 1), *([end] if end else [])]
    *rounds, last = asyncio.run(frames(ScriptedFleet(items)))
    assert [r["choices"][0]["text"] for r in rounds] == ["a"] * 3, "one of each replica"
    assert list(last) == ["error"]
    assert set(last["error"]) == {"message", "type", "param", "code"}


def test_a_deadline_that_passes_at_the_door_is_a_408() -> None:
    async def scenario() -> None:
        door = Admission(max_in_flight=1, max_queued=4)
        async with door.slot(asyncio.get_running_loop().time() + 3600):
            late = runner(LoopFleet(FakeLoop()), door, 0).run(request())
            with pytest.raises(ApiError, match="request_timeout_s=0") as caught:
                await late.__aenter__()
            assert caught.value.status == 408
            assert door.in_flight == 1

    asyncio.run(scenario())


def test_a_deadline_in_the_middle_is_an_error_frame_and_ends_the_request() -> None:
    loop = FakeLoop()
    chunks = asyncio.run(frames(LoopFleet(loop), "hold on", timeout_s=0.05, max_tokens=9))
    assert chunks[-1]["error"]["code"] == "request_timeout"
    assert not loop.streams


def test_a_caller_who_leaves_frees_turn_and_engine() -> None:
    async def scenario() -> None:
        loop, door = FakeLoop(), open_door()
        started = asyncio.Event()

        async def listen() -> None:
            listening = runner(LoopFleet(loop), door).run(request("hold on", max_tokens=9))
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

    asyncio.run(scenario())
