"""A tensor parallel rank other than 0: the same models, the same steps.

`ProcessLauncher` runs this module as a program and sends the arguments of `follow` on stdin.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from functools import partial

import torch

from serve_spec.config import ServeSpecConfig
from serve_spec.engine.build import build_worker, load_models, rank_device
from serve_spec.parallel.channel import Address, RankChannel
from serve_spec.parallel.device_group import join
from serve_spec.worker.tensor_parallel import FollowingWorker, run_worker_loop


def follow(config: ServeSpecConfig, rank: int, size: int, address: Address) -> None:
    """Load this rank's shard and execute rank 0's plans until rank 0 stops it or ends.

    Report errors to rank 0.
    """
    with RankChannel(address, rank) as channel:
        device = rank_device(config, rank)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        channel.ready()
        parallel = join(rank, size, device, address, channel.host)
        try:
            create = partial(FollowingWorker, iter(channel))
            run_worker_loop(build_worker(config, load_models(config, parallel), create))
        finally:
            parallel.close()


def main() -> int:
    """Run `follow` with the arguments on stdin."""
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
    # Skip exit handlers of libraries, some of which wait for lost ranks.
    os._exit(status)
