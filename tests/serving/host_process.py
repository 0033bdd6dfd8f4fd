"""One end of a connection between two hosts: `router HOST` or `replica ADDRESS`."""

import asyncio
import pickle
import sys

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


if __name__ == "__main__":
    kind, argument = sys.argv[1:]
    asyncio.run({"router": run_router, "replica": run_replica}[kind](argument))
