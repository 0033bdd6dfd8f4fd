"""The promise: same request, same seed, same text, speculation on, off or changing. Float32."""

import random
from dataclasses import replace
from functools import partial

import pytest

from serve_spec.core.request import (
    FinishReason,
    SamplingParams,
    SpeculativeOptions,
)
from tests.helpers.engines import MakeLLM, Pair, llm_maker, switch_every_round, texts

TEMPERATURES = (0.0, 0.7, 1.0)
SWITCHING = (0, 7, 1, 0, 3, 0, 0, 7)


def prompts_and_params(count: int = 8) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of 1 to 45 tokens; every temperature in one batch, some with filters."""
    rng = random.Random(0)
    lengths = [1, 2, 5, 11, 20, 33, 45, 16][:count]
    prompts = [[rng.randrange(256) for _ in range(n)] for n in lengths]
    filters = [{}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.02, "top_k": 50}]
    params = [
        SamplingParams(
            max_tokens=16 + 2 * i,
            temperature=TEMPERATURES[i % 3],
            seed=40 + i,
            ignore_eos=True,
            **filters[i % 4],
        )
        for i in range(count)
    ]
    return prompts, params


@pytest.fixture(scope="module", params=["eager", "lanes"])
def make_llm(pair: Pair, request: pytest.FixtureRequest) -> MakeLLM:
    """Engines that know every length before a round, and engines that run ahead of the host."""
    return partial(llm_maker(pair, "cpu"), execution=request.param)


@pytest.fixture(scope="module")
def plain(pair: Pair) -> list[tuple[int, ...]]:
    """The text of every request, alone, without speculation."""
    prompts, params = prompts_and_params()
    llm = llm_maker(pair, "cpu")()
    return [texts(llm.generate([p], q))[0] for p, q in zip(prompts, params, strict=True)]


@pytest.mark.parametrize("algorithm", ["EAGLE3", "EAGLE"])
@pytest.mark.parametrize("num_steps", [0, 1, 3, 7])
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_speculation_never_changes_the_text(
    make_llm: MakeLLM, plain: list[tuple[int, ...]], algorithm: str, num_steps: int, batch: int
) -> None:
    prompts, params = prompts_and_params()
    llm = make_llm(algorithm, num_steps, max_num_seqs=batch)
    outputs = llm.generate(prompts, params)
    assert texts(outputs) == plain
    correct = sum(output.speculation.num_correct_drafts for output in outputs)
    drafted = sum(output.speculation.num_draft_tokens for output in outputs)
    assert (drafted > 0) == (num_steps > 0)
    if num_steps:
        assert 0 < correct < drafted, "the test needs kept and rejected drafts"


@pytest.mark.parametrize("algorithm", ["EAGLE3", "EAGLE"])
@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_changing_the_tier_every_round_never_changes_the_text(
    make_llm: MakeLLM, plain: list[tuple[int, ...]], algorithm: str, chunked: bool, batch: int
) -> None:
    prompts, params = prompts_and_params()
    budget = 19 if chunked else 128
    llm = make_llm(
        algorithm, 3, max_num_seqs=batch, chunked_prefill=chunked, max_num_batched_tokens=budget
    )
    switch_every_round(llm, SWITCHING)
    assert texts(llm.generate(prompts, params)) == plain


@pytest.mark.parametrize("algorithm", ["EAGLE3", "EAGLE"])
@pytest.mark.parametrize("num_steps", [3, 7])
def test_preemption_never_changes_the_text(
    make_llm: MakeLLM, plain: list[tuple[int, ...]], algorithm: str, num_steps: int
) -> None:
    prompts, params = prompts_and_params()
    llm = make_llm(algorithm, num_steps, num_pages=32, max_num_seqs=8)
    assert texts(llm.generate(prompts, params)) == plain
    assert llm.engine.scheduler.num_preemptions > 0, "the pool must be too small for the batch"
    assert llm.engine.scheduler.cache.num_free_pages == 32


@pytest.mark.parametrize("num_steps", [1, 3, 7])
def test_stops_inside_an_accepted_run_end_the_text_where_they_do_without_one(
    make_llm: MakeLLM, plain: list[tuple[int, ...]], num_steps: int
) -> None:
    """Each request stops at a string, then at a token, that its own plain text holds."""
    prompts, params = prompts_and_params()
    stopping = []
    for i, (p, tokens) in enumerate(zip(params, plain, strict=True)):
        place = 3 + 2 * i
        stop = {"stop": (chr(tokens[place]),)} if i % 2 else {"stop_token_ids": (tokens[place],)}
        stopping.append(replace(p, **stop))
    off = make_llm().generate(prompts, stopping)
    on = make_llm("EAGLE3", num_steps).generate(prompts, stopping)
    assert [(o.text, o.token_ids, o.finish_reason) for o in on] == [
        (o.text, o.token_ids, o.finish_reason) for o in off
    ]
    ended = sum(output.finish_reason is FinishReason.STOP for output in on)
    assert ended >= 4, "the test needs texts that stop"


@pytest.mark.parametrize("algorithm", ["EAGLE3", "EAGLE"])
def test_a_draft_of_lower_precision_than_its_target_never_changes_the_text(
    make_llm: MakeLLM, plain: list[tuple[int, ...]], algorithm: str
) -> None:
    prompts, params = prompts_and_params()
    llm = make_llm(algorithm, 3, speculative_draft_dtype="bfloat16")
    outputs = llm.generate(prompts, params)
    assert texts(outputs) == plain
    assert sum(output.speculation.num_correct_drafts for output in outputs) > 0


def test_requests_that_refuse_or_cap_speculation_keep_their_text_beside_others(
    make_llm: MakeLLM, plain: list[tuple[int, ...]]
) -> None:
    prompts, params = prompts_and_params()
    options = [SpeculativeOptions(enabled=False), SpeculativeOptions(max_steps=2), None]
    mixed = [
        replace(p, speculative=options[i % 3] or SpeculativeOptions()) for i, p in enumerate(params)
    ]
    outputs = make_llm("EAGLE3", 7).generate(prompts, mixed)
    assert texts(outputs) == plain
    assert all(output.speculation.num_draft_tokens == 0 for output in outputs[::3])
    assert all(max(output.speculation.rounds_by_num_steps) <= 2 for output in outputs[1::3])


def test_a_seed_fixes_the_text_and_another_seed_changes_it(make_llm: MakeLLM) -> None:
    llm = make_llm("EAGLE3", 3)

    def run(seed: int) -> tuple[int, ...]:
        return texts(llm.generate([[5, 6, 7]], SamplingParams(max_tokens=24, seed=seed)))[0]

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_drafts_after_a_long_pause_are_as_good_as_without_one(make_llm: MakeLLM) -> None:
    """The catch-up over rounds without speculation leaves the draft cache as if never paused."""
    prompt, params = [list(range(30, 60))], SamplingParams(max_tokens=80, temperature=0.0)
    steady = make_llm("EAGLE3", 3)
    paused = make_llm("EAGLE3", 3, max_num_batched_tokens=16)
    switch_every_round(paused, [0] * 40 + [3] * 200, ragged=False)
    first, second = steady.generate(prompt, params)[0], paused.generate(prompt, params)[0]
    assert first.token_ids == second.token_ids
    # One token from the prompt, 40 from the pause: a fresh engine drafts the same chains there.
    steady_correct = kept_after(make_llm, prompt, params, skip=40)
    assert second.speculation.num_correct_drafts == steady_correct


def kept_after(
    make_llm: MakeLLM, prompt: list[list[int]], params: SamplingParams, skip: int
) -> int:
    """Correct drafts of an engine that starts with the first `skip` output tokens as prompt."""
    llm = make_llm("EAGLE3", 3)
    whole = llm.generate(prompt, params)[0]
    extended = [*prompt[0], *whole.token_ids[:skip]]
    rest = SamplingParams(max_tokens=params.max_tokens - skip, temperature=0.0)
    output = llm.generate([extended], rest)[0]
    assert output.token_ids == whole.token_ids[skip:]
    return output.speculation.num_correct_drafts
