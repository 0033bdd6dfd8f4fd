"""Policies of other packages: what is refused, and what a broken one costs."""

import sys

import pytest

from serve_spec.adaptive import AdaptiveController, PolicySettings, StaticPolicy, StepPolicy
from serve_spec.config import ConfigError
from serve_spec.core.draft import PLAIN, DraftShape
from serve_spec.core.round import RoundSteps
from tests.helpers.rounds import decode_batch, verified_round

CHAIN = DraftShape.chain
STRATEGY = "speculative_adaptive_strategy"


class Fixed(StepPolicy):
    """Always drafts as deep as it may."""

    def __init__(self, context):
        self.context = context
        self.shapes = (CHAIN(context.max_steps),)

    def choose(self, batch):
        return RoundSteps(self.shapes[0])

    def snapshot(self):
        return {}


class WithoutSnapshot(StepPolicy):
    def choose(self, batch):
        return RoundSteps(PLAIN)


class TooDeep(Fixed):
    def __init__(self, context):
        super().__init__(context)
        self.shapes = (CHAIN(context.max_steps + 1),)


class WithATree(Fixed):
    def __init__(self, context):
        super().__init__(context)
        self.shapes = (DraftShape(2, 5, 3),)


class Weighing(Fixed):
    needs_costs = True


NOT_A_POLICY = 3


def named(name):
    return f"{__name__}:{name}"


def settings(strategy, **fields):
    return PolicySettings(CHAIN(2), strategy=strategy, max_steps=4, **fields)


@pytest.mark.parametrize(
    ("strategy", "what", "fix"),
    [
        ("no_such_package.policy:Mine", "no_such_package.policy does not import", "install"),
        (named("Missing"), "has no Missing", "correct the name"),
        (named("NOT_A_POLICY"), "is not a subclass of serve_spec", "derive it in tests"),
        (named("settings"), "is not a subclass of serve_spec", "derive it in tests"),
        (named("WithoutSnapshot"), "lacks snapshot", "add it to tests"),
        ("serve_spec.adaptive:StaticPolicy", "StaticPolicy cannot be built", "repair serve_spec"),
        (named("TooDeep"), "shapes=['5']", "chains of at most 4 steps"),
        (named("WithATree"), "shapes=['2x5']", "chains of at most 4 steps"),
    ],
)
def test_a_policy_that_does_not_fit_is_refused_in_one_line(strategy, what, fix):
    with pytest.raises(ConfigError) as caught:
        _ = settings(strategy).shapes
    message = str(caught.value)
    assert message.startswith(f"{STRATEGY}={strategy!r}: ")
    problem, _, remedy = message.rpartition("; ")
    assert what in problem
    assert fix in remedy
    assert "\n" not in message


def test_a_module_that_fails_while_it_is_imported_is_refused(tmp_path, monkeypatch):
    (tmp_path / "broken_policies.py").write_text("raise RuntimeError('two\\nlines')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as caught:
        _ = settings("broken_policies:Mine").shapes
    assert "RuntimeError: two lines" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "broken_policies" not in sys.modules


@pytest.mark.parametrize("strategy", ["static", "ema"])
def test_nothing_is_imported_for_a_policy_that_is_not_used(strategy):
    named_but_off = settings("no_such_package.policy:Mine", adaptive=False)
    assert named_but_off.shapes == (CHAIN(2),)
    assert settings(strategy).shapes


def test_a_policy_is_built_from_what_the_draft_and_the_user_allow():
    tree = DraftShape(3, 6, 2)
    made = settings(named("Fixed"), tree=tree, token_counts=(8, 16))
    policy = made.build(9, None)
    assert made.shapes == (CHAIN(4),)
    context = policy.context
    assert (context.max_steps, context.initial_steps, context.token_counts) == (4, 4, (8, 16))
    assert tree in context.trees
    assert context.costs is None
    assert not made.needs_costs
    assert settings(named("Weighing")).needs_costs


@pytest.mark.parametrize(
    ("method", "answer"),
    [
        ("choose", RoundSteps(CHAIN(3))),
        ("choose", RoundSteps(CHAIN(4), steps_per_req=[1, 2, 3])),
        ("choose", None),
        ("forget", None),
        ("observe", None),
    ],
    ids=str,
)
def test_a_policy_that_misbehaves_gives_way_to_plain_rounds(monkeypatch, method, answer):
    warnings = []
    controller = AdaptiveController(settings(named("Fixed")), None, warnings.append)
    assert controller.choose_steps(decode_batch(2)).shape == CHAIN(4)

    def misbehave(*args):
        if answer is None:
            raise RuntimeError("defect")
        return answer

    monkeypatch.setattr(type(controller._policy), method, misbehave)
    controller.choose_steps(decode_batch(2))
    controller.on_verify_complete(verified_round([1, 1], 2, 4))
    controller.forget("0")
    assert controller.choose_steps(decode_batch(2)).shape == PLAIN
    assert len(warnings) == 1
    assert isinstance(controller._policy, StaticPolicy)


def test_a_snapshot_that_fails_does_not_stop_what_is_shown(monkeypatch):
    controller = AdaptiveController(settings(named("Fixed")))
    monkeypatch.setattr(Fixed, "snapshot", lambda self: 1 / 0)
    shown = controller.snapshot()
    assert shown["strategy"] == named("Fixed")
    assert "ZeroDivisionError" in shown["snapshot_error"]
    assert shown["candidate_steps"] == [4]
