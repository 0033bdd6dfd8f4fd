"""Static buffers of a step, which its stages read and write."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serve_spec.core.draft import NgramDrafts
from serve_spec.core.round import AS_DRAWN, Calibration
from serve_spec.log import get_logger
from serve_spec.ops.dispatch import to_device
from serve_spec.ops.rejection import DraftLogits
from serve_spec.structured.masks import RoundMasks
from serve_spec.worker.request_slots import RequestSlots

logger = get_logger(__name__)


class GrammarMasks:
    """Static grammar masks of a step, for up to B requests of N drafts over V token ids.

    `places` int32 [B, N + 1]: the row of `words` for the draw after each request's root and drafts,
    -1 without a mask. `words` int32 [max_draws, ceil(V / 32)].
    """

    def __init__(self, slots: RequestSlots, max_drafts: int, max_draws: int) -> None:
        device, shape = slots.lengths.device, (slots.padding, max_drafts + 1)
        self.places = torch.full(shape, -1, dtype=torch.int32, device=device)
        num_words = -(-slots.vocab_size // 32)
        self.words = torch.zeros(max_draws, num_words, dtype=torch.int32, device=device)
        self._is_clear = True

    def write(self, masks: RoundMasks) -> None:
        """Write the masks of the next step, without waiting for the device."""
        self.clear()
        device = self.places.device
        table = np.full((len(masks.num_drafts), self.places.shape[1]), -1, np.int32)
        table[np.arange(table.shape[1]) <= np.array(masks.num_drafts)[:, None]] = masks.places
        places = to_device(torch.from_numpy(table), device)
        words = to_device(torch.from_numpy(masks.words.view(np.int32)), device)
        self.places[: len(places)] = places
        self.words[: len(words)] = words
        self._is_clear = False

    def clear(self) -> None:
        """Remove all masks."""
        if not self._is_clear:
            self.places.fill_(-1)
            self._is_clear = True


class DraftVocabulary(NamedTuple):
    """The ids that drafts are drawn from: their number, Vd, and the target's id of each.

    target_ids: int64 [Vd]; None if both are the same.
    """

    size: int
    target_ids: Tensor | None


class ReadBack(NamedTuple):
    """A copy of `StepBuffers.read_back` on the host, and its columns."""

    memory: Tensor
    results: NDArray[np.int32]
    query_lens: NDArray[np.int32]
    draft_logprobs: NDArray[np.float32]


class StepBuffers:
    """Inputs, intermediate results and outputs of a step: up to B requests of N drafts, K deep.

    `request_slots` int32 [B]: each request's slot, the padding slot past the last. `depths` int32
    [B]: levels of its drafts. `query_lens` int32 [B]: tokens the target verifies, its drafts and
    the root, and 0 past the last. `given` int32 [B]: the first drafts of each that are not a draft
    model's; they are in `drafts` before it drafts. `kinds` int32 [B]: see `Calibration`.
    `drafts` int64 [B, N]: -1 where the draft gave no token.
    `draft_logprobs` float32 [B, N]: log probability of each draft when it was drawn; see
    `ops.draw.draw_children`, `sample_drafts`, `NgramDrafts.probability`.
    `results` int32 [B, K + 3]: accepted drafts, flags, then the tokens; see `ops.acceptance`.
    `read_back` int32 [B · (K + N + 4)]: the memory of `results`, `query_lens` and `draft_logprobs`.
    `budget` int32 [1], `calibration` float32 [4, K, 2]: see `ops.admission`.
    `sharpness` float32 [1]: temperature of sampled drafts over their requests'. `masks`: grammar
    masks. `chunks`: prefill chunks.
    For trees: `parents` int32 [B, N], the draft before each counted from 1, 0 for the root; `paths`
    int32 [B, K + 1], see `AcceptedPath`.
    For sampled drafts: `draft_logits`, from which those in `drafts` were drawn.
    """

    def __init__(
        self,
        slots: RequestSlots,
        max_depth: int,
        max_chunk_tokens: int,
        max_tree_drafts: int = 0,
        *,
        max_draws: int,
        sampled_from: DraftVocabulary | None = None,
        draft_sharpness: float = 1.0,
    ) -> None:
        """Make empty buffers for as many requests as there are slots.

        max_tree_drafts: drafts of the largest tree; 0 if only chains are drafted.
        max_draws: most roots and drafts of a step.
        sampled_from: of drafts that are sampled from distributions of their own, if they are.
        Raises MemoryError: the distributions of sampled drafts do not fit.
        """
        device, max_requests = slots.lengths.device, slots.padding

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        most = max(max_depth, max_tree_drafts)
        sizes = [max_requests * width for width in (max_depth + 3, 1, most)]
        self.read_back = zeros(sum(sizes))
        results, query_lens, logprobs = self.read_back.split(sizes)
        self.slots = slots
        self.max_requests, self.max_depth, self.max_drafts = max_requests, max_depth, most
        self.request_slots = torch.full_like(zeros(max_requests), slots.padding)
        self.depths = zeros(max_requests)
        self.query_lens: Tensor = query_lens
        self.given = zeros(max_requests)
        self.kinds = zeros(max_requests)
        self.drafts = zeros(max_requests, most, dtype=torch.int64)
        self.draft_logprobs: Tensor = logprobs.view(torch.float32).view(max_requests, most)
        self.results: Tensor = results.view(max_requests, max_depth + 3)
        self.budget = zeros(1)
        self.calibration = zeros(len(AS_DRAWN), max(1, max_depth), 2, dtype=torch.float32)
        self.sharpness = torch.full((1,), draft_sharpness, device=device)
        self.masks = GrammarMasks(slots, most, max_draws)
        self.chunks = PrefillChunks(max_chunk_tokens, max_requests, device)
        self.parents = zeros(max_requests, most) if max_tree_drafts else None
        self.paths = zeros(max_requests, max_depth + 1) if max_tree_drafts else None
        self.draft_logits: DraftLogits | None = None
        if sampled_from is not None and max_depth:
            self.draft_logits = _draft_logits(slots, max_depth, sampled_from)

    def write_requests(
        self,
        slots: Sequence[int],
        depths: Sequence[int],
        num_drafts: Sequence[int],
        given: Sequence[int] = (),
    ) -> None:
        """Write slot, depth and numbers of drafts of a step's requests, without waiting."""
        empty = [0] * (self.max_requests - len(slots))
        padded = [*slots, *[self.slots.padding] * len(empty)]
        query_lens = [*(count + 1 for count in num_drafts), *empty]
        num_given = [*given, *[0] * (self.max_requests - len(given))]
        rows = torch.tensor([padded, query_lens, [*depths, *empty], num_given], dtype=torch.int32)
        if self.request_slots.is_cuda:
            rows = rows.pin_memory()
        self.request_slots.copy_(rows[0], non_blocking=True)
        self.query_lens.copy_(rows[1], non_blocking=True)
        self.depths.copy_(rows[2], non_blocking=True)
        self.given.copy_(rows[3], non_blocking=True)

    def keeping_given(self, num_requests: int, draft: Callable[[], None]) -> None:
        """Call `draft`, which writes drafts of the first requests; keep those that are given."""
        reqs, columns = slice(num_requests), (self.drafts, self.draft_logprobs, self.parents)
        written = [x[reqs] for x in columns if x is not None]
        before = [x.clone() for x in written]
        draft()
        place = torch.arange(self.max_drafts, device=self.given.device)
        is_given = place < self.given[reqs].unsqueeze(1)
        for now, kept in zip(written, before, strict=True):
            now.copy_(kept.where(is_given, now))

    def write_budget(self, budget: int, kinds: Sequence[int], calibration: Calibration) -> None:
        """Write how many drafts to admit, their kinds and the calibration, without waiting.

        Kinds that a policy left out are as drawn.
        """
        device, width = self.calibration.device, self.calibration.shape[1]
        kinds_of_all = [*calibration, *AS_DRAWN[len(calibration) :]]
        padded = [[*kind[:width], *kind[-1:] * (width - len(kind))] for kind in kinds_of_all]
        self.budget.fill_(budget)
        self.kinds[: len(kinds)] = to_device(torch.tensor(kinds, dtype=torch.int32), device)
        self.calibration.copy_(to_device(torch.tensor(padded), device))

    def host_copy(self, *, pin_memory: bool) -> ReadBack:
        """Return memory of the host for a copy of `read_back`."""
        memory = torch.empty_like(self.read_back, device="cpu", pin_memory=pin_memory)
        first, end = self.results.numel(), self.results.numel() + len(self.query_lens)
        results, query_lens, logprobs = np.split(memory.numpy(), [first, end])
        return ReadBack(
            memory,
            results.reshape(self.results.shape),
            query_lens,
            logprobs.view(np.float32).reshape(self.draft_logprobs.shape),
        )

    def write_drafts(self, drafts: Mapping[int, NgramDrafts]) -> None:
        """Write n-gram and grammar drafts by the request's index in the step, without waiting."""
        _write_rows(self.drafts, {at: found.token_ids for at, found in drafts.items()})
        logprobs = torch.tensor([[math.log(found.probability)] for found in drafts.values()])
        members = to_device(torch.tensor([*drafts]), self.draft_logprobs.device)
        self.draft_logprobs[members] = to_device(logprobs, self.draft_logprobs.device)
        parents = {at: found.parents for at, found in drafts.items() if found.parents}
        if parents:
            assert self.parents is not None, "a step with trees has room for parents"
            _write_rows(self.parents, parents)

    def write_forced(self, forced: Mapping[int, tuple[int, Sequence[int]]]) -> None:
        """Write grammar drafts behind a model's, see `RoundMasks.forced`, without waiting."""
        if not forced:
            return
        places = [
            (at, start + place, token)
            for at, (start, token_ids) in forced.items()
            for place, token in enumerate(token_ids)
        ]
        row, column, token = to_device(torch.tensor(places), self.drafts.device).unbind(1)
        self.drafts[row, column] = token
        self.draft_logprobs[row, column] = -1e-6  # certain


@torch.inference_mode()
def _draft_logits(slots: RequestSlots, max_depth: int, drafts: DraftVocabulary) -> DraftLogits:
    device, vocab_size = slots.lengths.device, slots.vocab_size
    shape = (slots.padding, max_depth, drafts.size)
    mebibytes = 4 * math.prod(shape) / 2**20
    try:
        logits = DraftLogits.create(shape, drafts.target_ids, vocab_size, device)
    except torch.OutOfMemoryError as error:
        raise MemoryError(
            f"num_steps={max_depth}, max_num_seqs={slots.padding}: the device has no memory left "
            f"for the distributions of sampled drafts, {mebibytes:.0f} MiB. Lower memory_fraction, "
            "max_num_seqs or the candidate steps, or use rejection_sample_method=coupled"
        ) from error
    logger.info("sampled drafts: %.0f MiB for their distributions", mebibytes)
    return logits


def _write_rows(table: Tensor, values: Mapping[int, Sequence[int]]) -> None:
    width = table.shape[1]
    rows = [[number, *row, *[0] * (width - len(row))] for number, row in values.items()]
    written = to_device(torch.tensor(rows, dtype=torch.int64), table.device)
    table.index_copy_(0, written[:, 0], written[:, 1:].to(table.dtype))


class Chunk(NamedTuple):
    """Consecutive tokens of one request, the first at position `start`."""

    request_slot: int
    start: int
    token_ids: Sequence[int]


class PrefillChunks:
    """The chunks of a step: at most P chunks and `max_tokens` tokens.

    `table` int32 [3, P]: its rows are `request_slots`, `starts` (the position of each chunk's first
    token) and `lens` (0 past the last chunk).
    `tokens` int64 [max_tokens]: the tokens of all chunks, one after another.
    """

    def __init__(self, max_tokens: int, max_chunks: int, device: torch.device) -> None:
        self.max_tokens, self.max_chunks = max_tokens, max_chunks
        self.table = torch.zeros(3, max_chunks, dtype=torch.int32, device=device)
        self.request_slots, self.starts, self.lens = self.table.unbind()
        self.tokens = torch.zeros(max_tokens, dtype=torch.int64, device=device)

    def write(self, chunks: Iterable[Chunk]) -> int:
        """Write chunks without waiting for the device. Return their number."""
        given = [chunk for chunk in chunks if chunk.token_ids]
        table = torch.zeros(self.table.shape, dtype=torch.int32)
        if given:
            rows = [(slot, start, len(tokens)) for slot, start, tokens in given]
            table[:, : len(rows)] = torch.tensor(rows, dtype=torch.int32).t()
        tokens = torch.tensor([token for chunk in given for token in chunk.token_ids] or [0])
        if self.table.is_cuda:
            table, tokens = table.pin_memory(), tokens.pin_memory()
        self.table.copy_(table, non_blocking=True)
        self.tokens[: len(tokens)].copy_(tokens, non_blocking=True)
        return len(given)

    def tokens_of(self, index: Tensor) -> Tensor:
        """Return the chunk tokens int64 [T] at `index` [T]; any token if that is out of range."""
        return self.tokens[index.long().clamp(0, self.max_tokens - 1)]


def grouped(chunks: Iterable[Chunk], max_tokens: int, max_chunks: int) -> Iterator[list[Chunk]]:
    """Yield groups of chunks of at most `max_tokens` tokens, cutting chunks that do not fit."""
    group: list[Chunk] = []
    room = max_tokens
    for slot, start, token_ids in chunks:
        while token_ids:
            count = min(room, len(token_ids))
            group.append(Chunk(slot, start, token_ids[:count]))
            start, token_ids, room = start + count, token_ids[count:], room - count
            if not room or len(group) == max_chunks:
                yield group
                group, room = [], max_tokens
    if group:
        yield group
