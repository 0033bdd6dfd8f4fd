"""What a policy has learned outlives a restart; a state that does not fit changes nothing."""

import copy
import json
import re
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.simulator import Phase, Simulator
from serve_spec.adaptive import AdaptiveController, PolicySettings
from serve_spec.adaptive.candidates import SMALL_TREES, AllowedShapes
from serve_spec.adaptive.controller import FALLBACK_ROUNDS
from serve_spec.adaptive.goodput import GoodputPolicy
from serve_spec.bench.trace import load_traces
from serve_spec.core.draft import PLAIN, DraftShape
from tests.helpers.rounds import decode_batch, verified_round
from tests.helpers.simulated_costs import GPU_8B, noisy, recorded_table

TRACES = load_traces(Path("tests/data/logprob_traces.json"))
SIZES = (1, 2, 8, 32)
TREES = sorted({tree for trees in SMALL_TREES.values() for tree in trees})
TABLE = recorded_table(GPU_8B, SIZES, trees=TREES)
SETTINGS = PolicySettings(DraftShape.chain(3), min_dwell_rounds=0, has_small_trees=True)


def goodput(table=TABLE):
    return GoodputPolicy(table, AllowedShapes(trees=SMALL_TREES))


def answers(policy, phase):
    """Play a phase; return every round that the policy asked for, and its calibration."""
    rounds = []

    def add(batch, steps, record):
        rounds.append((steps, steps.calibration))

    Simulator(policy, TRACES, noisy(GPU_8B, 0.02), on_round=add).run(phase)
    return rounds


def restarted(state):
    """Return a state as it comes back from a file."""
    return json.loads(json.dumps(state, allow_nan=False))


@pytest.mark.parametrize("kind", ["predictable", "heated", "mixture", "unpredictable"])
def test_a_restored_policy_decides_as_the_saved_one(kind):
    saved, restored, fresh = goodput(), goodput(), goodput()
    answers(saved, Phase(kind, 8, 32, 64, 0.4))
    restored.restore(restarted(saved.state()))
    assert restored.state() == saved.state()
    phase = Phase(kind, 32, 64, 64, 0.4)
    decided = answers(saved, phase)
    assert answers(restored, phase) == decided
    assert restored.state() == saved.state()
    assert answers(fresh, phase) != decided, "what was learned makes a difference"


def controller(policy_settings=SETTINGS, table=TABLE, warn=lambda warning: None):
    return AdaptiveController(policy_settings, table, warn)


def play(target, num, kept, size=2):
    """Run rounds of which each request keeps `kept` drafts at most; return the depths."""
    depths = []
    for _ in range(num):
        shape = target.choose_steps(decode_batch(size)).shape
        depths.append(shape.depth)
        correct = [min(kept, shape.depth)] * size
        record = verified_round(correct, size, shape.depth)
        target.on_verify_complete(record)
    return depths


def learned(kept=0, num=200, **kwargs):
    """Return the state of a controller that has seen as many drafts accepted."""
    target = controller(**kwargs)
    play(target, num, kept)
    return restarted(target.state())


def first_rate(target):
    return target.snapshot()["acceptance"]["positions"][0]["accept_rate"]


EMA = PolicySettings(DraftShape.chain(3), strategy="ema", min_dwell_rounds=0)


def test_strategy_ema_continues_in_every_slot():
    saved = controller(EMA)
    for size, kept in ((1, 7), (8, 0), (32, 1)):
        play(saved, 60, kept, size)
    restored = controller(EMA)
    restored.restore(restarted(saved.state()))
    assert restored.state() == saved.state()
    depths = [[play(each, 1, 0, size) for size in (1, 8, 32)] for each in (saved, restored)]
    assert depths[0] == depths[1]


@pytest.mark.parametrize("strategy", ["static", "per_request"])
def test_a_strategy_that_learns_nothing_lasting_has_nothing_to_keep(strategy):
    target = controller(PolicySettings(DraftShape.chain(3), strategy=strategy))
    play(target, 9, 1)
    assert target.state() == {}


def without(state, *path):
    del leaf(state, path)[path[-1]]


def leaf(state, path):
    for name in path[:-1]:
        state = state[name]
    return state


def replaced(*path, by):
    def change(state):
        leaf(state, path)[path[-1]] = by

    return change


RECENT = ("learned", "drafts", "recent", "0")
HESSIANS = ("learned", "drafts", "calibration", "hessians")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda state: state.clear(), "of {'policy': None"),
        (replaced("policy", by="other:Policy"), "'other:Policy'"),
        (replaced("version", by=0), "'version': 0"),
        (replaced("learned", by=[]), "learned=[]: no mapping"),
        (lambda state: without(state, "learned", "drafts"), "drafts=None: no mapping"),
        (lambda state: without(state, "learned", "costs", "rounds"), "rounds: of shape ()"),
        (replaced(*RECENT, "chains", "trials", by=[1.0] * 3), "of shape (3,)"),
        (replaced(*RECENT, "chains", "trials", by=[-1.0] * 7), "within their limits"),
        (replaced("learned", "drafts", "tree_gain", by="much"), "tree_gain='much': no numbers"),
        (replaced("learned", "drafts", "tree_gain", by=None), "finite"),
        (replaced(*RECENT, "trials", by=10**400), "no numbers"),
        (replaced(*HESSIANS, by=[[[[0.0] * 2] * 2] * 7] * 2), "less than the pull"),
        (replaced(*HESSIANS, by=[[[[99.0, 1.0], [0.0, 99.0]]] * 7] * 2), "not symmetric"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_in_one_line_and_changes_nothing(change, why):
    state = learned()
    change(state)
    target = controller()
    before = target.snapshot()
    with pytest.raises(ValueError, match=re.escape(why)) as caught:
        target.restore(state)
    assert "\n" not in str(caught.value)
    assert target.snapshot() == before


def test_a_state_of_other_slots_is_refused():
    target = controller(EMA)
    with pytest.raises(ValueError, match="current_steps=5"):
        target.restore(
            {**controller(EMA).state(), "learned": {"1": {"current_steps": 5}, "8": {}, "32": {}}}
        )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
KNOWN = learned(1)


def paths(value, path=()):
    """Yield the place of every mapping, list and number of a state."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for name, each in items if isinstance(value, dict | list) else ():
        if isinstance(each, dict | list):
            yield from paths(each, (*path, name))
        else:
            yield *path, name


PLACES = [path for path in paths(KNOWN) if path]


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(PLACES), JSON)
def test_whatever_a_state_holds_it_is_refused_or_decides_without_an_error(path, value):
    state = copy.deepcopy(KNOWN)
    leaf(state, path)[path[-1]] = value
    warnings = []
    target = controller(warn=warnings.append)
    with suppress(ValueError):
        target.restore(state)
    play(target, 24, 2)
    assert not warnings


@pytest.mark.parametrize("is_restored_first", [True, False])
def test_rates_of_the_fleet_stay_first(is_restored_first):
    fleet = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3]
    target, state = controller(), learned(kept=0)
    calls = [lambda: target.restore(state), lambda: target.start_from(fleet)]
    for call in calls if is_restored_first else calls[::-1]:
        call()
    assert first_rate(target) == pytest.approx(0.9)
    assert target.state()["learned"]["costs"] == state["learned"]["costs"]


def test_corrections_of_another_measurement_are_not_taken():
    saved = goodput()
    answers(saved, Phase("heated", 8, 32, 64, 0.4))
    other = TABLE.model_copy(update={"measured_s": TABLE.measured_s + 1.0})
    restored, same = goodput(other), goodput()
    state = restarted(saved.state())
    for policy in (restored, same):
        policy.restore(state)
    assert restored.snapshot()["acceptance"] == same.snapshot()["acceptance"]
    assert restored.snapshot()["costs"] == goodput().snapshot()["costs"] != same.snapshot()["costs"]


def test_while_costs_are_missing_what_is_known_waits_for_them():
    target, state = controller(table=None), learned(kept=0)
    target.restore(state)
    play(target, 9, 0)
    assert target.state() == {}, "the strategy that stands in must not replace what is kept"
    target.use_costs(TABLE)
    assert first_rate(target) < 0.1


def test_a_policy_that_fails_after_a_restart_is_built_without_what_it_knew(monkeypatch):
    target = controller()
    target.restore(learned(kept=0))
    with monkeypatch.context() as patch:
        patch.setattr(GoodputPolicy, "choose", lambda self, batch: 1 / 0)
        play(target, 1, 0)
    assert target.state() == {}
    assert set(play(target, FALLBACK_ROUNDS - 1, 0)) == {PLAIN.depth}
    play(target, 1, 0)
    assert target.snapshot()["fallback"] is None
    assert first_rate(target) > 0.5


def test_what_does_not_fit_after_a_live_change_is_left_out_with_one_warning():
    warnings = []
    target = controller(EMA, warn=warnings.append)
    play(target, 60, 7)
    target.restore(restarted(target.state()))
    target.reconfigure({"speculative_adaptive_config": {"candidate_steps": [3]}})
    target.reconfigure({"min_dwell_rounds": 3})
    (warning,) = warnings
    assert "before the restart is not used" in warning
    assert play(target, 3, 0)
