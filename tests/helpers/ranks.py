"""Ranks that share a model, as threads of one process."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch

from serve_spec.ops.shared_sum import EMPTY, NUM_PROGRAMS, SharedMemory, flags_shape, slots_shape
from serve_spec.parallel.group import TensorParallel
from serve_spec.parallel.worker_ranks import WorkerRanks


class ThreadRank(TensorParallel):
    """One of them. Ranks whose calls differ fail instead of waiting."""

    def __init__(self, rank, slots, barrier):
        self.rank = rank
        self.size = len(slots)
        self._slots = slots
        self._barrier = barrier

    def all_reduce(self, x):
        assert x.is_contiguous()
        return x.copy_(torch.stack(self._swap("all_reduce", x)).sum(0))

    def gather_columns(self, x, width):
        return torch.cat(self._swap("gather_columns", x), dim=1)[:, :width].contiguous()

    def broadcast(self, x, source=0):
        assert x.is_contiguous()
        return x.copy_(self._swap("broadcast", x)[source])

    def smallest(self, value):
        return min(int(v) for v in self._swap("smallest", torch.tensor(value)))

    def _swap(self, call, x):
        self._slots[self.rank] = (call, x.shape, x.dtype, x.clone())
        self._barrier.wait()
        given = list(self._slots)
        self._barrier.wait()
        assert len({call[:3] for call in given}) == 1, f"ranks differ: {given}"
        return [call[3] for call in given]


def on_ranks(size, run):
    """What `run` gives on each of `size` ranks. Raises what the first one raised."""
    slots = [None] * size
    barrier = threading.Barrier(size, timeout=60)

    def one(rank):
        try:
            with torch.inference_mode():
                return run(ThreadRank(rank, slots, barrier))
        except threading.BrokenBarrierError:
            raise
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        runs = [pool.submit(one, rank) for rank in range(size)]
    errors = [error for run in runs if (error := run.exception()) is not None]
    for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    return [run.result() for run in runs]


def shared_memory(size, device):
    """Return the memory that so many ranks share, as each of them sees it."""

    def of_each(shape, dtype=torch.int32, value=0):
        return tuple(torch.full(shape, value, dtype=dtype, device=device) for _ in range(size))

    shared = {
        "slots": of_each(slots_shape(size), value=EMPTY),
        "flags": of_each(flags_shape(size), torch.int64),
        "gathered": of_each((40_000,), torch.float32),  # of `GATHER_NUMBERS`
    }

    def numbers(count):
        return torch.zeros(count, dtype=torch.int64, device=device)

    return [
        SharedMemory(rank, counts=numbers(NUM_PROGRAMS), released=numbers(1), **shared)
        for rank in range(size)
    ]


def start_threads(follow, config, size, threads):
    """Return worker ranks that are threads called "rank 1" and so on, appended to `threads`."""
    worker_ranks = WorkerRanks(size)

    def run(rank):
        with suppress(Exception):  # rank 0 receives it
            follow(config, rank, size, worker_ranks.address)

    for rank in range(1, size):
        threads.append(threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True))
        threads[-1].start()
    try:
        worker_ranks.accept({})
    except BaseException:
        worker_ranks.stop()
        raise
    return worker_ranks
