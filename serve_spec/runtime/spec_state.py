"""One tier: everything built for one shape of drafts."""

from __future__ import annotations

from dataclasses import dataclass

from serve_spec.core.context import AttentionBackend
from serve_spec.core.draft_shape import DraftShape
from serve_spec.runtime.graphs import StageGraphs, VerifyGraphs


@dataclass(frozen=True)
class LaneStages:
    """The stages of a decode round on lanes, at every size the tier can meet.

    `extend` makes up to depth + 1 draft entries per sequence, `draft` the drafts, both by batch
    size; `verify` runs the target and the verdict, by rows.
    """

    extend: StageGraphs
    draft: StageGraphs
    verify: VerifyGraphs


@dataclass(frozen=True)
class SpecRuntimeState:
    """A tier, built once at start. Choosing it is one look-up, changing it one reference.

    The three stages are the drafter's chain steps, the target's verification and the drafter's
    catch-up over accepted tokens ("extend"); each owns its attention state. Without a drafter
    there is only verification. `stages` are the same three where decode rounds run on lanes.
    """

    shape: DraftShape
    draft: AttentionBackend | None
    verify: AttentionBackend
    extend: AttentionBackend | None
    stages: LaneStages | None = None
