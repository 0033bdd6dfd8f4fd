"""Prompts on lanes, as `tests/unit/engine/test_prompts_on_lanes.py` has them, from CUDA graphs."""

import pytest

from tests.unit.engine.test_prompts_on_lanes import (
    test_drafts_after_a_prompt_are_kept_as_often_as_after_an_eager_one,
    test_longer_prompts_are_computed_eagerly_and_mix_with_lanes,
    test_prompts_that_arrive_while_others_decode_need_no_eager_round,
)

__all__ = [
    "test_drafts_after_a_prompt_are_kept_as_often_as_after_an_eager_one",
    "test_longer_prompts_are_computed_eagerly_and_mix_with_lanes",
    "test_prompts_that_arrive_while_others_decode_need_no_eager_round",
]

pytestmark = pytest.mark.gpu
