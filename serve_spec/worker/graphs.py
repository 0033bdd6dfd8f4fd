"""Stages of a step: captured as CUDA graphs at startup and replayed, or run as they are."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor


class StepSize(NamedTuple):
    """How much a stage computes: tokens of a forward, requests that draw, prefill chunks."""

    tokens: int
    requests: int
    chunks: int = 0

    def __str__(self) -> str:
        """Return it as in the names of profiles."""
        chunks = f", {self.chunks} chunks" if self.chunks else ""
        return f"{self.tokens} tokens, {self.requests} requests{chunks}"


Stage: TypeAlias = Callable[[StepSize], Tensor | None]
"""A stage over static buffers. What it returns may be read until any other stage runs."""

Run: TypeAlias = Callable[[], Tensor | None]
"""A stage at one size."""


_TIMED_REPLAYS = 5


class GraphRecorder:
    """Captures stages as CUDA graphs that share one memory pool.

    They share it because no two replay at once and results are in static buffers. Capture the
    largest first: the others then fit into its memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.num_captured = 0
        self._device = device
        self.start_over()

    def start_over(self) -> None:
        """Start a new pool; the old one is freed with the last of its graphs."""
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Run) -> Run:
        """Run a stage once, because kernels compile on their first launch, then capture it."""
        run()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = run()
        self.num_captured += 1
        return graph.replay if output is None else _Replay(graph, output)

    def milliseconds(self, run: Run) -> float:
        """Return the shortest time of a few replays."""
        found = []
        for _ in range(_TIMED_REPLAYS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            found.append(float(start.elapsed_time(end)))
        return min(found)


class _Replay:
    """A graph and the address of its output.

    A tensor would keep its memory from later graphs. The pool lives as long as any of its graphs,
    and nothing writes to it between two replays.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, output: Tensor) -> None:
        assert output.is_contiguous(), "an address has no strides"
        assert output.dtype is torch.float32, "see _Place"
        self._graph = graph
        self._place = _Place(output)
        self._view: Tensor | None = None

    def __call__(self) -> Tensor:
        self._graph.replay()
        if self._view is None:  # a look-up of an address cannot be captured
            self._view = torch.as_tensor(self._place, device=self._place.device)
        return self._view


class _Place:
    """Address of a float32 tensor, in the form that `torch.as_tensor` reads."""

    def __init__(self, x: Tensor) -> None:
        self.device = x.device
        self.__cuda_array_interface__ = {
            "shape": tuple(x.shape),
            "typestr": "<f4",
            "data": (x.data_ptr(), False),
            "version": 3,
        }


class StageRunner:
    """Runs a stage: the smallest captured size that fits, or the stage itself at the exact size."""

    def __init__(self, stage: Stage, captured: Mapping[StepSize, Run] | None = None) -> None:
        self.stage = stage
        self.sizes = tuple(sorted(captured or ()))
        self._tokens = [size.tokens for size in self.sizes]
        self._runs = [captured[size] for size in self.sizes] if captured else []

    def run(self, size: StepSize) -> Tensor | None:
        """Run the stage. Return its output, if any, which holds until another stage runs."""
        for at in range(bisect_left(self._tokens, size.tokens), len(self.sizes)):
            if self.sizes[at].chunks >= size.chunks:
                return self._runs[at]()
        return self.stage(size)


def batch_sizes(largest: int) -> tuple[int, ...]:
    """Return the padded batch sizes up to `largest`: 1, 2, 4, then steps of 8, 16 and 32.

    Up to about a hundred requests a padding request costs nothing, because a step reads weights.
    """
    sizes = [1, 2, 4, *range(8, 32, 8), *range(32, 128, 16), *range(128, largest + 32, 32)]
    return (*(size for size in sizes if size < largest), largest)


def token_counts(largest: int) -> tuple[int, ...]:
    """Return the padded numbers of verified tokens up to `largest`, finer where each one costs."""
    counts = [1, 2, 4, *range(8, 32, 8), *range(32, 128, 16), *range(128, 512, 32)]
    counts += range(512, largest + 128, 128)
    return (*(count for count in counts if count < largest), largest)


def mixed_token_counts(largest: int) -> tuple[int, ...]:
    """Return the padded numbers of tokens of mixed prefill-decode batches."""
    counts = [16, 32, 64, 96, *range(128, 512, 32), *range(512, largest + 128, 128)]
    return (*(count for count in counts if count < largest), largest)
