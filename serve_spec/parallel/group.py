"""What the ranks that share one model exchange while they compute."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, FileStore
from torch.distributed.distributed_c10d import (
    AllreduceOptions,
    BroadcastOptions,
    ProcessGroupGloo,
    ReduceOp,
    Store,
)

_TIMEOUT = timedelta(minutes=5)
"""A collective that takes longer has lost a rank that is neither dead nor alive."""


class TensorParallel:
    """One of `size` ranks; all of them make the same calls in the same order.

    This class is the only rank of one: every call hands back what it was given.
    """

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, in its place. The same to the last bit on every rank."""
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """All ranks' x (of one shape), side by side along `dim` in the order of ranks."""
        return x

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Rank `source`'s x, in place of every other's."""
        return x

    def smallest(self, value: int) -> int:
        """The least of all ranks' values. The host waits for it."""
        return value

    def close(self) -> None:
        """Ends the exchange; whatever still waits for another rank fails."""


SINGLE = TensorParallel()
"""One rank alone."""


class DeviceGroup(TensorParallel):
    """Several ranks, one process each: over NCCL on GPUs, over gloo on CPUs of one host.

    On a GPU the calls only launch, on the current stream, and can be recorded in a graph.
    """

    def __init__(self, rank: int, size: int, device: torch.device, store: Store) -> None:
        """Returns when all ranks are here. store: one that all of them see."""
        self.rank = rank
        self.size = size
        self._device = device
        make = _nccl if device.type == "cuda" else _gloo
        # Made directly: torch's default group is one per process, and engines are not.
        self._group: Any = make(store, rank, size)
        self._sum = AllreduceOptions()
        self._min = AllreduceOptions()
        self._min.reduceOp = ReduceOp(ReduceOp.MIN)
        self._gather = AllgatherOptions()
        for options in (self._sum, self._min, self._gather):
            options.asyncOp = False
        self.smallest(0)  # connects

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `TensorParallel`; x is contiguous."""
        _finish(self._group.allreduce([x], self._sum))
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """See `TensorParallel`."""
        gathered = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        _finish(self._group._allgather_base(gathered, x.contiguous(), self._gather))
        return gathered if dim == 0 else torch.cat(gathered.chunk(self.size), dim)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """See `TensorParallel`; x is contiguous."""
        options = BroadcastOptions()
        options.rootRank = source
        options.asyncOp = False
        _finish(self._group.broadcast([x], options))
        return x

    def smallest(self, value: int) -> int:
        """See `TensorParallel`."""
        values = torch.tensor([value], device=self._device)
        _finish(self._group.allreduce([values], self._min))
        return int(values)

    def close(self) -> None:
        """See `TensorParallel`. Goes on behind the caller: recorded graphs may hold it up."""
        threading.Thread(target=self._group.abort, daemon=True).start()


def join(rank: int, size: int, device: torch.device, folder: Path) -> DeviceGroup:
    """The group of all ranks; returns when each of them has called this.

    folder: the same for all, on their host.
    """
    return DeviceGroup(rank, size, device, FileStore(str(folder / "store"), size))


def _finish(work: Any) -> None:
    """On GPUs there is nothing to wait for: the stream keeps the order."""
    if work is not None:
        work.wait()


def _gloo(store: Store, rank: int, size: int) -> ProcessGroupGloo:
    # The loopback interface by name: a host's own name may resolve to anything.
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = _TIMEOUT
    return ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Store, rank: int, size: int) -> Any:
    from torch.distributed.distributed_c10d import ProcessGroupNCCL  # not in torch for CPUs

    options = ProcessGroupNCCL.Options()
    options._timeout = _TIMEOUT
    return ProcessGroupNCCL(store, rank, size, options)
