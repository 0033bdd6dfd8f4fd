"""The interface of drafters: what a worker asks of a draft model. Public, for plug-ins."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias

import torch

from serve_spec.core.draft import DraftShape
from serve_spec.core.errors import PluginError
from serve_spec.core.registry import import_object
from serve_spec.kvcache.pool import FeaturePool, PagedKVPool
from serve_spec.models.interfaces import DraftModel
from serve_spec.worker.graphs import StepSize
from serve_spec.worker.step_buffers import DraftVocabulary, StepBuffers


class Drafter(Protocol):
    """A draft model and how it drafts, for all requests of a step together.

    `DraftFamily.drafter` names its class, which is called with a head and `DraftMemory`.

    A step that drafts calls `extend_chunks` (for requests that lack many draft KV entries), then
    `extend`, then `draft`. A step that does not draft calls none of them, so draft KV is made
    lazily. Draft KV entry j belongs to position j of a text, and is made from the target's feature
    of that position, the token after it, or both. Before a request drafts, it needs those of all
    positions before its root, the newest token.

    All three methods read and write tensors on the device: `StepBuffers`, its `RequestSlots`, and
    what the drafter allocated when it was created. On a GPU each is captured as a CUDA graph at
    startup, once for every batch size and length or shape, and replayed. Therefore they must

    - do the same work whatever the tensors hold: sizes come from the arguments alone, no value is
      read by the host (`.item()`, `.tolist()`, a mask as index), and nothing is copied from or to
      the host;
    - keep results in tensors that live as long as the drafter, because memory that a graph
      allocates is used by the next one;
    - accept padding: requests in the padding slot, and tokens that no request owns. These write to
      the pool's scratch slot, and what is drafted for them is not read.

    Without a recorder (on a CPU) they run as they are, at the exact size.

    With tensor parallelism every rank calls the same methods in the same order. Drafts are then
    copied from rank 0, so their tokens may differ on other ranks, but not the number of tensors
    that are exchanged within a call.
    """

    dtype: torch.dtype
    """Compute dtype, part of the key of a cost table."""
    keeps_kv: bool
    """Whether there is draft KV. If not, `extend` and `extend_chunks` are never called."""
    first_entry: int
    """Number of the first draft KV entry of a text: 0, or -1 if one is made of the first token
    alone."""
    has_constant_cost: bool
    """Whether drafts of all depths cost the same. Then `draft` is captured once for each batch
    size, for the deepest chain, and any shallower one is its beginning."""

    def vocabulary(self) -> DraftVocabulary:
        """Return the ids that drafts are drawn from.

        Called once, on every rank, if drafts are sampled from distributions of their own.
        """

    def slots_past(self, shape: DraftShape) -> int:
        """Return the KV slots past a request's length that drafting and verifying a shape takes.

        At least `shape.size`, which the target takes; at most `MAX_TREE_TOKENS`. A request of a
        step with drafts has pages for them, unless it drafts nothing itself (`PLAIN`: 0).
        Called by the scheduler, on the host.
        """

    def extend_chunks(self, buffers: StepBuffers, size: StepSize) -> None:
        """Make the draft KV entries of `buffers.chunks`, for prompts and after long pauses.

        size: tokens and chunks, with padding. The tokens of a chunk (int64) are those after its
        positions. The worker writes `RequestSlots.draft_lengths` afterwards.
        """

    def extend(self, buffers: StepBuffers, num_requests: int, length: int) -> None:
        """Make the missing draft KV entries of the first `num_requests` requests.

        Each lacks at most `length`, of which the last is that of the position before the root.
        Entries that exist are not written; `RequestSlots.draft_lengths` int32 [slots] becomes the
        number of entries. A request that lacks more makes none: it does not draft in this step.
        """

    def draft(self, buffers: StepBuffers, num_requests: int, shape: DraftShape) -> None:
        """Draft a shape for the first `num_requests` requests, B.

        Write `buffers.drafts` int64 [B, :size], target ids, -1 where no token can be drawn;
        `buffers.draft_logprobs` float32 [B, :size], see there; of trees `buffers.parents` int32
        [B, :size]; if `buffers.draft_logits` is set, also the logits float32 [B, depth, Vd] that
        drafts were drawn from.

        `buffers.depths` and `buffers.query_lens` int32 [B] hold the levels, and drafts plus 1, of
        each request; chains hold any token past their depth. `buffers.given` int32 [B]: the first
        so many of `buffers.drafts` are not the model's, and stay whatever is written there. A model
        that reads its drafts goes on behind them. A request of depth 0 has no pages
        for drafts, so it must write no KV.
        """


class DraftMemory(NamedTuple):
    """What a drafter is created with, besides its model.

    pool: KV of its model, with the page ids of the target's. features: the target's, by slot.
    max_requests: most requests of a step, B.
    """

    pool: PagedKVPool
    features: FeaturePool
    max_requests: int


_ROOM = "serve_spec.worker.drafters"
DRAFTERS = {
    "autoregressive": f"{_ROOM}.autoregressive:AutoregressiveDrafter",
    "heads": f"{_ROOM}.heads:HeadsDrafter",
    "block": f"{_ROOM}.block:BlockDrafter",
}
"""Classes of drafters by the names that draft models use (`DraftModel.drafter`)."""


CreateDrafter: TypeAlias = Callable[[DraftModel, DraftMemory], Drafter]


def drafter_class(model: DraftModel) -> CreateDrafter:
    """Return the class that drafts with a draft model, imported now.

    Raises PluginError: a class of another package cannot be imported.
    """
    place = DRAFTERS.get(model.drafter, model.drafter)
    try:
        create: CreateDrafter = import_object(place)
    except PluginError as error:
        fix = "correct `drafter` of the draft model, or install the package that defines it"
        raise PluginError(f"drafter {model.drafter!r}: {error}; {fix}") from error
    return create
