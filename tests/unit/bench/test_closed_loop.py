"""Laws of closed loops: arms share a worker in turns, and none notices the others."""

from __future__ import annotations

import copy
import random
from itertools import count

import pytest

from serve_spec.bench.closed_loop import ClosedLoop, MeasuredRound, engine_beside, run_phase
from serve_spec.bench.phases import TextKind, TextRequest
from serve_spec.core.draft import DraftShape
from serve_spec.engine.engine import SpecEngine
from tests.helpers.engines import SwitchingController, llm_maker, make_pair

POLICIES = {"off": [0], "K=4": [4], "ragged": [3, 0, 4, 1]}
BATCH_SIZE = 3
LENGTHS = [20, 9, 31, 14, 25, 18, 22]


def request(number: int) -> TextRequest:
    """Half of them sampled."""
    prompt = [(7 * number + 3 * j) % 250 for j in range(9)]
    return TextRequest(TextKind("code", number % 2), prompt, number)


@pytest.fixture(scope="module", params=[False, True], ids=["in step", "ahead"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SpecEngine:
    llm = llm_maker(make_pair(tmp_path_factory.mktemp("pair")), "cpu")(
        "EAGLE3", 4, prefix_caching=False, async_scheduling=request.param
    )
    llm.engine.worker.init_states(map(DraftShape.chain, range(5)))
    return llm.engine


def controller(name: str):  # type: ignore[no-untyped-def]
    """A policy whose rounds depend on no clock."""
    return SwitchingController(POLICIES[name], ragged=name == "ragged")


def loop_beside(engine: SpecEngine, name: str) -> ClosedLoop:
    """A loop of seven requests under this policy, on the worker and pages of `engine`."""
    requests = [(request(number), length) for number, length in enumerate(LENGTHS)]
    return ClosedLoop(engine_beside(engine, controller(name)), requests, BATCH_SIZE)


def shapes(rounds: list[MeasuredRound]) -> list[tuple[int, int, int, int]]:
    return [
        (
            r.record.shape.depth,
            r.record.batch_size,
            r.record.num_draft_tokens,
            r.record.num_output_tokens,
        )
        for r in rounds
    ]


def test_an_engine_beside_another_has_room_for_the_same_trees(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """A beam of the last levels lies behind a text whose page would be full without it."""
    path = make_pair(tmp_path_factory.mktemp("trees"))
    tree = {"speculative_eagle_topk": 4, "speculative_num_draft_tokens": 16}
    engine = llm_maker(path, "cpu")("EAGLE3", 4, prefix_caching=False, **tree).engine
    beside = engine_beside(engine, copy.deepcopy(engine.controller))
    requests = [request(number) for number in range(7)]
    texts, alone = (run_phase(each, requests, BATCH_SIZE, 25).texts for each in (beside, engine))
    assert texts == alone


@pytest.mark.parametrize("num_turns", [1, 7, 500])
def test_turns_change_neither_texts_nor_rounds(engine: SpecEngine, num_turns: int) -> None:
    """Where steps are launched ahead, texts only: a turn ends with none in flight."""
    ahead = engine.worker.limits.async_scheduling
    loops = {name: loop_beside(engine, name) for name in POLICIES}
    rounds: dict[str, list[MeasuredRound]] = {name: [] for name in POLICIES}
    rng = random.Random(num_turns)
    for turn in range(1, num_turns + 1):
        for name in rng.sample(list(loops), len(loops)):
            rounds[name] += loops[name].advance(sum(LENGTHS) * turn // num_turns)
    for name, loop in loops.items():
        alone = loop_beside(engine, name)
        rounds_alone = alone.advance(sum(LENGTHS))
        assert loop.texts == alone.texts == loops["off"].texts
        assert [len(text) for text in loop.texts] == LENGTHS
        assert ahead or shapes(rounds[name]) == shapes(rounds_alone)
        assert ahead == any(r.record.follows for r in rounds_alone)
        assert {r.record.shape.depth for r in rounds[name]} >= set(POLICIES[name])


def test_every_page_has_one_owner_after_every_turn_and_none_in_the_end(
    engine: SpecEngine,
) -> None:
    cache = engine.scheduler.cache
    loops = [loop_beside(engine, name) for name in POLICIES]
    most_held = 0
    for turn in range(1, 21):
        for number in random.Random(turn).sample(range(len(loops)), len(loops)):
            loops[number].advance(sum(LENGTHS) * turn // 20)
            held = {
                f"{owner} {seq.request_id}": seq.page_ids
                for owner, loop in enumerate(loops)
                for seq in loop.engine.scheduler.sequences()
            }
            cache.allocator.check_integrity(held)
            most_held = max(most_held, cache.num_pages - cache.num_free_pages)
    assert most_held > BATCH_SIZE * max(LENGTHS) // cache.page_size, "all had requests open at once"
    assert cache.num_free_pages == cache.num_pages
    assert not any(loop.engine.has_work for loop in loops)


def test_an_endless_loop_stays_full_and_leaves_nothing_behind(engine: SpecEngine) -> None:
    endless = ((request(number), 10) for number in count())
    loop = ClosedLoop(engine_beside(engine, controller("K=4")), endless, BATCH_SIZE)
    filled = loop.fill()
    assert all(loop.texts)
    assert len(loop.texts) >= BATCH_SIZE
    assert sum(r.record.num_prefill_tokens for r in filled) >= 9 * BATCH_SIZE
    loop.advance(200)
    assert 200 <= loop.num_emitted == sum(map(len, loop.texts)) < 200 + 2 * 5 * BATCH_SIZE
    assert sum(len(text) < 10 for text in loop.texts) <= BATCH_SIZE
    loop.close()
    assert not loop.engine.has_work
    cache = engine.scheduler.cache
    assert cache.num_free_pages == cache.num_pages
