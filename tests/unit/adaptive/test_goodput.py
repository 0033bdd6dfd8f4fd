"""Laws of the goodput policy, on recorded acceptance, recorded costs and a clock that is a sum."""

import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulator import Comparison, Simulator, compare
from serve_spec.adaptive.controller import FALLBACK_ROUNDS, AdaptiveController, PolicySettings
from serve_spec.adaptive.cost_model import CostModel
from serve_spec.adaptive.ema import EmaPolicy
from serve_spec.adaptive.goodput import MAX_BAD_TIMES, MOST_PLAN_ROUNDS, GoodputPolicy
from serve_spec.adaptive.params import AdaptiveSpeculativeParams
from serve_spec.adaptive.policy import Reason
from serve_spec.bench.phases import Phase
from serve_spec.bench.trace import TraceSet, load_traces
from serve_spec.config.adaptive_file import PRESETS
from serve_spec.config.cost_table import CostTable
from serve_spec.core.draft_shape import DraftShape
from serve_spec.core.record import StepTimes
from serve_spec.core.round import DecodeBatch, RoundSteps
from tests.helpers.rounds import decode_batch, verified_round
from tests.helpers.simulated_costs import (
    GPU_8B,
    TWO_CPU_CORES,
    RoundCosts,
    RoundShape,
    recorded_table,
)

TABLE = recorded_table(TWO_CPU_CORES)
GPU_TABLE = recorded_table(GPU_8B, (1, 2, 4, 8, 16, 32, 64, 128))
GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


@pytest.fixture(scope="module")
def traces() -> TraceSet:
    return load_traces(Path(__file__).parents[2] / "data" / "acceptance_traces.json")


def goodput(table: object = TABLE, **options: object) -> GoodputPolicy:
    settings = {"per_sequence": True, "min_dwell_rounds": 8, "initial_steps": 3, **options}
    return GoodputPolicy(CostModel(table), **settings)  # type: ignore[arg-type]


def ema(preset: object) -> EmaPolicy:
    return EmaPolicy(AdaptiveSpeculativeParams(3, preset), 8)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def on_a_cpu(traces: TraceSet) -> Comparison:
    """Every phase twice, for the policies learn across them."""
    sizes = {1: 10, 4: 40, 16: 112, 64: 256}
    classes = ("predictable", "unpredictable", "mixture")
    phases = [Phase(kind, size, count, 96) for size, count in sizes.items() for kind in classes]
    policies = {
        "uniform": goodput(per_sequence=False),
        "per sequence": goodput(),
        "ema conservative": ema(PRESETS["conservative"]),
        "ema aggressive": ema(PRESETS["aggressive"]),
    }
    return compare(policies, phases, traces, TWO_CPU_CORES)


@pytest.mark.parametrize("arm", ["uniform", "per sequence"])
def test_within_two_percent_of_the_best_fixed_depths_and_never_slower_than_off_in_any_phase(
    on_a_cpu: Comparison, arm: str
) -> None:
    assert on_a_cpu.regret(arm) <= 0.02, "in total"
    assert on_a_cpu.worst_cell(arm) >= 0.97


@pytest.mark.parametrize("arm", ["uniform", "per sequence"])
@pytest.mark.parametrize("rival", ["ema conservative", "ema aggressive"])
def test_in_total_faster_than_the_rule_that_is_blind_to_cost(
    on_a_cpu: Comparison, arm: str, rival: str
) -> None:
    assert on_a_cpu.regret(arm) < on_a_cpu.regret(rival) - 0.1


@given(accept_rate=st.floats(0, 1), size=st.sampled_from([1, 3, 8]), per_sequence=st.booleans())
@settings(max_examples=15)
def test_under_constant_input_the_tier_settles(
    accept_rate: float, size: int, per_sequence: bool
) -> None:
    """Drafts are kept as evenly as can be; after some hundred rounds hardly anything moves.

    Dwell alone would allow a switch every eight rounds. What is left is at the very break-even,
    where off and one draft are worth the same. (Multiples of the golden ratio fill the range evenly
    and keep step with no number of rows. In a rhythm of, say, five, tiers would see other rates.)
    """
    policy = goodput(per_sequence=per_sequence)
    tiers = []
    place = 0.0
    for _ in range(1200):
        batch = decode_batch(size)
        steps = policy.choose(batch)
        row_steps = list(steps.row_steps or [steps.shape.depth] * size)
        kept = []
        for k in row_steps:
            correct = 0
            while correct < k and (place := (place + GOLDEN_RATIO) % 1) < accept_rate:
                correct += 1
            kept.append(correct)
        if policy.last_reason not in (Reason.PROBE, Reason.BASELINE):
            tiers.append(steps.shape.depth)
        tell(policy, kept, row_steps)
    settled = tiers[400:]
    switches = sum(a != b for a, b in pairwise(settled))
    assert switches <= len(settled) / 40


def times_of(row_steps: list[int], size: int, costs: RoundCosts = TWO_CPU_CORES) -> StepTimes:
    """What a recorded machine takes for a round of these drafts."""
    drafting = tuple(sum(k > depth for k in row_steps) for depth in range(max(row_steps)))
    return costs(RoundShape(size, drafting, size * 128, 0, 0, 0))


def tell(
    policy: GoodputPolicy, kept: list[int], row_steps: list[int], costs: RoundCosts = TWO_CPU_CORES
) -> None:
    """One more round on a recorded machine, in which rows kept so many of their drafts."""
    size, times = len(row_steps), times_of(row_steps, len(row_steps), costs)
    policy.observe(verified_round(kept, size, max(row_steps), row_steps=row_steps, times=times))


@given(
    bounds=st.dictionaries(st.sampled_from([1, 5, 20]), st.integers(0, 7), min_size=1),
    rounds=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 9)), max_size=60),
    per_sequence=st.booleans(),
)
@settings(deadline=None)
def test_no_round_is_deeper_than_its_slot_allows_and_no_row_deeper_than_the_round(
    bounds: dict[int, int], rounds: list[tuple[int, int]], per_sequence: bool
) -> None:
    policy = goodput(bounds=bounds, per_sequence=per_sequence)
    for size, max_steps in rounds:
        steps = policy.choose(decode_batch(size, max_steps=max_steps))
        below = [key for key in bounds if key <= size] or [min(bounds)]
        assert steps.shape.depth <= bounds[max(below)]
        row_steps = list(steps.row_steps or [steps.shape.depth] * size)
        assert all(0 <= k <= steps.shape.depth for k in row_steps)
        granted = [min(k, max_steps) for k in row_steps]
        tell(policy, granted, granted)


def test_a_row_that_could_not_draft_when_the_plan_was_made_drafts_once_it_can() -> None:
    policy, size = goodput(), 4

    def run(rounds: int, usable: list[int]) -> None:
        batch = replace(decode_batch(size), max_steps=usable)
        for _ in range(rounds):
            wanted = policy.choose(batch).row_steps or [0] * size
            drafted = [min(steps, most) for steps, most in zip(wanted, usable, strict=True)]
            tell(policy, drafted, drafted)

    run(80, [9] * size)
    run(20, [0] * size)  # between two plans; the one of now was made of such rows
    wanted = policy.choose(decode_batch(size)).row_steps
    assert wanted is not None
    assert min(wanted) > 0


@given(size=st.integers(1, 20), max_drafts=st.integers(0, 60), per_sequence=st.booleans())
@settings(deadline=None)
def test_a_plan_asks_for_no_more_drafts_than_the_round_affords(
    size: int, max_drafts: int, per_sequence: bool
) -> None:
    policy = goodput(per_sequence=per_sequence)
    steps = policy.choose(decode_batch(size, max_draft_tokens=max_drafts))
    assert sum(steps.row_steps or [steps.shape.depth] * size) <= max_drafts


def test_without_room_for_drafts_it_goes_to_zero_at_once_and_says_why() -> None:
    policy = goodput()
    assert policy.choose(decode_batch(2)).shape.depth > 0
    assert policy.choose(decode_batch(2, max_draft_tokens=0)).shape.depth == 0
    assert policy.last_reason is Reason.KV


def draft_for_a_while(
    policy: GoodputPolicy, size: int, most_kept: Callable[[int, int], int], num_rounds: int = 60
) -> None:
    """Rounds of a batch on a GPU; a row keeps so many of its drafts, by its number and turn."""
    for turn in range(num_rounds):
        row_steps = list(policy.choose(decode_batch(size)).row_steps or [0] * size)
        kept = [min(most_kept(row, turn), k) for row, k in enumerate(row_steps)]
        tell(policy, kept, row_steps, GPU_8B)


def no_probe(policy: GoodputPolicy, batch: DecodeBatch) -> RoundSteps:
    """The first answer that is not there to learn something."""
    while (steps := policy.choose(batch)).notes.is_probe:
        pass
    return steps


def test_where_prompts_take_the_room_of_drafts_it_drafts_less_beside_them_and_says_why() -> None:
    """As on a GPU whose rows are free up to a number of them."""
    size = 16
    policy = goodput(GPU_TABLE, per_sequence=False)
    draft_for_a_while(policy, size, lambda row, turn: (row + turn) % 5)

    def chosen(num_prompt_rows: int) -> tuple[int, Reason]:
        batch = replace(decode_batch(size), num_prompt_rows=num_prompt_rows)
        steps = no_probe(policy, batch)
        assert max(steps.row_steps or [0]) == steps.shape.depth
        return steps.shape.depth, policy.last_reason

    usual = chosen(0)
    assert usual[1] is not Reason.PROMPTS
    fewer, why = chosen(256)
    assert 1 <= fewer < usual[0]
    assert why is Reason.PROMPTS
    assert chosen(0) == usual
    assert chosen(1) == usual, "room for one is left"


def test_where_every_round_computes_prompts_drafts_that_slow_them_down_are_given_up() -> None:
    """The table alone says that they pay, and no round without prompts tells otherwise."""
    size, prompt_rows = 48, 64
    load = {
        "num_prefill_tokens": prompt_rows,
        "num_ended": 1,
        "num_ended_prompt_rows": prompt_rows,
        "num_ended_tokens": size,
    }

    def usual(slowed_ms: float) -> int:
        policy = goodput(GPU_TABLE, per_sequence=False)
        chosen = []
        for turn in range(1000):
            batch = replace(decode_batch(size), num_prompt_rows=prompt_rows)
            row_steps = list(policy.choose(batch).row_steps or [0] * size)
            kept = [min((row + turn) % 3, k) for row, k in enumerate(row_steps)]
            times = times_of(row_steps, size, GPU_8B)
            more = slowed_ms * any(row_steps)
            times = StepTimes(times.draft_ms, times.verify_ms + more, times.step_ms + more)
            heard = verified_round(kept, size, max(row_steps), row_steps=row_steps, times=times)
            policy.observe(replace(heard, **load))
            chosen.append(max(row_steps))
        return statistics.mode(chosen[-200:])

    assert usual(0.0) > 0
    assert usual(6.0) == 0


def test_rounds_beside_prompts_say_nothing_of_how_fast_speculation_is() -> None:
    policy = goodput()
    for steps, ms in ((1, 90.0), (0, 1.0)) * 60:
        told = verified_round([0], 1, steps, times=StepTimes(steps * 1.0, ms - steps, ms))
        policy.observe(replace(told, num_prefill_tokens=64))
    slots: Any = policy.snapshot()["slots"]
    assert all(slot["speedup"] is None for slot in slots.values())


def test_a_row_drafts_from_its_text_once_it_repeats_itself_until_that_misleads() -> None:
    policy = goodput(initial_steps=0)
    taken = []
    for found, kept, num_rounds in ((0, 0, 100), (7, 7, 60), (7, 0, 300)):
        for _ in range(num_rounds):
            steps = policy.choose(replace(decode_batch(1), text_steps=[found]))
            from_text = min(found, (steps.text_steps or [0])[0])
            of_model = 0 if from_text else max(steps.row_steps or [steps.shape.depth])
            told = verified_round(
                [min(kept, from_text)],
                1,
                of_model,
                row_steps=[from_text or of_model],
                is_from_text=[from_text > 0],
                num_drafting=of_model > 0,
                deepest=of_model,
                num_text_drafts=from_text,
            )
            policy.observe(told)
            taken.append(from_text)
    assert not any(taken[:100])
    assert taken[100] > 0, "in the round that finds it"
    assert min(taken[140:160]) == 7
    assert sum(steps > 0 for steps in taken[-40:]) < 8


def test_easy_requests_of_a_batch_draft_and_hard_ones_do_not() -> None:
    """Where verified rows are dear: a large batch on a GPU."""
    size, easy = 128, 64
    policy = goodput(GPU_TABLE)
    draft_for_a_while(policy, size, lambda row, turn: 7 if row < easy else 0, 200)
    row_steps = no_probe(policy, decode_batch(size)).row_steps or [0] * size
    assert min(row_steps[:easy]) >= 1
    assert max(row_steps[easy:]) == 0


def test_between_two_plans_each_request_keeps_its_drafts_wherever_its_row_is() -> None:
    size = 128
    policy = goodput(GPU_TABLE)
    draft_for_a_while(policy, size, lambda row, turn: 7 * (row % 2), 100)
    batch = decode_batch(size)
    present = list(batch.request_ids)
    planned = dict(zip(present, policy.choose(batch).row_steps or [], strict=True))
    assert len(set(planned.values())) > 1, "all alike, anything would hold"
    for request_ids in (
        present[::-1],
        ["joined", *present[1:]],
        [*present[1:], "joined"],
        present,
    ):
        steps = policy.choose(replace(batch, request_ids=request_ids))
        assert not steps.notes.is_probe
        rows = zip(request_ids, steps.row_steps or [], strict=True)
        assert all(k == planned[name] for name, k in rows if name != "joined")


def test_requests_that_left_leave_no_state(traces: TraceSet) -> None:
    policy = goodput()
    Simulator(policy, traces, TWO_CPU_CORES).run(Phase("mixture", 8, 40, 64))
    assert policy.survival.num_requests == 0


def test_after_a_change_of_text_it_finds_the_new_best_depth(traces: TraceSet) -> None:
    policy = goodput(GPU_TABLE)
    simulator = Simulator(policy, traces, GPU_8B)
    simulator.run(Phase("unpredictable", 64, 256, 96))
    shallow = simulator.run(Phase("unpredictable", 64, 256, 96))
    deep = simulator.run(Phase("predictable", 64, 256, 96))
    assert deep.num_draft_tokens / deep.num_rows > 1.5 * shallow.num_draft_tokens / shallow.num_rows


def controller(said: list[str], **keys: object) -> AdaptiveController:
    return AdaptiveController(PolicySettings(DraftShape.chain(2), **keys), TABLE, said.append)  # type: ignore[arg-type]


def play(made: AdaptiveController, size: int, times: StepTimes) -> int:
    """One round in which nothing is kept and that takes `times`; its tier."""
    steps = made.choose_steps(decode_batch(size))
    row_steps = list(steps.row_steps or [steps.shape.depth] * size)
    made.on_verify_complete(
        verified_round([0] * size, size, steps.shape.depth, row_steps=row_steps, times=times)
    )
    return steps.shape.depth


UNUSABLE_TIMES = {
    "not a number": StepTimes(1.0, 5.0, math.nan),
    "no draft time": StepTimes(math.nan, 5.0, 8.0),
    "no verify time": StepTimes(1.0, math.nan, 8.0),
    "endless": StepTimes(1.0, 5.0, math.inf),
    "the clock went back": StepTimes(1.0, 5.0, -8.0),
    "the device's clock went back": StepTimes(1.0, -5.0, 8.0),
    "the clock jumped": StepTimes(1.0, 5.0, 3.6e6),
    "both clocks jumped": StepTimes(3.6e6, 3.6e6, 7.2e6),
    "no time at all": StepTimes(0.0, 0.0, 0.0),
}


@pytest.mark.parametrize("times", UNUSABLE_TIMES.values(), ids=UNUSABLE_TIMES)
def test_a_broken_clock_ends_in_a_fixed_tier_said_once(times: StepTimes) -> None:
    said: list[str] = []
    made = controller(said)
    for _ in range(3 * MAX_BAD_TIMES):
        play(made, 2, times)
    assert len(said) == 1
    assert "times in a row" in said[0]
    assert made.choose_steps(decode_batch(2)).shape.depth == 0
    assert made.snapshot()["last_reason"] == "fallback"
    assert made.snapshot()["fallback"] is not None


def times_table(factor: float) -> CostTable:
    """`TABLE` as a machine has it that takes `factor` times as long."""
    return TABLE.model_copy(
        update={
            field: tuple(
                tuple(tuple(ms * factor for ms in line) for line in grid)
                for grid in getattr(TABLE, field)
            )
            for field in ("draft_ms", "verify_ms")
        }
    )


@pytest.mark.parametrize(
    ("factor", "num_rounds"), [(1e-3, MOST_PLAN_ROUNDS + 1), (1e3, 3 * MAX_BAD_TIMES)]
)
def test_costs_of_another_machine_end_in_a_fixed_tier_said_once(
    factor: float, num_rounds: int
) -> None:
    """A table that was damaged, or copied, and still reads as one.

    Rounds that are taken to be short are looked at together, so it takes more of them.
    """
    said: list[str] = []
    foreign = times_table(factor)
    made = AdaptiveController(PolicySettings(DraftShape.chain(2)), foreign, said.append)
    for _ in range(num_rounds):
        play(made, 2, StepTimes(1.6, 8.0, 9.8))
    assert len(said) == 1
    assert play(made, 2, StepTimes(1.6, 8.0, 9.8)) == 0


def test_a_clock_that_recovers_gets_its_policy_back_and_a_hiccup_takes_it_not_away() -> None:
    """Broken for longer than it takes to try again, and still said once."""
    said: list[str] = []
    made = controller(said)
    tiers = []
    for n in range(2 * FALLBACK_ROUNDS + 200):
        steps = made.choose_steps(decode_batch(1))
        tiers.append(made.snapshot()["last_reason"])
        row_steps = list(steps.row_steps or [steps.shape.depth])
        times = times_of(row_steps, 1)
        if n < FALLBACK_ROUNDS + 50:
            times = StepTimes(1.0, 5.0, math.nan)
        elif n % 20 == 7:
            times = StepTimes(times.draft_ms, 5000.0, 5000.0 + times.step_ms)
        made.on_verify_complete(
            verified_round([0], 1, steps.shape.depth, row_steps=row_steps, times=times)
        )
    assert tiers.count("fallback") == 2 * (FALLBACK_ROUNDS - 1)
    assert made.snapshot()["fallback"] is None
    assert made.snapshot()["num_fallbacks"] == 2
    assert len(said) == 1


@pytest.mark.parametrize(
    ("broken", "complaint"), [("choose", "failed to choose"), ("observe", "failed to learn")]
)
@pytest.mark.parametrize("costs", [TABLE, None], ids=["goodput", "ema"])
def test_a_policy_that_breaks_is_replaced_for_a_while_and_the_engine_goes_on(
    broken: str, complaint: str, costs: CostTable | None
) -> None:
    said: list[str] = []
    made = AdaptiveController(PolicySettings(DraftShape.chain(2)), costs, said.append)
    setattr(made._policy, broken, None)
    first, *later = [play(made, 2, times_of([1, 1], 2)) for _ in range(FALLBACK_ROUNDS + 1)]
    assert (first == 0) == (broken == "choose")
    assert later[:-2] == [0] * (FALLBACK_ROUNDS - 2)
    assert later[-1] > 0, "it is tried again"
    assert len(said) == 1
    assert complaint in said[0]
    made.reconfigure({"min_dwell_rounds": 8})
    assert made.snapshot()["fallback"] is None, "an operator may bring it back"


def test_until_there_are_costs_ema_decides_and_then_goodput_does() -> None:
    said: list[str] = []
    made = AdaptiveController(PolicySettings(DraftShape.chain(2)), None, said.append)
    for _ in range(60):
        k = made.choose_steps(decode_batch(2)).shape.depth
        made.on_verify_complete(verified_round([k, k], 2, k, times=times_of([k, k], 2)))
    shown = made.snapshot()
    assert (shown["strategy"], shown["speculative_num_steps"]) == ("ema", 7)
    assert shown["fallback"] is None
    made.use_costs(TABLE)
    assert play(made, 2, times_of([1, 1], 2)) > 0
    shown = made.snapshot()
    assert (shown["strategy"], shown["last_reason"]) == ("goodput", "reconfigured")
    assert not said


@pytest.mark.parametrize("factor", [1e-3, 1e3])
def test_rough_costs_that_rounds_contradict_make_way_for_ema(factor: float) -> None:
    """A start on a busy machine may find all rounds to take a hundred times as long."""
    said: list[str] = []
    made = AdaptiveController(
        PolicySettings(DraftShape.chain(2)), times_table(factor), said.append, costs_are_rough=True
    )
    for _ in range(MOST_PLAN_ROUNDS + 1):
        play(made, 2, StepTimes(1.6, 8.0, 9.8))
    assert made.snapshot()["strategy"] == "ema"
    assert made.snapshot()["fallback"] is None
    assert not said


def test_goodput_may_be_asked_for_while_there_are_no_costs() -> None:
    made = AdaptiveController(PolicySettings(DraftShape.chain(2)), None)
    made.reconfigure({"min_dwell_rounds": 3})
    assert made.weighs_costs
    assert made.snapshot()["strategy"] == "ema"
    made.use_costs(TABLE)
    assert made.snapshot()["strategy"] == "goodput"
    made.reconfigure({"speculative_adaptive": False, "speculative_num_steps": 1})
    assert not made.weighs_costs
    made.use_costs(TABLE)
    assert made.snapshot()["strategy"] == "static", "costs change no strategy"


def test_rounds_of_which_no_row_goes_on_teach_what_they_cost_and_nothing_else() -> None:
    said: list[str] = []
    made = controller(said)
    expected = made.snapshot()["acceptance"]
    for _ in range(40):
        shape = made.choose_steps(decode_batch(1)).shape
        ended = verified_round([], 1, 0, row_steps=[], times=times_of([0], 1))
        made.on_verify_complete(replace(ended, shape=shape))
    costs: Any = made.snapshot()["costs"]
    assert costs["host_ms"].keys() == {"1"}
    assert made.snapshot()["acceptance"] == expected
    assert not said
