"""Laws of the engine thread: streams, cancellation, failures."""

import asyncio
import itertools
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from serve_spec.config import ServeSpecConfig
from serve_spec.core.errors import EngineOverloaded, InvalidRequest
from serve_spec.core.grammar import Grammar
from serve_spec.core.record import StepRecord
from serve_spec.core.request import FinishReason, SamplingParams, TokenDelta
from serve_spec.engine.client import TokenStream
from tests.helpers.engines import MakeLLM, Pair
from tests.helpers.local_engine import LocalEngine

PROMPT = [10, 20, 30]


@pytest.fixture(scope="module")
def config(pair: Pair) -> ServeSpecConfig:
    settings: dict[str, Any] = {
        "model": {"path": str(pair.target), "device": "cpu", "max_model_len": 128},
        "speculative": {
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": str(pair.heads["EAGLE3"]),
        },
        "cache": {"num_pages": 64},
        "scheduler": {"max_num_seqs": 4, "max_waiting_seqs": 3},
    }
    return ServeSpecConfig.load(settings)


@pytest.fixture
def loop(config: ServeSpecConfig) -> Iterator[LocalEngine]:
    engine_loop = LocalEngine(config)
    yield engine_loop
    engine_loop.shutdown()


async def collect(stream: TokenStream) -> list[TokenDelta]:
    return [delta async for delta in stream]


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 20, "seed": 3, "ignore_eos": True, **changes})


def pages_in_use(loop: LocalEngine) -> int:
    cache = loop.snapshot()["kv"]
    assert isinstance(cache, dict)
    return int(cache["total_pages"] - cache["free_pages"])


def test_streams_that_run_together_say_what_each_says_alone(
    loop: LocalEngine, make_llm: MakeLLM
) -> None:
    async def together() -> list[list[TokenDelta]]:
        streams = [await loop.submit(PROMPT, params(seed=i), str(i)) for i in range(3)]
        return await asyncio.gather(*(collect(stream) for stream in streams))

    alone = make_llm().generate([PROMPT] * 3, [params(seed=i) for i in range(3)])
    for deltas, output in zip(asyncio.run(together()), alone, strict=True):
        assert tuple(t for delta in deltas for t in delta.token_ids) == output.token_ids
        assert "".join(delta.text for delta in deltas) == output.text
        assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
        assert deltas[-1].finish_reason is FinishReason.LENGTH
        assert deltas[-1].speculation is not None


def test_a_cancelled_request_frees_its_pages_and_disturbs_nobody(
    loop: LocalEngine, make_llm: MakeLLM
) -> None:
    async def scenario() -> tuple[list[TokenDelta], list[TokenDelta]]:
        staying = await loop.submit(PROMPT, params(max_tokens=60), "staying")
        leaving = await loop.submit(PROMPT, params(max_tokens=100, seed=9), "leaving")
        first = await anext(aiter(leaving))
        loop.cancel("leaving")
        loop.cancel("leaving")
        rest = await collect(leaving)
        return await collect(staying), [first, *rest]

    stayed, left = asyncio.run(scenario())
    alone = make_llm().generate([PROMPT], params(max_tokens=60))[0]
    assert tuple(t for delta in stayed for t in delta.token_ids) == alone.token_ids
    assert left[-1].finish_reason is FinishReason.ABORT
    assert pages_in_use(loop) == 0


@pytest.mark.parametrize(
    ("prompt", "changes", "field", "too_long"),
    [
        ([], {}, "prompt", False),
        ("", {}, "prompt", False),
        ("a\ud800", {}, "prompt", False),
        ([-1], {}, "prompt", False),
        ([10**6], {}, "prompt", False),
        ([1] * 128, {}, "prompt", True),
        ([1] * 100, {"max_tokens": 29}, "max_tokens", False),
    ],
)
def test_a_request_that_can_not_run_is_refused_by_field_and_reaches_no_round(
    loop: LocalEngine, prompt: Any, changes: dict[str, Any], field: str, too_long: bool
) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        asyncio.run(loop.submit(prompt, params(**changes), "x"))
    assert (refusal.value.field, refusal.value.too_long) == (field, too_long)
    assert not loop.engine.has_work


def test_a_full_engine_refuses_instead_of_growing(loop: LocalEngine) -> None:
    """Four may run and three wait: the eighth unfinished request is one too many."""

    async def scenario() -> None:
        streams = [await loop.submit(PROMPT, params(max_tokens=100), str(i)) for i in range(7)]
        with pytest.raises(EngineOverloaded, match="7 requests are unfinished"):
            await loop.submit(PROMPT, params(), "one too many")
        for stream in streams:
            loop.cancel(stream.request_id)
            await collect(stream)
        await collect(await loop.submit(PROMPT, params(), "room again"))

    asyncio.run(scenario())
    assert pages_in_use(loop) == 0


def test_an_id_in_use_is_refused_and_its_owner_unharmed(loop: LocalEngine) -> None:
    async def scenario() -> list[TokenDelta]:
        stream = await loop.submit(PROMPT, params(), "same")
        with pytest.raises(InvalidRequest, match="request_id"):
            await loop.submit(PROMPT, params(), "same")
        return await collect(stream)

    assert asyncio.run(scenario())[-1].finish_reason is FinishReason.LENGTH


def test_a_dead_engine_tells_every_stream_and_the_health_check(
    config: ServeSpecConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = LocalEngine(config)

    def explode(plan: object) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(loop.engine.worker, "submit", explode)

    async def scenario() -> None:
        stream = await loop.submit(PROMPT, params(), "1")
        with pytest.raises(RuntimeError, match="device lost"):
            await collect(stream)
        with pytest.raises(RuntimeError, match="device lost"):
            loop.check_health()
        with pytest.raises(RuntimeError, match="device lost"):
            await loop.submit(PROMPT, params(), "2")

    asyncio.run(scenario())
    loop.shutdown()


def test_policy_knobs_change_between_rounds_or_not_at_all(loop: LocalEngine) -> None:
    before = loop.snapshot()
    with pytest.raises(ValueError, match="speculative_num_step"):
        loop.reconfigure({"speculative_num_step": 3})
    assert loop.snapshot()["strategy"] == before["strategy"]
    loop.reconfigure({"speculative_adaptive_strategy": "static", "speculative_num_steps": 1})
    assert loop.snapshot()["strategy"] == "static"


def test_after_the_end_nothing_is_accepted_and_nothing_hangs(config: ServeSpecConfig) -> None:
    loop = LocalEngine(config)
    loop.shutdown()
    for call in (
        lambda: asyncio.run(loop.submit(PROMPT, params(), "1")),
        lambda: loop.reconfigure({"min_dwell_rounds": 4}),
        loop.check_health,
    ):
        with pytest.raises(RuntimeError, match="has been shut down"):
            call()


def test_shutting_down_ends_open_streams(config: ServeSpecConfig) -> None:
    loop = LocalEngine(config)

    async def scenario() -> list[TokenDelta]:
        stream = await loop.submit(PROMPT, params(max_tokens=100), "1")
        await anext(aiter(stream))
        await asyncio.to_thread(loop.shutdown)
        return await collect(stream)

    assert asyncio.run(scenario())[-1].finish_reason is FinishReason.ABORT


def test_rounds_are_reported_to_whoever_asked(loop: LocalEngine) -> None:
    seen: list[StepRecord] = []
    loop.report_to(SimpleNamespace(observe=seen.append))

    async def complete() -> list[TokenDelta]:
        return await collect(await loop.submit(PROMPT, params(), "reported"))

    num_tokens = sum(len(delta.token_ids) for delta in asyncio.run(complete()))
    assert sum(stats.num_output_tokens for stats in seen) == num_tokens - 1
    assert sum(stats.num_prefill_tokens for stats in seen) == len(PROMPT)


def test_a_start_that_does_not_fit_is_the_caller_s_error_and_not_the_engine_s(
    loop: LocalEngine,
) -> None:
    with pytest.raises(ValueError, match="prior_rates"):
        loop.start_from([2.0])
    loop.check_health()


def test_a_bad_grammar_is_refused_to_who_asks_and_others_go_on(loop: LocalEngine) -> None:
    async def scenario() -> tuple[list[TokenDelta], list[TokenDelta]]:
        other = await loop.submit(PROMPT, params(), "other")
        with pytest.raises(InvalidRequest) as refusal:
            await loop.submit(PROMPT, params(grammar=Grammar.regex("(a", "guided_regex")), "bad")
        assert refusal.value.field == "guided_regex"
        good = await loop.submit(PROMPT, params(grammar=Grammar.choice(["yes"])), "good")
        return await collect(other), await collect(good)

    other, good = asyncio.run(scenario())
    assert sum(len(delta.token_ids) for delta in other) == 20
    assert "".join(delta.text for delta in good) == "yes"
    assert good[-1].finish_reason is FinishReason.STOP
    assert pages_in_use(loop) == 0


def test_who_goes_away_while_its_grammar_is_compiled_is_not_served(
    loop: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling, go_on = threading.Event(), threading.Event()
    check = loop.engine.check_grammar

    def wait(grammar: Grammar) -> None:
        compiling.set()
        go_on.wait()
        check(grammar)

    monkeypatch.setattr(loop.engine, "check_grammar", wait)
    monkeypatch.setattr(loop.engine, "add", lambda seq: pytest.fail("it has gone away"))

    async def scenario() -> list[TokenDelta]:
        grammar = Grammar.choice(["yes"])
        submitted = asyncio.create_task(loop.submit(PROMPT, params(grammar=grammar), "gone"))
        await asyncio.to_thread(compiling.wait)
        loop.cancel("gone")
        go_on.set()
        return await collect(await submitted)

    (last,) = asyncio.run(scenario())
    assert (last.token_ids, last.finish_reason) == ((), FinishReason.ABORT)
    loop.check_health()


def test_an_idle_loop_measures_missing_costs_while_requests_come_and_go(
    config: ServeSpecConfig, make_llm: MakeLLM, budgets: list[float]
) -> None:
    loop = LocalEngine(config)
    expected = make_llm().generate([PROMPT], params())[0].token_ids

    async def serve() -> None:
        for number in itertools.count():
            deltas = await collect(await loop.submit(PROMPT, params(), str(number)))
            assert tuple(t for delta in deltas for t in delta.token_ids) == expected
            shown: Any = loop.snapshot()["costs"]
            if shown["state"] == "measured":
                return
            await asyncio.sleep(0.02)

    try:
        asyncio.run(asyncio.wait_for(serve(), 120.0))
        loop.reconfigure({})
        assert loop.snapshot()["strategy"] == "goodput"
    finally:
        loop.shutdown()
    assert len(budgets) == 2
