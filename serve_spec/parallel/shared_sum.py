"""Small exchanges of ranks whose GPUs address each other's memory, which NCCL makes more slowly.

The memory is torch's symmetric memory, which needs no default group: ranks meet in their own store.
"""

from __future__ import annotations

import gc
import math
import os
import socket
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, _SymmetricMemory

from serve_spec.log import get_logger
from serve_spec.ops import shared_sum
from serve_spec.ops.shared_sum import CAPACITY_BYTES, SharedMemory
from serve_spec.parallel.group import TensorParallel

logger = get_logger(__name__)

T = TypeVar("T")

_MEETING = timedelta(seconds=60)
"""A rank that has not brought its memory by then will not."""
_TRIAL_S = 60.0
"""Seconds that a sum on trial may take; the first of a size waits for every rank's compiler."""
_TRIAL_BYTES = (2 * 1000, CAPACITY_BYTES // 8, CAPACITY_BYTES)
"""An uneven number of parts' worth, many small parts, the largest ones."""
_TRIAL_TURNS = 3
"""Both slots of every program are used, and one of them again."""


class SharedSum:
    """Sums of one group's ranks. The memory goes with the last reference."""

    def __init__(self, memory: SharedMemory, owner: object = None) -> None:
        """owner: whatever keeps the memory in place."""
        self._memory = memory
        self._owner = owner
        self._yes = torch.ones_like(memory.released)
        self._zeros = torch.zeros(4, device=memory.released.device)
        device = memory.released.device
        # A sum that waits holds up its stream, and streams of its priority may share its queue.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def fits(self, x: Tensor) -> bool:
        """Return whether x is small enough; NCCL is faster for large ones."""
        return shared_sum.fits(x)

    def add_up(self, x: Tensor) -> None:
        """Replace x, which fits, by the sum of all ranks' x; on a GPU it only launches."""
        shared_sum.sum_over_ranks(x, self._memory)

    def broadcast(self, x: Tensor, source: int) -> bool:
        """Replace x by rank `source`'s x, token ids or counts; return False if it is too large."""
        if not shared_sum.fits_broadcast(x):
            return False
        shared_sum.broadcast_words(x, source, self._memory)
        return True

    def gather_columns(self, x: Tensor, start: int, width: int) -> Tensor | None:
        """See `shared_sum.gather_columns`; None if x does not fit."""
        if not shared_sum.fits_gather(x, width):
            return None
        self.add_up(self._zeros)
        return shared_sum.gather_columns(x, start, width, self._memory)

    def residual_fits(self, x: Tensor, residual: Tensor) -> bool:
        """Return whether `add_norm` takes them."""
        return shared_sum.residual_fits(x if x.dim() == residual.dim() else residual)

    def add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See `TensorParallel.add_norm`; on a GPU it only launches. The rows of x fit."""
        return shared_sum.sum_add_norm(x, residual, weight, eps, self._memory)

    def release(self) -> None:
        """Release the sums of this rank that wait for another; their results are invalid."""
        # A GPU that has failed waits for nothing.
        with suppress(RuntimeError), torch.cuda.stream(self._stream):
            # A copy: code that would have to be loaded first could wait for the sum that waits.
            self._memory.released.copy_(self._yes)


def open_shared_sum(group: TensorParallel, store: Store, device: torch.device) -> SharedSum | None:
    """Return shared memory for sums; None, on all ranks, with a log message, if that fails.

    store: one that all of them see. device: this rank's GPU.
    """
    try:
        _check_host(group)
        return _meet(group, store, device)
    except _Unavailable as reason:
        logger.warning("sums of rank %d go through NCCL: %s", group.rank, str(reason))
    # The stacks that failed hold the memory, in cycles. Given back later, while a graph is
    # recorded, it would end the process.
    gc.collect()
    return None


class _Unavailable(Exception):
    """Why the ranks cannot share memory."""


def _check_host(group: TensorParallel) -> None:
    # The same kernel and the same container: file descriptors are handed over by process ids.
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = socket.gethostname() + (boot.read_text() if boot.exists() else "")
    number = zlib.crc32(host.encode())
    if group.smallest(number) != -group.smallest(-number):
        raise _Unavailable("the ranks are on different hosts")


def _meet(group: TensorParallel, store: Store, device: torch.device) -> SharedSum:
    own = _together(group, lambda: _allocate(device, group.size))
    shared = _together(group, lambda: _share(own, group.rank, group.size, store))
    _together(group, lambda: _try(shared, group.rank, group.size, device))
    return shared


def _together(group: TensorParallel, step: Callable[[], T]) -> T:
    """Return the result of a step. Raise if it fails on any rank."""
    problem: Exception | None = None
    try:
        result = step()
    except Exception as error:
        problem = error
    if group.smallest(int(problem is None)):
        return result
    if problem is None:
        raise _Unavailable("another rank cannot share memory; see its log")
    # The rest of a message of torch is a stack trace.
    reason = next(iter(str(problem).splitlines()), "")
    raise _Unavailable(f"{type(problem).__name__}: {reason}") from problem


def _allocate(device: torch.device, size: int) -> Tensor:
    """Return this rank's part of the memory, zeros."""
    import serve_spec.ops.shared_sum_triton  # noqa: F401  no kernel, no use for memory

    # Nothing here needs the multicast of the switch between GPUs, whose failures are the host's.
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    # Where every rank is shown its own GPU alone, all of them have the same number. Two ranks
    # that do share one have been refused by NCCL.
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    num_bytes = sum(_num_bytes(shape, dtype) for shape, dtype in _places(size))
    own = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
    own.zero_()
    slots = math.prod(shared_sum.slots_shape(size))
    own[: slots * torch.int32.itemsize].view(torch.int32).fill_(shared_sum.EMPTY)
    torch.cuda.synchronize(device)
    return own


def _share(own: Tensor, rank: int, size: int, store: Store) -> SharedSum:
    handle, begin = _rendezvous(own, rank, size, store), 0
    places: list[tuple[Tensor, ...]] = []
    for shape, dtype in _places(size):
        first = begin // dtype.itemsize
        places.append(tuple(handle.get_buffer(r, shape, dtype, first) for r in range(size)))
        begin += _num_bytes(shape, dtype)
    zeros = partial(torch.zeros, dtype=torch.int64, device=own.device)
    slots, flags, gathered = places
    counts, released = zeros(shared_sum.NUM_PROGRAMS), zeros(1)
    memory = SharedMemory(rank, slots, flags, gathered, counts, released)
    return SharedSum(memory, (own, handle))


def _places(size: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return the tensors of a rank that others write to, in the order of `SharedMemory`."""
    return [
        (shared_sum.slots_shape(size), torch.int32),
        (shared_sum.flags_shape(size), torch.int64),
        ((shared_sum.GATHER_NUMBERS,), torch.float32),
    ]


def _num_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _rendezvous(own: Tensor, rank: int, size: int, store: Store) -> Any:
    torch_groups: Any = torch._C._distributed_c10d
    # torch finds the store by the name of a group; one without a backend is enough. The group does
    # not keep what Python makes of a store, so that has to live until all have met.
    keys = _RelativeKeys(store)
    group = torch_groups.ProcessGroup(keys, rank, size)
    name = f"shared_sum_{uuid4()}"
    group._set_group_name(name)
    torch_groups._register_process_group(name, group)
    try:
        return _SymmetricMemory.rendezvous(own, name)
    finally:
        torch_groups._unregister_process_group(name)


class _RelativeKeys(Store):
    """A store for one meeting.

    torch numbers what it exchanges (prefix/number/rank) throughout a process, but processes that
    meet may have met in different numbers of groups before. Here numbers begin with each meeting.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = PrefixStore("shared_sum", store)
        self._numbers: dict[str, int] = {}

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._relative(key), value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(self._relative(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def wait(self, keys: list[str], timeout: timedelta = _MEETING) -> None:
        self._store.wait([self._relative(key) for key in keys], min(timeout, _MEETING))

    def _relative(self, key: str) -> str:
        prefix, number, rank = key.rsplit("/", 2)
        return f"{prefix}/{self._numbers.setdefault(number, len(self._numbers))}/{rank}"


def _try(shared: SharedSum, rank: int, size: int, device: torch.device) -> None:
    with torch.cuda.device(device):
        for num_bytes in _TRIAL_BYTES:
            for turn in range(_TRIAL_TURNS):
                parts = [_drawn(num_bytes // 2, turn * size + r, device) for r in range(size)]
                expected = shared_sum.shared_sum(parts)
                shared.add_up(parts[rank])
                _wait_for_end(shared)
                if not torch.equal(parts[rank], expected):
                    raise ArithmeticError(f"sums of {num_bytes} bytes are wrong on trial")


def _drawn(count: int, seed: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator).to(device, torch.bfloat16)


def _wait_for_end(shared: SharedSum) -> None:
    ended = torch.cuda.Event()
    ended.record()
    deadline = time.monotonic() + _TRIAL_S
    while not ended.query():
        if time.monotonic() > deadline:
            shared.release()
            raise TimeoutError(f"a sum on trial did not end in {_TRIAL_S:.0f} s")
        time.sleep(1e-4)
