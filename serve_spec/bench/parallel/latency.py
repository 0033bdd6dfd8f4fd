"""What one exchange between ranks takes: the engine's own, and ways to sum that it might take.

On GPUs each is timed in a CUDA graph of many, as the engine's are launched. As a program
(`parallel.launch` starts it) this is a rank that takes part.
"""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TypeAlias, cast

import torch
from torch import Tensor

from serve_spec.bench.kernels.setting import Row
from serve_spec.config import ServeSpecConfig
from serve_spec.core.context import torch_dtype
from serve_spec.models import ModelShape
from serve_spec.parallel.followers import Followers
from serve_spec.parallel.group import SINGLE, TensorParallel, join
from serve_spec.parallel.launch import launch
from serve_spec.parallel.line import Address
from serve_spec.parallel.orders import Orders

Exchange: TypeAlias = Callable[[], object]
Exchanges: TypeAlias = Mapping[str, Exchange]

_EPS = 1e-5
_WARM_UP_RUNS = 3
_CHAIN = {"cuda": 64, "cpu": 4}
"""Exchanges that are timed together."""
_TIMES = {"cuda": 20, "cpu": 5}


@dataclass(frozen=True)
class Traffic:
    """What a model's ranks exchange: [rows, width] to sum, shares of float32 [rows, vocab]."""

    rows: tuple[int, ...]
    width: int
    vocab_size: int
    num_norms: int
    """Of one forward, each after a sum: two per layer. One more sum is that of embeddings."""
    dtype: str
    on_gpus: bool

    @classmethod
    def of(cls, config: ServeSpecConfig, rows: tuple[int, ...], *, on_gpus: bool) -> Traffic:
        """That of a configuration's target."""
        shape = ModelShape.from_directory(config.model.path)
        auto = "bfloat16" if on_gpus else "float32"
        dtype = auto if config.model.dtype == "auto" else config.model.dtype
        num_norms = 2 * shape.num_layers
        return cls(rows, shape.hidden_size, shape.vocab_size, num_norms, dtype, on_gpus)

    def forward_ms(self, row: Row) -> float:
        """Of exchanges that take what `engine` measured: what one rank alone would not need."""
        microseconds: float = self.num_norms * (row["add_norm_us"] - row["norm_us"])
        microseconds += row["sum_us"] + row["logits_us"] + row["draws_us"]
        return microseconds / 1e3

    def device(self, rank: int) -> torch.device:
        """Where a rank computes."""
        return torch.device("cuda", rank) if self.on_gpus else torch.device("cpu")

    def hidden(self, rank: int, num_rows: int) -> Tensor:
        """Zeros: summed over and over, they stay what they are."""
        dtype, device = torch_dtype(self.dtype), self.device(rank)
        return torch.zeros(num_rows, self.width, dtype=dtype, device=device)


class LatencyArm:
    """A group of `size` ranks that only exchange; this process is rank 0."""

    def __init__(self, traffic: Traffic, size: int) -> None:
        self._traffic = traffic
        self._size = size
        self._followers: Followers | None = None

    def measure(self, part: str) -> list[Row]:
        """Microseconds by rows; `part` names one of PARTS. Starts the others when first called."""
        if self._followers is None:
            self._followers = launch("serve_spec.bench.parallel.latency", self._size, self._traffic)
            _enter(self._traffic, 0)
            self._group = self._followers.join(self._traffic.device(0))
        meeting = Path(tempfile.mkdtemp()) / "store"
        self._followers.tell((part, meeting))
        with self._followers.in_step():
            return PARTS[part](self._traffic, self._group, meeting)

    def close(self) -> None:
        """Ends every rank."""
        if self._followers is not None:
            self._followers.stop()


def engine(traffic: Traffic, group: TensorParallel, meeting: Path) -> list[Row]:
    """What the engine calls: sums of hidden vectors, float32 logits side by side, rank 0's draws.

    `add_norm_us`: a sum with the addition and the norm that follow it; `norm_us`: those two alone.
    `forward_ms`: all that a forward of so many rows exchanges, its draws included.
    """

    def exchanges(num_rows: int) -> Exchanges:
        x = traffic.hidden(group.rank, num_rows)
        norm = torch.zeros_like(x), x.new_ones(traffic.width), _EPS
        logits = torch.zeros(num_rows, traffic.vocab_size // group.size, device=x.device)
        ids = torch.zeros(num_rows, dtype=torch.int64, device=x.device)
        return {
            "sum_us": lambda: group.all_reduce(x),
            "add_norm_us": lambda: group.add_norm(x, *norm),
            "norm_us": lambda: SINGLE.add_norm(x, *norm),
            "logits_us": lambda: group.all_gather(logits, 1),
            "draws_us": lambda: group.broadcast(ids),
        }

    rows = _rows(traffic, group, exchanges)
    return [{**row, "forward_ms": traffic.forward_ms(row)} for row in rows]


def ways(traffic: Traffic, group: TensorParallel, meeting: Path) -> list[Row]:
    """Sums by NCCL, and by torch's kernels over memory that every GPU of the host can address.

    meeting: a file, the same for all ranks, where torch's own group finds together.
    """
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symm_mem
    from torch._C._distributed_c10d import FileStore

    device = traffic.device(group.rank)
    dist.init_process_group(
        "nccl",
        store=FileStore(str(meeting), group.size),
        rank=group.rank,
        world_size=group.size,
        device_id=device,
    )
    assert dist.group.WORLD is not None, "it was just made"
    name = dist.group.WORLD.group_name
    one_shot, two_shot = (
        getattr(torch.ops.symm_mem, kind)
        for kind in ("one_shot_all_reduce", "two_shot_all_reduce_")
    )

    def exchanges(num_rows: int) -> Exchanges:
        x = traffic.hidden(group.rank, num_rows)
        shared = symm_mem.empty(num_rows, traffic.width, dtype=x.dtype, device=device)
        symm_mem.rendezvous(shared, name)
        shared.fill_(group.rank + 1)
        if not bool((one_shot(shared, "sum", name) == sum(range(1, group.size + 1))).all()):
            raise RuntimeError("one_shot_all_reduce: the sum is wrong")
        shared.zero_()
        return {
            "nccl_us": lambda: dist.all_reduce(x),
            "one_shot_us": lambda: one_shot(shared, "sum", name),
            "two_shot_us": lambda: two_shot(shared, "sum", name),
        }

    return _rows(traffic, group, exchanges)


PARTS: Mapping[str, Callable[[Traffic, TensorParallel, Path], list[Row]]] = {
    "engine": engine,
    "ways": ways,
}


def _rows(
    traffic: Traffic, group: TensorParallel, exchanges: Callable[[int], Exchanges]
) -> list[Row]:
    time_us = _graph_us if traffic.on_gpus else _eager_us
    return [
        {
            "tensor_parallel_size": group.size,
            "rows": num_rows,
            **{name: time_us(run, group) for name, run in exchanges(num_rows).items()},
        }
        for num_rows in traffic.rows
    ]


def _graph_us(run: Exchange, group: TensorParallel) -> float:
    for _ in range(_WARM_UP_RUNS):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CHAIN["cuda"]):
            run()
    times: list[float] = []
    for _ in range(_TIMES["cuda"] + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / _CHAIN["cuda"])
    # A graph goes when no rank runs it any more.
    group.smallest(0)
    return median(times[1:])


def _eager_us(run: Exchange, group: TensorParallel) -> float:
    for _ in range(_WARM_UP_RUNS):
        run()
    times = []
    for _ in range(_TIMES["cpu"]):
        group.smallest(0)
        started = time.perf_counter()
        for _ in range(_CHAIN["cpu"]):
            run()
        times.append((time.perf_counter() - started) * 1e6 / _CHAIN["cpu"])
    return median(times)


def _enter(traffic: Traffic, rank: int) -> None:
    # Nothing here needs the multicast of the switch between GPUs, whose failures are the host's.
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    if traffic.on_gpus:
        torch.cuda.set_device(traffic.device(rank))


def _follow(traffic: Traffic, rank: int, size: int, address: Address) -> None:
    with Orders(address, rank) as orders:
        _enter(traffic, rank)
        orders.ready()
        group = join(rank, size, traffic.device(rank), address)
        for part, meeting in cast(Iterable[tuple[str, Path]], orders):
            PARTS[part](traffic, group, meeting)


def _main() -> int:
    try:
        _follow(*pickle.load(sys.stdin.buffer))
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    status = _main()
    sys.stderr.flush()
    # Without the farewells of libraries, some of which wait for ranks that are gone.
    os._exit(status)
