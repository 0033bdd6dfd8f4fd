"""Slots by batch size: routes each batch to the slot that decides for its size."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

from serve_spec.adaptive.slot import AdaptiveStepSlot
from serve_spec.config.adaptive_file import AdaptiveSource, load_slots


class AdaptiveSpeculativeParams:
    """The documented policy: one `AdaptiveStepSlot` per batch-size slot. Named as in SGLang.

    A batch size is padded to the next captured graph size when those are known, then belongs to
    the largest slot key not above it; below the first key, to the first slot.
    """

    def __init__(self, initial_steps: int, cfg_path: AdaptiveSource | None = None) -> None:
        """
        Args:
            initial_steps: every slot starts at its candidate nearest to this.
            cfg_path: JSON file (read by `config.adaptive_file`; this room does no I/O), the
                mapping it would hold, or None for the conservative preset.

        Raises:
            ConfigError: the config is unreadable, or anything in it is unknown or out of range.
            ValueError: `initial_steps` is not an integer ≥ 0.
        """
        configs = load_slots("conservative" if cfg_path is None else cfg_path)
        self.slots = {
            key: AdaptiveStepSlot(initial_steps, config) for key, config in configs.items()
        }
        """The slots by the lower bound of their batch sizes, ascending."""
        self._keys = list(self.slots)
        self._cuda_graph_bs: list[int] | None = None

    @property
    def candidate_steps(self) -> list[int]:
        """Every tier that any slot can reach, ascending."""
        return sorted({step for slot in self.slots.values() for step in slot.candidate_steps})

    def slot_key(self, batch_size: int) -> int:
        """The key of the slot that decides for `batch_size` decode rows."""
        captured = self._cuda_graph_bs or []
        padded = bisect_left(captured, batch_size)
        size = captured[padded] if padded < len(captured) else batch_size
        return self._keys[max(0, bisect_right(self._keys, size) - 1)]

    def get_steps_for_batch(self, bs: int) -> int:
        """The tier for the next round of `bs` decode rows."""
        return self.slots[self.slot_key(bs)].current_steps

    def on_verify_complete(
        self, num_correct_drafts_per_req: Sequence[int], batch_size: int
    ) -> int | None:
        """Feeds one verified round to the slot of its batch; that slot's new tier if it changed."""
        slot = self.slots[self.slot_key(batch_size)]
        return slot.current_steps if slot.update(num_correct_drafts_per_req) else None

    def set_cuda_graph_bs(self, sizes: Iterable[int] | None) -> None:
        """Names the captured batch sizes; None: nothing is captured, nothing is padded."""
        self._cuda_graph_bs = None if sizes is None else sorted(set(sizes))

    def cuda_graph_bs_for_step(self, step: int) -> list[int] | None:
        """The captured batch sizes whose slot can reach `step`; None when none are known."""
        if self._cuda_graph_bs is None:
            return None
        return [
            size
            for size in self._cuda_graph_bs
            if step in self.slots[self.slot_key(size)].candidate_steps
        ]
