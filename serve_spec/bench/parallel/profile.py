"""Which kernels a rank's rounds consist of, by torch's profiler."""

from __future__ import annotations

from typing import Any

from torch.profiler import ProfilerActivity, profile

from serve_spec.bench.kernels.setting import Row

PROFILED_ROUNDS = 8
_LARGEST = 14
"""Kernels that are told by name; the rest is one row."""
_NAME_LENGTH = 60


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

        Raises:
            RuntimeError: the turn ended before all rounds were profiled.
        """
        if not self._is_done:
            raise RuntimeError(f"fewer than {self._window.stop} rounds; give more output tokens")
        found = [
            (event.key[:_NAME_LENGTH], event.count, self._microseconds(event))
            for event in self._profile.key_averages()
        ]
        found = sorted((kernel for kernel in found if kernel[2]), key=lambda kernel: -kernel[2])
        rest = found[_LARGEST:]
        if rest:
            others = f"{len(rest)} others"
            found[_LARGEST:] = [(others, sum(k[1] for k in rest), sum(k[2] for k in rest))]
        return [
            {
                "kernel": name,
                "launches": count / PROFILED_ROUNDS,
                "us": microseconds / PROFILED_ROUNDS,
            }
            for name, count, microseconds in found
        ]

    def _microseconds(self, event: Any) -> float:
        times = event.self_device_time_total if self._on_gpu else event.self_cpu_time_total
        return float(times)
