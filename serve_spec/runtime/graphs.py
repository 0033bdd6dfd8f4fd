"""CUDA graphs of a round's stages: recorded once at start, replayed by padded size."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

import torch

Run: TypeAlias = Callable[[], None]
"""A stage over static tensors: reads its inputs from them, leaves its outputs in them."""


class Recorder(Protocol):
    """Turns a stage into something that runs it again."""

    num_recorded: int

    def start_over(self) -> None:
        """Nothing recorded before runs any more."""
        ...

    def record(self, stage: Run) -> Run:
        """What to call instead of `stage` from now on."""
        ...

    def milliseconds(self, run: Run) -> float:
        """What something recorded takes on the device; 0 where nothing depends on it."""
        ...


_TIMED_REPLAYS = 3


class PlainRecorder:
    """Records nothing: the stage itself runs every time. For CPUs, and to debug."""

    def __init__(self) -> None:
        self.num_recorded = 0

    def start_over(self) -> None:
        """There is nothing to forget."""

    def record(self, stage: Run) -> Run:
        """The stage."""
        self.num_recorded += 1
        return stage

    def milliseconds(self, run: Run) -> float:
        """0: every size runs as it is."""
        return 0.0


class GraphRecorder:
    """Records stages as CUDA graphs that share one memory pool.

    They may share it because no two replay at once, and because what outlives a replay is in
    static tensors. Record the largest first: the others then fit into what it took.
    """

    def __init__(self, device: torch.device) -> None:
        self.num_recorded = 0
        self._device = device
        self.start_over()

    def start_over(self) -> None:
        """The old pool went with the last of its graphs: a new one."""
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, stage: Run) -> Run:
        """A replay of the stage. Runs it once before, for kernels compile when they first run."""
        stage()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            stage()
        self.num_recorded += 1
        return graph.replay

    def milliseconds(self, run: Run) -> float:
        """The least of a few replays, over whatever the static tensors hold."""
        found = []
        for _ in range(_TIMED_REPLAYS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            found.append(float(start.elapsed_time(end)))
        return min(found)


class StageGraphs:
    """One stage at the sizes it was recorded for: batch sizes, or rows."""

    def __init__(self, runs: Mapping[int, Run]) -> None:
        self.sizes = tuple(sorted(runs))
        self._runs = tuple(runs[size] for size in self.sizes)

    def padded(self, size: int) -> int:
        """The smallest recorded size that holds `size`.

        Raises:
            ValueError: none does.
        """
        return self.sizes[self._place(size)]

    def run(self, size: int) -> None:
        """Runs the stage for `size`, padded; refuses what `padded` refuses."""
        self._runs[self._place(size)]()

    def _place(self, size: int) -> int:
        at = bisect_left(self.sizes, size)
        if at == len(self.sizes):
            raise ValueError(f"size={size}: recorded for at most {max(self.sizes, default=0)}")
        return at


def batch_sizes(largest: int) -> tuple[int, ...]:
    """Padded batch sizes up to `largest`: 1, 2, 4, then steps of 8, 16 and 32.

    Up to about a hundred rows a padding row costs nothing, for weights are what a step reads.
    """
    sizes = [1, 2, 4, *range(8, 32, 8), *range(32, 128, 16), *range(128, largest + 32, 32)]
    return (*(size for size in sizes if size < largest), largest)


def row_counts(largest: int) -> tuple[int, ...]:
    """Padded numbers of verified rows up to `largest`, finer where a row is paid for in full."""
    counts = [1, 2, 4, *range(8, 32, 8), *range(32, 128, 16), *range(128, 512, 32)]
    counts += range(512, largest + 128, 128)
    return (*(count for count in counts if count < largest), largest)
