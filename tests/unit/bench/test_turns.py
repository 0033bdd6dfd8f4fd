"""Laws of turns: arms advance together, and none notices the others."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.bench.closed_loop import ClosedLoop, PhaseRun, run_phase
from serve_spec.bench.phases import Phase, TextKind, TextRequest
from serve_spec.bench.turns import MIN_ROUNDS, engine_beside, run_in_turns, turns_of
from serve_spec.core.draft_shape import DraftShape
from serve_spec.engine.engine import SpecEngine
from tests.helpers.engines import SwitchingController, llm_maker, make_pair

POLICIES = {"off": [0], "K=4": [4], "ragged": [3, 0, 4, 1]}
BATCH_SIZE = 3
LENGTHS = [20, 9, 31, 14, 25, 18, 22]


def requests() -> list[TextRequest]:
    """As many as there are lengths; half of them sampled."""
    prompts = [[(7 * i + 3 * j) % 250 for j in range(9)] for i in range(len(LENGTHS))]
    return [TextRequest(TextKind("code", i % 2), prompt, i) for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="module", params=[False, True], ids=["in step", "ahead"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SpecEngine:
    llm = llm_maker(make_pair(tmp_path_factory.mktemp("pair")), "cpu")(
        "EAGLE3", 4, prefix_caching=False, async_scheduling=request.param
    )
    llm.engine.worker.init_states(map(DraftShape.chain, range(5)))
    return llm.engine


def loops_beside(engine: SpecEngine) -> list[ClosedLoop]:
    """One loop per policy, on engines that share worker and pages."""
    return [
        ClosedLoop(engine_beside(engine, controller(name)), requests(), BATCH_SIZE, LENGTHS)
        for name in POLICIES
    ]


def test_an_engine_beside_another_has_room_for_the_same_trees(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """A beam of the last levels lies behind a text whose page would be full without it."""
    path = make_pair(tmp_path_factory.mktemp("trees"))
    tree = {"speculative_eagle_topk": 4, "speculative_num_draft_tokens": 16}
    engine = llm_maker(path, "cpu")("EAGLE3", 4, prefix_caching=False, **tree).engine
    beside = engine_beside(engine, copy.deepcopy(engine.controller))
    texts, alone = (
        run_phase(each, requests(), BATCH_SIZE, LENGTHS).texts for each in (beside, engine)
    )
    assert texts == alone


def controller(name: str):  # type: ignore[no-untyped-def]
    """A policy whose rounds depend on no clock."""
    return SwitchingController(POLICIES[name], ragged=name == "ragged")


def shapes(run: PhaseRun) -> list[tuple[int, int, int, int]]:
    return [
        (
            r.record.shape.depth,
            r.record.batch_size,
            r.record.num_draft_tokens,
            r.record.num_output_tokens,
        )
        for r in run.rounds
    ]


@pytest.mark.parametrize("num_turns", [1, 7, 500])
def test_turns_change_neither_texts_nor_rounds(engine: SpecEngine, num_turns: int) -> None:
    """Where steps are planned ahead, texts only: a turn ends with none in flight."""
    ahead = engine.worker.limits.async_scheduling
    loops = loops_beside(engine)
    controllers = [loop.engine.controller for loop in loops]
    run_in_turns(loops, controllers, num_turns, random.Random(num_turns))
    for loop, name in zip(loops, POLICIES, strict=True):
        alone = run_phase(engine_beside(engine, controller(name)), requests(), BATCH_SIZE, LENGTHS)
        assert loop.run.texts == alone.texts
        assert ahead or shapes(loop.run) == shapes(alone)
        assert ahead == any(r.record.follows for r in alone.rounds)
    assert loops[0].run.texts == loops[1].run.texts == loops[2].run.texts


def test_every_page_has_one_owner_after_every_turn_and_none_in_the_end(
    engine: SpecEngine,
) -> None:
    cache = engine.scheduler.cache
    loops = loops_beside(engine)
    most_held = 0
    for turn in range(1, 21):
        for number in random.Random(turn).sample(range(len(loops)), len(loops)):
            loops[number].advance(loops[number].num_tokens * turn // 20)
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


@dataclass
class Rehearsal:
    """A loop that emits `per_round` tokens a round and notes after each turn how far it is."""

    engine: SpecEngine
    num_tokens: int
    per_round: int
    log: list[tuple[Rehearsal, int]]
    emitted: int = 0
    turns: list[int] = field(default_factory=list)

    def advance(self, num_tokens: int) -> None:
        while self.emitted < num_tokens:
            self.emitted = min(self.num_tokens, self.emitted + self.per_round)
        self.turns.append(self.emitted)
        self.log.append((self, num_tokens))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 30), st.data())
def test_every_arm_gets_the_same_share_in_every_cycle_and_has_all_in_the_end(
    per_round: list[int], num_turns: int, data: st.DataObject
) -> None:
    num_tokens = data.draw(st.integers(num_turns, 500))
    engine = object.__new__(SpecEngine)
    log: list[tuple[Rehearsal, int]] = []
    loops = [Rehearsal(engine, num_tokens, tokens, log) for tokens in per_round]
    controllers = [controller("off") for _ in loops]
    run_in_turns(loops, controllers, num_turns, random.Random(0))  # type: ignore[arg-type]
    for turn in range(num_turns):
        cycle = log[turn * len(loops) : (turn + 1) * len(loops)]
        assert {id(loop) for loop, _ in cycle} == {id(loop) for loop in loops}
        assert len({asked for _, asked in cycle}) == 1
        share = (turn + 1) / num_turns * num_tokens
        for loop in loops:
            assert share - 1 < loop.turns[turn] < share + loop.per_round
    assert all(loop.emitted == num_tokens for loop in loops)


def test_the_order_of_arms_is_another_in_most_cycles() -> None:
    log: list[tuple[Rehearsal, int]] = []
    engine = object.__new__(SpecEngine)
    loops = [Rehearsal(engine, 100, 1, log) for _ in range(5)]
    run_in_turns(loops, [controller("off")] * 5, 100, random.Random(0))  # type: ignore[arg-type]
    orders = [[id(loop) for loop, _ in log[i : i + 5]] for i in range(0, 500, 5)]
    assert sum(a != b for a, b in pairwise(orders)) > 90
    firsts = [order[0] for order in orders]
    assert all(5 < firsts.count(id(loop)) < 50 for loop in loops)


def test_a_loop_runs_under_its_own_controller_where_all_share_an_engine(
    engine: SpecEngine,
) -> None:
    shared = engine_beside(engine, controller("off"))
    loops = [ClosedLoop(shared, requests(), BATCH_SIZE, LENGTHS) for _ in POLICIES]
    run_in_turns(loops, [controller(name) for name in POLICIES], 1, random.Random(0))
    for loop, steps in zip(loops, POLICIES.values(), strict=True):
        used = {r.record.shape.depth for r in loop.run.decode_rounds}
        assert used == set(steps)


@given(st.integers(1, 64), st.floats(0.5, 50), st.floats(1, 100))
def test_a_turn_takes_about_the_time_it_was_given_and_two_rounds_at_least(
    batch_size: int, round_ms: float, turn_ms: float
) -> None:
    phase = Phase("predictable", batch_size, 2 * batch_size, 64, 0.5)
    turns = turns_of(phase, round_ms, turn_ms)
    num_rounds = phase.total_tokens / batch_size
    assert turns == 1 or num_rounds / turns >= 0.9 * MIN_ROUNDS
    if turn_ms >= MIN_ROUNDS * round_ms:
        assert turns == 1 or abs(num_rounds * round_ms / turn_ms - turns) <= 0.5
    assert turns_of(phase, round_ms, 0) == 1
