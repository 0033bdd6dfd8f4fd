"""Ranks in processes of their own: NCCL or gloo, and memory that GPUs of one host share."""

from __future__ import annotations

import atexit
import gc
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, TCPStore
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import Store

from serve_spec.parallel.channel import LOOPBACK, Address, listen
from serve_spec.parallel.group import TensorParallel
from serve_spec.parallel.store_tunnel import open_tunnel

if TYPE_CHECKING:
    from serve_spec.parallel.shared_sum import SharedSum

_TIMEOUT = timedelta(minutes=5)
"""A collective that takes longer has lost a rank that is neither dead nor alive."""
_STEP_TIMEOUT = timedelta(seconds=20)
"""The same of a sum or a gather of a step over gloo, which all ranks reach at about the same time.
A send to a rank that was killed meanwhile may wait until then: gloo does not always notice."""
_ABORT_S = 10.0
"""Seconds that the end of a process waits for NCCL to end."""


class DeviceGroup(TensorParallel):
    """Several ranks, one process each: over NCCL on GPUs, over gloo on CPUs.

    On a GPU the calls only launch, on the current stream, and can be recorded in a graph. GPUs of
    one host make small sums in memory they share, where they can (`shared_sum.py`).
    """

    def __init__(
        self, rank: int, size: int, device: torch.device, store: Store, host: str = LOOPBACK
    ) -> None:
        """Return when all ranks are here.

        store: one that all of them see. host: the address at which they reach this one (gloo).
        """
        self.rank = rank
        self.size = size
        self._device = device
        # Made directly: torch's default group is one per process, and engines are not.
        self._group: Any = (
            _nccl(store, rank, size) if device.type == "cuda" else _gloo(store, rank, size, host)
        )
        self._sum = c10d.AllreduceOptions()
        self._min = c10d.AllreduceOptions()
        self._min.reduceOp = c10d.ReduceOp(c10d.ReduceOp.MIN)
        self._gather = AllgatherOptions()
        for options in (self._sum, self._min, self._gather):
            options.asyncOp = False
        self.smallest(0)  # connects
        self._shared_sum: SharedSum | None = None
        if device.type == "cpu":
            self._sum.timeout = self._gather.timeout = _STEP_TIMEOUT
        else:
            from serve_spec.parallel.shared_sum import open_shared_sum  # not for CPUs

            self._shared_sum = open_shared_sum(self, store, device)

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `TensorParallel`; x is contiguous."""
        group = self._open
        if self._shared_sum is not None and self._shared_sum.fits(x):
            self._shared_sum.add_up(x)
        else:
            _finish(group.allreduce([x], self._sum))
        return x

    def add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See `TensorParallel`: one launch where the sum is made in shared memory."""
        shared = self._shared_sum
        if self._group is None or shared is None or not shared.residual_fits(x, residual):
            return super().add_norm(x, residual, weight, eps)
        return shared.add_norm(x, residual, weight, eps)

    def gather_columns(self, x: Tensor, width: int) -> Tensor:
        """See `TensorParallel`."""
        group = self._open
        if self._shared_sum is not None:
            shared = self._shared_sum.gather_columns(x, self.rank * x.shape[1], width)
            if shared is not None:
                return shared
        gathered = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        _finish(group._allgather_base(gathered, x.contiguous(), self._gather))
        return torch.cat(gathered.chunk(self.size), dim=1)[:, :width].contiguous()

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """See `TensorParallel`; x is contiguous."""
        group = self._open
        if self._shared_sum is not None and self._shared_sum.broadcast(x, source):
            return x
        options = c10d.BroadcastOptions()
        options.rootRank = source
        options.asyncOp = False
        _finish(group.broadcast([x], options))
        return x

    def smallest(self, value: int) -> int:
        """See `TensorParallel`."""
        values = torch.tensor([value], device=self._device)
        _finish(self._open.allreduce([values], self._min))
        return int(values)

    def close(self) -> None:
        """See `TensorParallel`.

        With gloo, the threads of this rank have ended when this returns: one that outlives the
        interpreter takes the process down with it. What waits for other ranks ends when they do,
        for gloo cannot be interrupted, so end them first. NCCL ends behind the caller, for
        recorded graphs may hold it up.
        """
        group, self._group = self._group, None
        if group is None:
            return
        # Its memory stays, for recorded graphs write to it.
        if self._shared_sum is not None:
            self._shared_sum.release()
        if self._device.type == "cuda":
            abort = threading.Thread(target=group.abort, name="abort", daemon=True)
            abort.start()
            _aborts.append(abort)
        else:
            group.abort()

    @property
    def _open(self) -> Any:
        group = self._group
        if group is None:
            raise RuntimeError("the group of ranks has been closed")
        return group


def store_server() -> TCPStore:
    """Return the store in which ranks find each other, on a free port; it ends with the object.

    It has no secret. Therefore it listens on this host only; by itself, torch listens everywhere.
    """
    listener = listen(LOOPBACK)
    port, number = listener.getsockname()[1], listener.detach()  # the store closes it
    return TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=_TIMEOUT,
        master_listen_fd=number,
    )


def join(
    rank: int, size: int, device: torch.device, address: Address, host: str = LOOPBACK
) -> DeviceGroup:
    """Return the group of all ranks once each has called this, or raise RuntimeError."""
    is_here = address.host == LOOPBACK
    # A tunnel stays as long as the process: NCCL connects again for its own threads.
    port = address.store_port if is_here else open_tunnel(address).port
    store = TCPStore(LOOPBACK, port, wait_for_workers=False, timeout=_TIMEOUT)
    return DeviceGroup(rank, size, device, store, host)


_aborts: list[threading.Thread] = []


@atexit.register
def _wait_for_aborts() -> None:
    """Wait for a limited time: graphs that are never freed hold NCCL up."""
    gc.collect()
    for thread in _aborts:
        thread.join(_ABORT_S)


def _finish(work: Any) -> None:
    """Wait for a collective on CPUs; on GPUs the stream keeps the order."""
    if work is not None:
        work.wait()


def _gloo(store: Store, rank: int, size: int, host: str) -> c10d.ProcessGroupGloo:
    options: Any = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = _TIMEOUT
    return c10d.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Store, rank: int, size: int) -> Any:
    options = c10d.ProcessGroupNCCL.Options()  # not in torch for CPUs
    options._timeout = _TIMEOUT
    return c10d.ProcessGroupNCCL(store, rank, size, options)
