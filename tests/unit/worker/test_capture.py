"""Tiers are recorded once, share what they can, and say what they need where it does not fit."""

import logging
import re
from pathlib import Path
from typing import cast

import pytest
import torch

from serve_spec import LLM
from serve_spec.core.draft_shape import DraftShape
from serve_spec.runtime.graphs import PlainRecorder, Run
from serve_spec.worker.lane_worker import LaneWorker
from tests.helpers.engines import Pair, llm_maker, make_pair, switch_every_round


class SmallDevice(PlainRecorder):
    """Has room for so many stages."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def record(self, stage: Run) -> Run:
        if self.num_recorded == self.room:
            raise torch.OutOfMemoryError("no memory")
        return super().record(stage)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def llm(pair: Pair) -> LLM:
    return llm_maker(pair, "cpu")("EAGLE3", 3, execution="lanes", max_num_seqs=8)


def chains(*depths: int) -> list[DraftShape]:
    return list(map(DraftShape.chain, depths))


def worker_of(llm: LLM) -> LaneWorker:
    return cast(LaneWorker, llm.engine.worker)


def test_a_device_too_small_is_told_what_each_tier_takes_and_what_to_leave_out(llm: LLM) -> None:
    worker = worker_of(llm)
    whole = worker.recorder
    room = worker.recorded.report[0].num_stages + 2
    worker.recorder = SmallDevice(room)
    told = r"num_steps=1, max_num_seqs=8: .*tier 1: 2 stages, .* MiB.*before: tier 3: \d+ stages"
    with pytest.raises(MemoryError, match=told + ".*leave 1 out of the candidate steps"):
        worker.init_states(chains(1, 3))
    worker.recorder = whole
    worker.init_states(chains(3))


def test_after_the_start_nothing_is_recorded_whatever_is_chosen(llm: LLM) -> None:
    worker = worker_of(llm)
    worker.init_states(chains(0, 1, 2, 3))
    before = worker.recorder.num_recorded
    for batch_size in range(1, 9):
        for num_steps in range(4):
            tier = worker.recorded.tier_for(num_steps, batch_size)
            assert tier.shape.depth == num_steps
            assert tier.stages is not None
            assert tier.stages.verify.padded(batch_size * (num_steps + 1)) > 0
    llm.generate([[1, 2, 3]] * 3)
    assert worker.recorder.num_recorded == before


def test_trees_are_recorded_for_every_batch_size_before_the_first_request(pair: Pair) -> None:
    llm = llm_maker(pair, "cpu")(
        "EAGLE3", 2, execution="lanes", max_num_seqs=5, speculative_eagle_topk=3
    )
    worker = worker_of(llm)
    shapes = [DraftShape(4, 12, 3), DraftShape(2, 4, 3)]
    worker.init_states([*chains(0, 2), *shapes])
    assert set(worker.tiers) >= set(shapes)
    for shape in shapes:
        stages = worker.tiers[shape].stages
        assert stages is not None
        assert stages.draft.padded(5) == 5
        assert stages.verify.padded(5 * (shape.size + 1)) > 0
    # A deeper tree leaves more behind than the deepest chain makes up.
    assert worker.recorded.extend_for(5, 5).padded(5) == 5
    switch_every_round(llm, [*shapes, 2, 0])
    before = worker.recorder.num_recorded
    llm.generate([[1, 2, 3]] * 5)
    assert worker.recorder.num_recorded == before


def test_trees_a_device_has_no_room_for_are_named_with_the_way_out(pair: Pair) -> None:
    llm = llm_maker(pair, "cpu")("EAGLE3", 2, execution="lanes", speculative_eagle_topk=3)
    worker = worker_of(llm)
    worker.recorder = SmallDevice(4)
    with pytest.raises(MemoryError, match=r"num_draft_tokens=13, num_steps=4.*topk=1\)"):
        worker.init_states([*chains(0, 2), DraftShape(4, 12, 3)])


def test_tiers_of_one_width_share_the_stages_of_their_verification(llm: LLM) -> None:
    """2 and 3 drafts make rows of up to four; alone, tier 2 records no more of them."""
    worker = worker_of(llm)
    worker.init_states(chains(2, 3))
    by_steps = {tier.shape and tier.shape.depth: tier.num_stages for tier in worker.recorded.report}
    num_batch_sizes = 4  # 1, 2, 4, 8: a catch-up and a draft stage for each
    assert by_steps[2] == 2 * num_batch_sizes


def test_a_tier_no_policy_chooses_for_large_batches_is_recorded_for_small_ones(
    tmp_path: Path,
) -> None:
    pair = make_pair(tmp_path)
    slots = tmp_path / "slots.json"
    slots.write_text('{"1": {"candidate_steps": [1, 2, 3]}, "4": {"candidate_steps": [1]}}')
    llm = llm_maker(pair, "cpu")(
        "EAGLE3",
        3,
        execution="lanes",
        max_num_seqs=8,
        speculative_adaptive=True,
        speculative_adaptive_strategy="ema",
        speculative_adaptive_config=slots,
    )
    largest = {
        shape.depth: tier.stages.draft.sizes[-1]
        for shape, tier in worker_of(llm).tiers.items()
        if shape.depth and tier.stages is not None
    }
    # The deepest stands in for all, so it is recorded for every size.
    assert largest == {1: 8, 2: 3, 3: 8}
    recorded = worker_of(llm).recorded
    assert [recorded.tier_for(2, size).shape.depth for size in (3, 4, 8)] == [2, 3, 3]


def test_what_recording_took_is_told_tier_by_tier(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("serve_spec")
    before = logger.level
    logger.addHandler(caplog.handler)
    logger.setLevel(logging.INFO)
    try:
        llm = llm_maker(pair, "cpu")("EAGLE3", 3, execution="lanes", max_num_seqs=4)
    finally:
        logger.removeHandler(caplog.handler)
        logger.setLevel(before)
    (told,) = {r.getMessage() for r in caplog.records if "recorded: " in r.getMessage()}
    what = r"\d+ stages, \d+ MiB, \d+\.\d s"
    assert re.search(rf"tier 3: {what}; .*tier 0: {what}; .*prompts: {what}", told)
    report = worker_of(llm).recorded.report
    assert sum(tier.num_stages for tier in report) == worker_of(llm).recorder.num_recorded
