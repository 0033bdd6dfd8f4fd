"""Puts decode rounds on lanes: from an eager worker to one that runs ahead of the host."""

from __future__ import annotations

import torch

from serve_spec.adaptive import PolicySettings
from serve_spec.config import ServeSpecConfig
from serve_spec.config.speculative import MAX_TREE_ROWS
from serve_spec.drafters.eagle import EagleDrafter
from serve_spec.drafters.eagle_lanes import EagleLaneDrafter
from serve_spec.runtime.graphs import GraphRecorder, PlainRecorder, Recorder
from serve_spec.runtime.lanes import RING_TOKENS, Lanes
from serve_spec.worker.lane_worker import LaneWorker
from serve_spec.worker.worker import SpecWorker


def runs_on_lanes(config: ServeSpecConfig, device: torch.device) -> bool:
    """Whether decode rounds are to keep their lengths on the device."""
    wanted = config.model.execution
    return device.type == "cuda" if wanted == "auto" else wanted == "lanes"


def put_on_lanes(
    eager: SpecWorker, config: ServeSpecConfig, policy: PolicySettings, max_model_len: int
) -> LaneWorker:
    """A worker whose decode rounds run on lanes, and all others as `eager` runs them."""
    device, pool = eager.device, eager.target.pool
    # Rounds in flight may run past the end of a text by all their drafts, twice; of trees only
    # what one keeps, and all of the other.
    max_pages = -(-(max_model_len + RING_TOKENS + MAX_TREE_ROWS) // pool.page_size)
    lanes = Lanes.create(
        config.scheduler.max_num_seqs, max_pages, pool.scratch_page, eager.vocab_size, device
    )
    return LaneWorker(
        eager,
        _lane_drafter(eager),
        lanes,
        _recorder(config, device),
        max_rows=config.scheduler.max_num_batched_tokens,
        largest_batch=policy.largest_batch,
    )


def _lane_drafter(eager: SpecWorker) -> EagleLaneDrafter | None:
    drafter = eager.drafter
    if drafter is None:
        return None
    assert isinstance(drafter, EagleDrafter), "lanes know EAGLE's drafts"
    return EagleLaneDrafter(drafter.head, drafter.pool, drafter.features, topk=drafter.topk)


def _recorder(config: ServeSpecConfig, device: torch.device) -> Recorder:
    if device.type == "cuda" and config.model.cuda_graphs:
        return GraphRecorder(device)
    return PlainRecorder()
