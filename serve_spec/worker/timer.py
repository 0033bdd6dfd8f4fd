"""Stage times of a step, by the device's clock."""

from __future__ import annotations

import time

import torch


class StageTimer:
    """Marks points of a step and measures the time between them.

    On a GPU the marks are CUDA events, so the host waits only when a time is read.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: dict[str, torch.cuda.Event | float] = {}

    def mark(self, name: str) -> None:
        """Mark this point as `name`."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks[name] = event
        else:
            self._marks[name] = time.perf_counter()

    def wait(self, name: str) -> None:
        """Wait until the device has passed mark `name`."""
        mark = self._marks[name]
        if not isinstance(mark, float):
            mark.synchronize()

    def ms_since(self, before: StageTimer, name: str) -> float:
        """Return the milliseconds from mark `name` of `before` to the first mark of this one."""
        return _ms_between(before._marks[name], next(iter(self._marks.values())))

    def ms(self, start: str, end: str) -> float:
        """Return the milliseconds from mark `start` to mark `end`; on a GPU, wait for `end`."""
        return _ms_between(self._marks[start], self._marks[end])


def _ms_between(first: torch.cuda.Event | float, last: torch.cuda.Event | float) -> float:
    if isinstance(first, float) and isinstance(last, float):
        return (last - first) * 1e3
    assert isinstance(first, torch.cuda.Event)
    assert isinstance(last, torch.cuda.Event)
    last.synchronize()
    return float(first.elapsed_time(last))
