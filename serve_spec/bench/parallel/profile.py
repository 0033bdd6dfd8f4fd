"""Which kernels a rank's rounds consist of, by torch's profiler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.profiler import ProfilerActivity, profile

from serve_spec.bench.kernels.setting import Row

PROFILED_ROUNDS = 8
_LARGEST = 14
"""Kernels that are told by name; the rest is one row."""
_NAME_LENGTH = 60
WAITING = "waiting"


class RoundProfile:
    """Is called with the number of each round; profiles `PROFILED_ROUNDS` from `first` on."""

    def __init__(self, first: int, *, on_gpu: bool) -> None:
        self._window = range(first, first + PROFILED_ROUNDS)
        activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
        self._on_gpu = on_gpu
        self._profile: Any = profile(activities=[activity])
        self._is_done = False

    def __call__(self, number: int) -> None:
        """Round `number` begins."""
        if number == self._window.start:
            self._profile.start()
        elif number == self._window.stop:
            self._profile.stop()
            self._is_done = True

    def rows(self) -> list[Row]:
        """Launches and microseconds of each kernel per round, the dearest first.

        us is how much later the device was done because of a kernel: kernels that are launched
        dependently begin while others run, and wait. `waiting` is when nothing ran.

        Raises:
            RuntimeError: the turn ended before all rounds were profiled.
        """
        if not self._is_done:
            raise RuntimeError(f"fewer than {self._window.stop} rounds; give more output tokens")
        found = self._kernels() if self._on_gpu else self._operators()
        kernels = sorted(
            ((name, *spent) for name, spent in found.items() if spent[1]), key=lambda k: -k[2]
        )
        rest = kernels[_LARGEST:]
        if rest:
            others = f"{len(rest)} others"
            kernels[_LARGEST:] = [(others, sum(k[1] for k in rest), sum(k[2] for k in rest))]
        return [
            {
                "kernel": name,
                "launches": count / PROFILED_ROUNDS,
                "us": microseconds / PROFILED_ROUNDS,
            }
            for name, count, microseconds in kernels
        ]

    def _kernels(self) -> dict[str, tuple[int, float]]:
        """By name: launches and microseconds."""
        events = [event for event in self._profile.events() if event.device_type.name == "CUDA"]
        spans = [(e.name[:_NAME_LENGTH], e.time_range.start, e.time_range.end) for e in events]
        return added_time(spans)

    def _operators(self) -> dict[str, tuple[int, float]]:
        return {
            event.key[:_NAME_LENGTH]: (event.count, float(event.self_cpu_time_total))
            for event in self._profile.key_averages()
        }


def added_time(spans: Sequence[tuple[str, float, float]]) -> dict[str, tuple[int, float]]:
    """By name: how many there are, and by how much they put off the end of all that ended before.

    spans: name, start, end. Gaps go by the name `waiting`; altogether it is the whole time.
    """
    added: dict[str, tuple[int, float]] = {}

    def add(name: str, time: float) -> None:
        count, total = added.get(name, (0, 0.0))
        added[name] = count + 1, total + time

    done = covered = min((start for _, start, _ in spans), default=0.0)
    by_end = sorted(spans, key=lambda span: span[2])
    for _, start, end in sorted(spans, key=lambda span: span[1]):
        if start > covered:
            add(WAITING, start - covered)
            by_end.append(("", covered, start))
        covered = max(covered, end)
    for name, _, end in sorted(by_end, key=lambda span: span[2]):
        if name:
            add(name, end - done)
        done = end
    return added
