"""Rounds draft at the sharpness that their plan names, and no text notices."""

from __future__ import annotations

from collections import Counter
from itertools import cycle

import pytest

from serve_spec.core.draft_shape import DraftShape
from serve_spec.core.request import SamplingParams
from serve_spec.core.round import RoundSteps
from tests.helpers.engines import FakeController, MakeLLM, control, texts

STEPS = 4
BLUNT, ALIKE = 0.2, 1.0


@pytest.mark.parametrize(
    ("shape", "topk"), [(DraftShape.chain(STEPS), 1), (DraftShape(2, 6, 2), 2)]
)
def test_each_round_drafts_at_the_sharpness_of_its_plan(
    make_llm: MakeLLM, shape: DraftShape, topk: int
) -> None:
    """The target is its own draft: at sharpness 1 it knows every token, at 0.2 it does not.

    Of a tree with all that its beams meet, the first branch is the chain.
    """
    prompts = [[3 + i, *range(20, 26)] for i in range(4)]
    params = [
        SamplingParams(max_tokens=40, temperature=1.0, seed=i, ignore_eos=True) for i in range(4)
    ]
    llm = make_llm("STANDALONE", STEPS, speculative_eagle_topk=topk)
    sharpnesses = cycle([BLUNT, ALIKE])
    controller = control(
        llm,
        FakeController([shape], lambda _: RoundSteps(shape, draft_sharpness=next(sharpnesses))),
    )
    assert texts(llm.generate(prompts, params)) == texts(make_llm().generate(prompts, params))
    lost, drafted = Counter[float](), Counter[float]()
    for step in controller.told:
        assert step.is_sampled == (True,) * len(step.row_steps)
        drafted[step.draft_sharpness] += sum(step.row_steps)
        lost[step.draft_sharpness] += sum(step.row_steps) - sum(step.row_correct_drafts)
    assert lost[ALIKE] == 0 < drafted[ALIKE]
    assert lost[BLUNT] > drafted[BLUNT] / 4
