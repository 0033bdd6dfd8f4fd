"""How long work takes on a device, run after run."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

_WARM_UP_RUNS = 3
_RUNS = 15

Work = Callable[[], object]


def graph_times_ms(work: Work, device: torch.device) -> list[float]:
    """As `times_ms`, without the host between kernels where there is a GPU."""
    if device.type == "cpu":
        return times_ms(work, device)
    work()  # kernels compile when they first run
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return times_ms(graph.replay, device)


def times_ms(work: Work, device: torch.device) -> list[float]:
    """Milliseconds of every run after the first few, on the device's clock."""
    for _ in range(_WARM_UP_RUNS):
        work()
    if device.type == "cpu":
        return [_cpu_time_ms(work) for _ in range(_RUNS)]
    marks = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(_RUNS)
    ]
    for start, end in marks:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) for start, end in marks]


def _cpu_time_ms(work: Work) -> float:
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1e3
