"""`EngineReplica`: one engine behind a Serve deployment. Thin: the engine does the work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from importlib import import_module
from typing import Any

from ray import serve

from serve_spec.config import ServeSpecConfig
from serve_spec.core.errors import EngineOverloaded, InvalidRequest
from serve_spec.log import get_logger
from serve_spec.serving.messages import (
    Accepted,
    Failed,
    GenerateRequest,
    Refused,
    ReplicaItem,
)
from serve_spec.serving.stats_actor import StatsClient, StatsUnavailable

logger = get_logger(__name__)


class EngineReplica:
    """Answers `GenerateRequest`s with one engine.

    Its methods are the names Serve looks for: `check_health`, `record_routing_stats`,
    `reconfigure`, `__del__`. Serve routes to it once `__init__` has returned, that is once the
    engine is loaded; on shutdown it lets running requests finish first.

    engine_loop: import path `module:Class` of the engine, `EngineLoop` or a stand-in for it.
    """

    def __init__(self, config: ServeSpecConfig, engine_loop: str) -> None:
        context = serve.get_replica_context()
        self._name = context.replica_id.unique_id
        self._identity = {"replica_rank": context.rank.rank if context.rank else None}
        self._interval_s = config.stats.push_interval_s
        self._stats = StatsClient(config.stats)
        # Imported here: the engine pulls in torch, which router and builder do without.
        self._loop = _import(engine_loop)(config)
        self._reporter = asyncio.get_running_loop().create_task(self._report_forever())

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[ReplicaItem, None]:
        """The completion, one item per engine round; see `messages` for the protocol.

        Closed or cancelled early, it ends the request in the engine, which frees its pages.
        """
        try:
            stream = await self._loop.submit(request.prompt, request.params, request.request_id)
            yield Accepted(stream.num_prompt_tokens, self._name)
            async for delta in stream:
                yield delta
        except InvalidRequest as error:
            yield Refused(error)
        except Exception as error:  # whatever broke, the router must hear of it, once
            overloaded = isinstance(error, EngineOverloaded)
            if not overloaded:
                logger.error("request %s (%s): %r", request.request_id, request.trace_id, error)
            yield Failed(str(error), overloaded)
        finally:
            self._loop.cancel(request.request_id)

    async def check_health(self) -> None:
        """Raises when the engine thread is dead or stuck; Serve then replaces this replica."""
        self._loop.check_health()

    async def snapshot(self) -> dict[str, object]:
        """The engine's state and whose it is."""
        return {**self._loop.snapshot(), **self._identity, "replica": self._name}

    def record_routing_stats(self) -> dict[str, object]:
        """What a request router may weigh; Serve collects it every few seconds."""
        state: Mapping[str, Any] = self._loop.snapshot()
        wanted = ("batch_size", "num_waiting", "speculative_num_steps", "avg_spec_accept_length")
        return {name: state.get(name) for name in wanted} | {"kv": state.get("kv")}

    async def reconfigure(self, user_config: Mapping[str, object]) -> None:
        """Changes policy knobs of the running engine (`user_config` of the deployment).

        Raises:
            ValueError: the settings are invalid; nothing changed.
        """
        await asyncio.to_thread(self._loop.reconfigure, user_config)

    def __del__(self) -> None:
        """Serve's farewell, after the last request has ended."""
        if hasattr(self, "_reporter"):
            self._reporter.cancel()
            self._stats.forget(self._name)
            self._loop.shutdown()

    async def _report_forever(self) -> None:
        """Keeps the stats actor informed. No request waits for it, and it survives the actor."""
        while True:
            try:
                await self._stats.report(self._name, await self.snapshot())
            except StatsUnavailable as error:
                logger.info("report not delivered: %s", error)
            except Exception as error:
                logger.warning("no report this time: %r", error)
            await asyncio.sleep(self._interval_s)


def _import(path: str) -> Any:
    """The object that `module:name` means."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
