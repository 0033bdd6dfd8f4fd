"""A worker rank without a model. As a program it is started as any; its settings are what it does:

"run"           joins and runs what is broadcast
"say no"        raises before it is ready
"exit"          ends with exit code 3 before it calls
"stay away"     ends after it called, without joining
"only rank 1 joins"  rank 1 runs, the others stay away
"""

import os
import pickle
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import torch

from serve_spec.parallel.channel import LOOPBACK, Address, RankChannel
from serve_spec.parallel.device_group import join, store_server

CPU = torch.device("cpu")


def follow(settings, rank, size, address):
    """Run a worker rank."""
    if settings == "exit":
        os._exit(3)
    with RankChannel(address, rank) as channel:
        if settings == "say no":
            raise ValueError("no such model")
        channel.ready()
        if settings == "stay away" or (settings == "only rank 1 joins" and rank != 1):
            raise ValueError("no memory left")
        with closing(join(rank, size, CPU, address, channel.host)) as group:
            for order in channel:
                if order == "sum":
                    group.all_reduce(torch.ones(3))
                elif order == "fail":
                    raise ValueError("broken weights")
                elif order == "sleep":
                    time.sleep(600)


def joined(size):
    """Return the groups of so many ranks in this process."""
    store = store_server()
    address = Address(LOOPBACK, 0, store.port, b"")
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: join(rank, size, CPU, address), range(size)))


if __name__ == "__main__":
    follow(*pickle.load(sys.stdin.buffer))
