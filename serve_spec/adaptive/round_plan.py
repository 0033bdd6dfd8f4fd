"""What strategy `goodput` asks of the next rounds, as their batch changes a little."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from serve_spec.adaptive.entries import Entries
from serve_spec.adaptive.objective import Choice
from serve_spec.core.round import DecodeBatch


class RoundPlan:
    """Drafts per row for the next rounds: by request, and for requests that join meanwhile.

    batch: the choice was made for it. Rows that could use no draft then, as their text had none,
    draft as deep as the tier when they can.
    entries: what it takes rows to begin. depth_beside: of the choice, as many drafts per row as pay
    in a round with so many rows of prompts, in a batch about to have so many rows. depth_at: as
    many as pay in a batch of so many rows.
    to_come: the choice for what the batch becomes; rows that join draft as its rows do.
    others: the best round of every shape that was not chosen. instead: of trees, drafts in chains.
    """

    def __init__(
        self,
        choice: Choice,
        batch: DecodeBatch,
        entries: Entries,
        depth_beside: Callable[[int, int], int],
        depth_at: Callable[[int], int],
        to_come: Choice,
        others: Sequence[Choice] = (),
        instead: RoundPlan | None = None,
    ) -> None:
        self.choice = choice
        self.others = others
        self._instead = instead
        self._depth_beside = depth_beside
        self._depth_at = by_size(depth_at, {})
        self._row_steps = _as_deep_as_the_tier(choice, batch)
        self._request_ids = batch.request_ids
        self._steps_of = dict(zip(batch.request_ids, self._row_steps, strict=True))
        self.batch, self._to_come = batch, to_come
        self._entries = entries
        self._num_tree_drafts = 0
        if not choice.shape.is_chain:
            num_drafting = int(np.count_nonzero(choice.row_steps))
            self._num_tree_drafts = num_drafting * choice.shape.size

    @cached_property
    def _steps_of_others(self) -> int:
        """Of a row that joins: the usual one's."""
        return sorted(_as_deep_as_the_tier(self._to_come, self.batch))[self.batch.size // 2]

    def at(self, batch: DecodeBatch) -> RoundPlan:
        """Itself; of trees, chains instead beside prompts, and where there is no room for them."""
        if self._instead is None:
            return self
        is_crowded = batch.num_prompt_rows or self._num_tree_drafts > batch.max_draft_tokens
        return self._instead if is_crowded or fills_up(batch) else self

    def row_steps(self, batch: DecodeBatch) -> list[int]:
        """One entry per row; not to be written."""
        if batch.request_ids != self._request_ids:  # as a rule it is the batch of the round before
            for row, request_id in enumerate(batch.request_ids):
                if request_id not in self._steps_of:
                    pays = self._entries.pays_for_another(batch, row)
                    self._steps_of[request_id] = self._steps_of_others if pays else 0
            self._row_steps = [self._steps_of[request_id] for request_id in batch.request_ids]
            self._request_ids = batch.request_ids
        return self._row_steps

    def depth(self, batch: DecodeBatch) -> int:
        """Most drafts per row in a round of about this batch.

        Prompts take the room of drafts, and a batch that fills up, to thrice its size or more, is
        taken for what it will be: a row that begins to draft makes up its whole prompt, for nothing
        if it soon stops.
        """
        depth, size_to_come = self.choice.shape.depth, batch.size + batch.num_prompts
        if not self.choice.shape.is_chain:
            return depth
        if depth and batch.num_prompt_rows:
            depth = min(depth, self._depth_beside(batch.num_prompt_rows, size_to_come))
        if depth and fills_up(batch):
            depth = min(depth, self._depth_at(size_to_come))
        return depth


def range_key(batch_size: int) -> int:
    """The power of two that is nearest to a batch size, by its exponent.

    Powers of two lie in the middle of their ranges: they are what batches are usually limited to,
    and a full batch always misses a row now and then. A change of range costs a new plan.
    """
    return (batch_size * batch_size).bit_length() // 2


def fills_up(batch: DecodeBatch) -> bool:
    """Whether it will soon be thrice its size, or more."""
    return range_key(batch.size + batch.num_prompts) > range_key(batch.size) + 1


def _as_deep_as_the_tier(choice: Choice, batch: DecodeBatch) -> list[int]:
    """Its drafts per row; the tier's, where a row has no use for any at present."""
    planned = zip(choice.row_steps.tolist(), batch.max_steps, strict=True)
    return [steps if most else choice.shape.depth for steps, most in planned]


def by_size(depth: Callable[..., int], found: dict[tuple[int, ...], int]) -> Callable[..., int]:
    """`depth` of the first numbers asked for stands for all between two powers of two.

    found: what is known already, by the bits of the numbers; grows.
    """

    def of(*numbers: int) -> int:
        key = tuple([number.bit_length() for number in numbers])
        if key not in found:
            found[key] = depth(*numbers)
        return found[key]

    return of
