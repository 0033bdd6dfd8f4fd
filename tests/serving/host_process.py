"""One end of a connection between two hosts.

`router HOST`, `replica ADDRESS`, `rank-0 HOST` or `rank-1 ADDRESS`.
"""

import asyncio
import pickle
import sys
import time

from tests.serving.fakes import ReplicaEnd, listening, until


async def run_router(host):
    async with listening(host=host) as router:
        print(pickle.dumps(tuple(router.connections.address)).hex(), flush=True)
        await until(router.connections.usable)
        print("connected", flush=True)
        while not router.lost:
            await asyncio.sleep(1)
            router.connections.check()
        ((name, error),) = router.lost
        print(name, error.status, flush=True)


async def run_replica(address):
    from serve_spec.serving.router.connections import RouterAddress

    replica = ReplicaEnd()
    try:
        await replica.connect(RouterAddress(*pickle.loads(bytes.fromhex(address))))
    except OSError as error:
        print(error, flush=True)
        return
    print("connected", flush=True)
    while True:
        replica.report_load()
        await asyncio.sleep(0.2)


async def run_rank_0(host):
    import torch

    from serve_spec.parallel.worker_ranks import RankLost, WorkerRanks

    ranks = WorkerRanks(2, host)
    print(pickle.dumps(ranks.address).hex(), flush=True)
    ranks.accept({})
    group = ranks.join(torch.device("cpu"))
    ranks.broadcast("sum")
    print(group.all_reduce(torch.ones(3)).tolist(), flush=True)
    try:
        while True:
            ranks.check()
            time.sleep(0.2)
    except RankLost as error:
        print(error, flush=True)


async def run_rank_1(address):
    from tests.helpers.follower import follow

    try:
        follow("run", 1, 2, pickle.loads(bytes.fromhex(address)))
    except OSError as error:
        print(error, flush=True)


KINDS = {"router": run_router, "replica": run_replica, "rank-0": run_rank_0, "rank-1": run_rank_1}

if __name__ == "__main__":
    kind, argument = sys.argv[1:]
    asyncio.run(KINDS[kind](argument))
