"""Laws of the channel to an engine: streams, cancellation, failures."""

import asyncio
import itertools
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from msgspec import Raw

from serve_spec.config import ServeSpecConfig
from serve_spec.core.errors import EngineOverloaded, InvalidRequest, RequestFailed
from serve_spec.core.grammar import Grammar
from serve_spec.core.request import FinishReason, SamplingParams
from serve_spec.engine.engine import MAX_BROKEN_REQUESTS
from serve_spec.engine.messages import Add, encode, hang_up
from serve_spec.structured import masks
from tests.helpers.local_engine import LocalEngine
from tests.helpers.plain_logprobs import close_logprobs
from tests.unit.engine.test_conformance import requests

PROMPT = [10, 20, 30]


@pytest.fixture(scope="module")
def config(make_llm):
    llm = make_llm("EAGLE3", 3, num_pages=256, max_num_seqs=4, max_waiting_seqs=3)
    return ServeSpecConfig.load(llm.config, speculative_adaptive=True)


@pytest.fixture(scope="module")
def loop(config):
    engine_loop = LocalEngine(config)
    yield engine_loop
    engine_loop.shutdown()


async def collect(stream):
    deltas = []
    await stream.each(deltas.append)
    return deltas


async def begin(stream, count=1):
    """Return the growing list of a stream's deltas once it has some, and a task for its end."""
    deltas = []
    task = asyncio.create_task(stream.each(deltas.append))
    while len(deltas) < count and not task.done():
        await asyncio.sleep(0.001)
    return deltas, task


def params(**changes):
    return SamplingParams(**{"max_tokens": 20, "seed": 3, "ignore_eos": True, **changes})


def pages_in_use(loop):
    """Return the pages in use, as soon as there are none or after ten seconds."""
    for _ in range(100):
        cache = loop.snapshot()["kv"]
        assert isinstance(cache, dict)
        num_pages = int(cache["total_pages"] - cache["free_pages"])
        if num_pages == 0:
            break
        time.sleep(0.1)  # an engine sends a snapshot a second
    return num_pages


def test_a_cancelled_request_frees_its_pages_and_disturbs_no_other(loop, make_llm):
    async def scenario():
        staying = await loop.submit(PROMPT, params(max_tokens=60), "staying")
        leaving = await loop.submit(PROMPT, params(max_tokens=100, seed=9), "leaving")
        left, end = await begin(leaving)
        loop.cancel("leaving")
        loop.cancel("leaving")
        await end
        return await collect(staying), left

    stayed, left = asyncio.run(scenario())
    alone = make_llm().generate([PROMPT], params(max_tokens=60))[0]
    assert tuple(t for delta in stayed for t in delta.token_ids) == alone.token_ids
    assert left[-1].finish_reason is FinishReason.ABORT
    assert pages_in_use(loop) == 0


def test_prefixes_are_found_until_they_are_flushed_and_only_under_their_salt(loop):
    async def num_cached(name, **changes):
        deltas = await collect(await loop.submit([7] * 60, params(**changes), name))
        return deltas[0].num_cached_tokens

    async def scenario():
        found = [await num_cached("first"), await num_cached("again")]
        found += [await num_cached("salted", cache_salt="a"), await num_cached("b", cache_salt="a")]
        loop.flush_cache()
        return [*found, await num_cached("after"), await num_cached("last", cache_salt="a")]

    first, again, salted, once_more, after, last = asyncio.run(scenario())
    assert (first, salted, after, last) == (0, 0, 0, 0)
    assert again == once_more > 0


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
def test_a_request_that_cannot_run_is_refused_by_field_and_reaches_no_round(
    loop, prompt, changes, field, too_long
):
    with pytest.raises(InvalidRequest) as refusal:
        asyncio.run(loop.submit(prompt, params(**changes), "x"))
    assert (refusal.value.field, refusal.value.too_long) == (field, too_long)
    assert not loop.engine.has_work


def test_a_full_engine_refuses_instead_of_growing(loop):
    """Four may run and three wait: the eighth unfinished request is one too many."""

    async def scenario():
        streams = [await loop.submit(PROMPT, params(max_tokens=100), str(i)) for i in range(7)]
        with pytest.raises(EngineOverloaded, match="7 requests are unfinished"):
            await loop.submit(PROMPT, params(), "one too many")
        for stream in streams:
            loop.cancel(stream.request_id)
            await collect(stream)
        await collect(await loop.submit(PROMPT, params(), "room again"))

    asyncio.run(scenario())
    assert pages_in_use(loop) == 0


def test_an_id_in_use_is_refused_and_its_owner_unharmed(loop):
    async def scenario():
        stream = await loop.submit(PROMPT, params(), "same")
        with pytest.raises(InvalidRequest, match="request_id"):
            await loop.submit(PROMPT, params(), "same")
        return await collect(stream)

    assert asyncio.run(scenario())[-1].finish_reason is FinishReason.LENGTH


def test_a_dead_engine_ends_every_stream_and_fails_the_health_check(config, monkeypatch):
    loop = LocalEngine(config)

    def explode(plan):
        raise RuntimeError("device lost")

    monkeypatch.setattr(loop.engine.worker, "submit", explode)

    async def scenario():
        with pytest.raises(RuntimeError, match="device lost"):  # it may die before this returns
            await collect(await loop.submit(PROMPT, params(), "1"))
        with pytest.raises(RuntimeError, match="device lost"):
            loop.check_health()
        with pytest.raises(RuntimeError, match="device lost"):
            await loop.submit(PROMPT, params(), "2")

    asyncio.run(scenario())
    loop.shutdown()


def test_nan_logits_fail_their_request_and_the_health_check_after_several_in_a_row(config):
    loop = LocalEngine(config)
    table = loop.engine.worker.target.model.embed_tokens
    weight = table.weight.detach().clone()
    weight[77] = torch.nan
    table.weight = torch.nn.Parameter(weight, requires_grad=False)

    async def scenario():
        staying = await loop.submit(PROMPT, params(max_tokens=60), "staying")
        _, end = await begin(staying)
        for number in range(MAX_BROKEN_REQUESTS - 1):
            with pytest.raises(RequestFailed, match="NaN logits"):
                await collect(await loop.submit([5, 77], params(), f"bad{number}"))
        await end
        loop.check_health()
        for number in range(MAX_BROKEN_REQUESTS):
            with pytest.raises(RequestFailed, match="NaN logits"):
                await collect(await loop.submit([5, 77], params(), f"more{number}"))
        while True:
            loop.check_health()
            await asyncio.sleep(0.01)

    with pytest.raises(RuntimeError, match="NaN logits"):
        asyncio.run(asyncio.wait_for(scenario(), 60))
    loop.shutdown()


def test_a_reader_that_fails_ends_its_own_stream_alone(loop):
    def fail(delta):
        raise ValueError("no room")

    async def both():
        streams = [await loop.submit([1, 2, 3], params(), name) for name in ("bad", "good")]
        ends = streams[0].each(fail), collect(streams[1])
        return await asyncio.gather(*ends, return_exceptions=True)

    failed, deltas = asyncio.run(both())
    assert str(failed) == "no room"
    assert deltas[-1].finish_reason == FinishReason.LENGTH


def test_policy_keys_change_between_rounds_or_not_at_all(loop):
    before = loop.snapshot()
    with pytest.raises(ValueError, match="speculative_num_step"):
        loop.reconfigure({"speculative_num_step": 3})
    with pytest.raises(ValueError, match="prior_rates"):
        loop.start_from([2.0])
    loop.check_health()
    assert loop.snapshot()["strategy"] == before["strategy"]
    loop.reconfigure({"speculative_adaptive_strategy": "static", "speculative_num_steps": 1})
    assert loop.snapshot()["strategy"] == "static"


def test_shutting_down_ends_open_streams_and_accepts_nothing_more(config):
    loop = LocalEngine(config)

    async def scenario():
        stream = await loop.submit(PROMPT, params(max_tokens=100), "1")
        deltas, end = await begin(stream)
        await asyncio.to_thread(loop.shutdown)
        await end
        return deltas

    assert asyncio.run(scenario())[-1].finish_reason is FinishReason.ABORT
    for call in (
        lambda: asyncio.run(loop.submit(PROMPT, params(), "1")),
        lambda: loop.reconfigure({"min_dwell_rounds": 4}),
        loop.check_health,
    ):
        with pytest.raises(RuntimeError, match="has been shut down"):
            call()


def test_rounds_are_reported_to_the_sink(loop):
    seen = []
    loop.report_to(SimpleNamespace(observe=seen.append))

    async def complete():
        return await collect(await loop.submit(PROMPT, params(), "reported"))

    num_tokens = sum(len(delta.token_ids) for delta in asyncio.run(complete()))
    loop.reconfigure({})  # answered after all that came before; tokens do not wait for records
    assert sum(stats.num_output_tokens for stats in seen) == num_tokens - 1
    assert sum(stats.num_prefill_tokens for stats in seen) == len(PROMPT)


def test_a_bad_grammar_is_refused_and_other_requests_go_on(loop):
    async def scenario():
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


def test_a_grammar_that_is_too_slow_fails_its_request_by_field(loop, monkeypatch):
    monkeypatch.setattr(masks, "MOST_MASK_S", 0.0)

    async def scenario():
        other = await loop.submit(PROMPT, params(), "other")
        slow = params(grammar=Grammar.regex("[a-z]*", "guided_regex"))
        with pytest.raises(InvalidRequest) as refusal:
            await collect(await loop.submit(PROMPT, slow, "slow"))
        assert refusal.value.field == "guided_regex"
        return await collect(other)

    assert sum(len(delta.token_ids) for delta in asyncio.run(scenario())) == 20
    assert pages_in_use(loop) == 0


@pytest.mark.parametrize("compiles", ["client", "engine"])
def test_a_request_cancelled_while_its_grammar_compiles_is_not_served(loop, monkeypatch, compiles):
    compiling, go_on = threading.Event(), threading.Event()
    compiler = loop._inputs if compiles == "client" else loop.engine
    check = compiler.check_grammar

    def wait(grammar):
        compiling.set()
        go_on.wait()
        check(grammar)

    monkeypatch.setattr(compiler, "check_grammar", wait)
    monkeypatch.setattr(loop.engine, "add", lambda seq: pytest.fail("it is cancelled"))

    async def scenario():
        grammar = Grammar.choice(["yes"])
        submitted = asyncio.create_task(loop.submit(PROMPT, params(grammar=grammar), "gone"))
        await asyncio.to_thread(compiling.wait)
        if compiles == "client":
            submitted.cancel()
        else:
            loop.cancel("gone")
        await asyncio.sleep(0.2)  # until the engine has read it
        go_on.set()
        return await collect(await submitted)

    if compiles == "client":
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(scenario())
    else:
        (last,) = asyncio.run(scenario())
        assert (last.token_ids, last.finish_reason) == ((), FinishReason.ABORT)
    loop.check_health()


def test_an_idle_loop_measures_missing_costs_while_requests_come_and_go(config, make_llm, budgets):
    loop = LocalEngine(config)
    expected = make_llm().generate([PROMPT], params())[0].token_ids

    async def serve():
        for number in itertools.count():
            deltas = await collect(await loop.submit(PROMPT, params(), str(number)))
            assert tuple(t for delta in deltas for t in delta.token_ids) == expected
            shown = loop.snapshot()["costs"]
            if shown["state"] == "measured":
                return
            await asyncio.sleep(0.02)

    try:
        asyncio.run(asyncio.wait_for(serve(), 120.0))
        loop.reconfigure({})
        assert loop.snapshot()["strategy"] == "goodput"
    finally:
        loop.shutdown()
    assert len(budgets) >= 2, "the first attempt fails; a rough one may be repeated"


def joined(deltas):
    """Return what a request's caller receives, log-probabilities excepted."""
    return (
        tuple(t for delta in deltas for t in delta.token_ids),
        "".join(delta.text for delta in deltas),
        deltas[-1].finish_reason,
        deltas[-1].speculation,
    )


def check_logprobs(deltas, wanted):
    """Compare with a tolerance: another batch rounds otherwise."""
    found = [token for delta in deltas for token in delta.logprobs or ()]
    close_logprobs(found, wanted or (), abs=1e-3)


def test_through_the_channel_a_request_gets_what_an_engine_in_this_process_returns(make_llm):
    """All of it, from a client that does not read meanwhile; or the rest after its first tokens."""
    asked = requests()
    llm = make_llm("EAGLE3", 3, prefix_caching=False)
    outputs = llm.generate([a.prompt for a in asked], [a.params for a in asked])
    assert {output.finish_reason for output in outputs} == {FinishReason.STOP, FinishReason.LENGTH}
    loop = LocalEngine(llm.config, llm.engine)

    before, reads = llm.engine.counters.num_steps_executed, threading.Event()

    async def whole(a, output):
        stream = await loop.submit(a.prompt, a.params, a.key)
        while llm.engine.counters.num_steps_executed == before or llm.engine.has_work:
            await asyncio.sleep(0.01)
        reads.set()
        return await collect(stream)

    async def rest(a, output):
        emitted = list(output.token_ids[: len(output.token_ids) // 2])
        return await collect(await loop.submit(a.prompt, a.params, a.key, emitted))

    async def all_of(answer):
        pairs = zip(asked, outputs, strict=True)
        return await asyncio.gather(*(answer(*pair) for pair in pairs))

    sender = loop.server._sender
    connection, poll = sender._connection, sender._poll

    def send_bytes(message):
        reads.wait()
        connection.send_bytes(message)

    sender._connection = SimpleNamespace(send_bytes=send_bytes)
    sender._poll = SimpleNamespace(poll=lambda timeout: [])
    answers = asyncio.run(all_of(whole))
    sender._connection, sender._poll = connection, poll
    for a, output, deltas in zip(asked, outputs, answers, strict=True):
        wanted = (output.token_ids, output.text, output.finish_reason, output.speculation)
        assert joined(deltas) == wanted
        assert all(delta.finish_reason is None for delta in deltas[:-1])
        assert len(deltas) <= 3 or a.params.stop, "what is not read is merged"
        check_logprobs(deltas, output.logprobs)
        close_logprobs(deltas[0].prompt_logprobs or (), output.prompt_logprobs or (), abs=1e-3)
    for output, deltas in zip(outputs, asyncio.run(all_of(rest)), strict=True):
        token_ids, text, reason, _ = joined(deltas)
        assert token_ids == output.token_ids[len(output.token_ids) // 2 :]
        assert output.text.endswith(text)
        assert reason is output.finish_reason
    assert pages_in_use(loop) == 0
    loop.shutdown()


def test_a_message_that_cannot_be_decoded_ends_its_request_alone(loop, monkeypatch):
    async def scenario():
        other = await loop.submit(PROMPT, params(), "other")
        loop._sender.put([Raw(b"\xc1 is no MessagePack")])
        with monkeypatch.context() as broken:
            nonsense = Add("bad", Raw(encode({"token_ids": "nonsense"})))
            broken.setattr(Add, "of", lambda seq: nonsense)
            bad = await loop.submit(PROMPT, params(), "bad")
        with pytest.raises(RuntimeError, match="cannot decode the request"):
            await collect(bad)
        again = await loop.submit(PROMPT, params(), "bad")
        assert await collect(again)
        return await collect(other)

    assert sum(len(delta.token_ids) for delta in asyncio.run(scenario())) == 20
    loop.check_health()


@pytest.mark.parametrize("is_idle", [True, False])
def test_a_broken_channel_is_noticed_at_both_ends(config, is_idle):
    loop = LocalEngine(config)
    has_lost = threading.Event()
    loop.server._on_lost = has_lost.set

    async def scenario():
        stream = None if is_idle else await loop.submit(PROMPT, params(max_tokens=100), "1")
        hang_up(loop._connection)
        if stream is not None:
            with pytest.raises(RuntimeError, match="process has ended"):
                await collect(stream)
        await asyncio.to_thread(loop._reader.join)
        with pytest.raises(RuntimeError, match="process has ended"):
            loop.check_health()

    asyncio.run(scenario())
    assert has_lost.wait(10.0)
    loop.shutdown()


def test_an_engine_that_sends_nothing_for_too_long_has_hung(config):
    loop = LocalEngine(ServeSpecConfig.load(config, round_timeout_s=0.5))
    go_on = threading.Event()

    async def scenario():
        await asyncio.sleep(1.0)
        loop.check_health()
        stream = await loop.submit(PROMPT, params(), "1")
        loop.server._commands.put(go_on.wait)
        await asyncio.sleep(1.0)
        with pytest.raises(RuntimeError, match=r"longer than replica\.round_timeout_s=0\.5"):
            loop.check_health()
        with pytest.raises(RuntimeError, match="round_timeout_s"):
            await collect(stream)

    asyncio.run(scenario())
    go_on.set()
    loop.shutdown()
