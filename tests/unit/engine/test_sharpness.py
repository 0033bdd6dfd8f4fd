"""Rounds draft at the sharpness that their plan names, and no text notices."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle

import pytest

from serve_spec.core.draft_shape import DraftShape
from serve_spec.core.record import StepRecord
from serve_spec.core.request import SamplingParams
from serve_spec.core.round import DecodeBatch, RoundSteps
from tests.helpers.engines import MakeLLM, SwitchingController, texts

STEPS = 4
BLUNT, ALIKE = 0.2, 1.0


class SharpnessEveryRound(SwitchingController):
    """Another sharpness every round; remembers which drafts each of them gave and lost."""

    def __init__(self, tier: int | DraftShape) -> None:
        super().__init__([tier], ragged=False)
        self.lost = {BLUNT: 0, ALIKE: 0}
        self.drafted = {BLUNT: 0, ALIKE: 0}
        self._sharpnesses = cycle([BLUNT, ALIKE])

    def choose_steps(self, batch: DecodeBatch) -> RoundSteps:
        return replace(super().choose_steps(batch), draft_sharpness=next(self._sharpnesses))

    def on_verify_complete(self, verified: StepRecord) -> None:
        sharpness, drafted = verified.draft_sharpness, sum(verified.row_steps)
        self.drafted[sharpness] += drafted
        self.lost[sharpness] += drafted - sum(verified.row_correct_drafts)
        assert verified.is_sampled == (True,) * len(verified.row_steps)


@pytest.mark.parametrize(("tier", "topk"), [(STEPS, 1), (DraftShape(2, 6, 2), 2)])
def test_each_round_drafts_at_the_sharpness_of_its_plan(
    make_llm: MakeLLM, tier: int | DraftShape, topk: int
) -> None:
    """The target is its own draft: at sharpness 1 it knows every token, at 0.2 it does not.

    Of a tree with all that its beams meet, the first branch is the chain.
    """
    prompts = [[3 + i, *range(20, 26)] for i in range(4)]
    params = [
        SamplingParams(max_tokens=40, temperature=1.0, seed=i, ignore_eos=True) for i in range(4)
    ]
    llm = make_llm("STANDALONE", STEPS, speculative_eagle_topk=topk)
    controller = SharpnessEveryRound(tier)
    llm.engine.worker.init_states(controller.shapes)
    llm.engine.controller = controller  # type: ignore[assignment]
    assert texts(llm.generate(prompts, params)) == texts(make_llm().generate(prompts, params))
    assert controller.lost[ALIKE] == 0 < controller.drafted[ALIKE]
    assert controller.lost[BLUNT] > controller.drafted[BLUNT] / 4
