"""CUDA graphs of a round's stages: recorded once at start, replayed by padded size."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

Run: TypeAlias = Callable[[], None]
"""A stage over static tensors: reads its inputs from them, leaves its outputs in them."""


class Leftover(Protocol):
    """A tensor of a stage that may be read once the stage has run, until any other stage runs."""

    def leave(self, x: Tensor) -> None:
        """Called by the stage: this is it."""
        ...

    def tensor(self) -> Tensor:
        """What the stage left when it ran last."""
        ...


class Recorder(Protocol):
    """Turns a stage into something that runs it again."""

    num_recorded: int

    def start_over(self) -> None:
        """Nothing recorded before runs any more."""
        ...

    def record(self, stage: Run) -> Run:
        """What to call instead of `stage` from now on."""
        ...

    def leftover(self) -> Leftover:
        """To be filled by a stage that is recorded here."""
        ...

    def milliseconds(self, run: Run) -> float:
        """What something recorded takes on the device; 0 where nothing depends on it."""
        ...


_TIMED_REPLAYS = 3


class PlainRecorder:
    """Records nothing: the stage itself runs every time. For CPUs, and to debug."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self._leftover = _KeptTensor()

    def start_over(self) -> None:
        """There is nothing to forget."""

    def record(self, stage: Run) -> Run:
        """The stage."""
        self.num_recorded += 1
        return stage

    def leftover(self) -> Leftover:
        """The same for all stages: only what ran last is read."""
        return self._leftover

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

    def leftover(self) -> Leftover:
        """Keeps nothing but the address: later recordings may use the memory for their own."""
        return _ReusedMemory()

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


class _KeptTensor:
    """See `Leftover`."""

    def leave(self, x: Tensor) -> None:
        self._tensor = x

    def tensor(self) -> Tensor:
        return self._tensor


class _ReusedMemory:
    """See `Leftover`. A place in the pool, which lives as long as any graph of it.

    To keep the tensor itself would keep its memory from all later graphs. Nothing writes there
    between two replays, for whatever runs outside graphs has its memory elsewhere.
    """

    def leave(self, x: Tensor) -> None:
        assert x.is_contiguous(), "an address says nothing of strides"
        assert x.dtype is torch.float32, "see _Place"
        self._place = _Place(x)
        self._view: Tensor | None = None

    def tensor(self) -> Tensor:
        if self._view is None:  # not while recording: looking up an address is no work for a stream
            self._view = torch.as_tensor(self._place, device=self._place.device)
        return self._view


class _Place:
    """Where a float32 tensor lies, as `torch.as_tensor` takes it."""

    def __init__(self, x: Tensor) -> None:
        self.device = x.device
        self.__cuda_array_interface__ = {
            "shape": tuple(x.shape),
            "typestr": "<f4",
            "data": (x.data_ptr(), False),
            "version": 3,
        }


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


class VerifyGraphs(StageGraphs):
    """A verification at the numbers of rows it was recorded for, and the logits it leaves."""

    def __init__(self, runs: Mapping[int, Run], logits: Mapping[int, Leftover]) -> None:
        super().__init__(runs)
        self._logits = logits

    def logits(self, num_rows: int) -> Tensor:
        """float32 [T, V] of a run for `num_rows`, until any other stage runs."""
        return self._logits[self.padded(num_rows)].tensor()


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


def prompt_row_counts(largest: int) -> tuple[int, ...]:
    """Padded numbers of rows beside prompts, finer where a row is paid for in full."""
    counts = [16, 32, 64, 96, *range(128, 512, 32), *range(512, largest + 128, 128)]
    return (*(count for count in counts if count < largest), largest)
