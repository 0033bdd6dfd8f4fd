"""Stage times of a round, on the clock of the device that runs it."""

from __future__ import annotations

import time

import torch


class StageTimer:
    """Marks points in a round; `ms(a, b)` reads the time between two of them.

    On a GPU the marks are events in the stream, so measuring does not make the host wait until a
    time is read (after the round's own synchronisation).
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: dict[str, torch.cuda.Event | float] = {}

    def mark(self, name: str) -> None:
        """Remembers this point as `name`."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks[name] = event
        else:
            self._marks[name] = time.perf_counter()

    def wait(self, name: str) -> None:
        """Waits until the device has passed mark `name`."""
        mark = self._marks[name]
        if not isinstance(mark, float):
            mark.synchronize()

    def ms_since(self, before: StageTimer, name: str) -> float:
        """Milliseconds from mark `name` of `before` to the first mark of this one."""
        return _ms_between(before._marks[name], next(iter(self._marks.values())))

    def ms(self, start: str, end: str) -> float:
        """Milliseconds from mark `start` to mark `end`; waits for `end` on a GPU."""
        return _ms_between(self._marks[start], self._marks[end])


def _ms_between(first: torch.cuda.Event | float, last: torch.cuda.Event | float) -> float:
    if isinstance(first, float) and isinstance(last, float):
        return (last - first) * 1e3
    assert isinstance(first, torch.cuda.Event)
    assert isinstance(last, torch.cuda.Event)
    last.synchronize()
    return float(first.elapsed_time(last))
