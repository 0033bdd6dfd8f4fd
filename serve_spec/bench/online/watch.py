"""The server's own account of itself over a run: batch sizes and depths, from `/server_info`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from serve_spec.bench.online.client import Client
from serve_spec.bench.online.record import Sample

# The same account, seen twice, differs by what the answers took.
_SAME_WITHIN_S = 0.05


@asynccontextmanager
async def watched(
    client: Client, started_s: float, every_s: float | None
) -> AsyncIterator[list[Sample]]:
    """A list that grows while the body runs: what is new, every `every_s` seconds; None: never."""
    samples: list[Sample] = []
    if every_s is None:
        yield samples
        return
    watching = asyncio.create_task(_watch(client, started_s, every_s, samples))
    try:
        yield samples
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching


async def _watch(client: Client, started_s: float, every_s: float, samples: list[Sample]) -> None:
    while True:
        info = await client.server_info()
        if info is not None:
            samples += news(accounts(info, time.perf_counter() - started_s), samples)
        await asyncio.sleep(every_s)


def accounts(info: Mapping[str, Any], time_s: float) -> list[Sample]:
    """What `/server_info` says at `time_s`; replicas report on their own schedule, hence earlier.

    Where a server says nothing of the kind, there is nothing.
    """
    return [
        {
            "time_s": round(time_s - state.get("age_s", 0.0), 3),
            "replica": str(state.get("replica", place)),
            "batch_size": state.get("batch_size"),
            "num_waiting": state.get("num_waiting"),
            "num_steps": state.get("speculative_num_steps"),
        }
        for place, state in enumerate(info.get("internal_states", ()))
    ]


def news(found: Iterable[Sample], known: Iterable[Sample]) -> list[Sample]:
    """Those of `found` that are from the run and younger than what is known of their replicas."""
    latest = {sample["replica"]: sample["time_s"] + _SAME_WITHIN_S for sample in known}
    return [sample for sample in found if sample["time_s"] > latest.get(sample["replica"], 0.0)]
