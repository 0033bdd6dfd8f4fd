"""A rank that follows rank 0: the same models, the same rounds.

As a program (`ProcessLauncher` starts it) it reads what to follow from its standard input.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback

import torch

from serve_spec.config import ServeSpecConfig
from serve_spec.engine.build import build_worker, load_models, rank_device
from serve_spec.parallel.group import join
from serve_spec.parallel.line import Address
from serve_spec.parallel.orders import Orders
from serve_spec.worker.tensor_parallel import run_worker_loop


def follow(config: ServeSpecConfig, rank: int, size: int, address: Address) -> None:
    """Loads this rank's part and executes rank 0's plans until it is told to stop, or rank 0 ends.

    What fails here, rank 0 hears.
    """
    with Orders(address, rank) as orders:
        device = rank_device(config, rank)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        orders.ready()
        parallel = join(rank, size, device, address, orders.host)
        try:
            run_worker_loop(build_worker(config, load_models(config, parallel)), orders)
        finally:
            parallel.close()


def main() -> int:
    """Follows as standard input says."""
    try:
        follow(*pickle.load(sys.stdin.buffer))
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Without the farewells of libraries, some of which wait for ranks that are gone.
    os._exit(status)
