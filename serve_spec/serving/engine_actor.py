"""The engine of a replica in a process of its own: an actor in the replica's placement group.

Ray only hosts it. Requests and tokens go over a local socket, because a Ray call in every step
would cost more than the step; each end also notices there that the other one is gone.
"""

from __future__ import annotations

import os
import pkgutil
from contextlib import suppress
from multiprocessing.connection import Client, Listener
from secrets import token_hex
from typing import Any

import ray
from ray.exceptions import RayTaskError

from serve_spec.config import ServeSpecConfig
from serve_spec.engine.client import EngineClient
from serve_spec.log import get_logger
from serve_spec.serving.ranks import ActorLauncher, rank_options

logger = get_logger(__name__)

BUILD_ENGINE = "serve_spec.engine.build:build_engine"


def start_engine(config: ServeSpecConfig, build: str = BUILD_ENGINE) -> EngineProcess:
    """Start the engine of the replica that this process is; return when it is ready.

    build: import path of a function like `build_engine`.

    Raises:
        Exception: what `build` raises, for example CheckpointError.
        RayError: the process cannot start, or has died.
    """
    actor = Engine.options(**rank_options(config, 0)).remote()  # type: ignore[attr-defined]
    # Futures, because this thread may be the one of an event loop, where `ray.get` warns.
    address, secret = actor.listen.remote().future().result()
    life = actor.serve.remote(build, config)
    with suppress(EOFError, OSError):  # how the method ended says more
        return EngineProcess(config, actor, Client(address, authkey=secret))
    try:
        life.future().result()
    except RayTaskError as error:
        raise error.cause from None  # as it was raised there; the log has the traceback
    raise RuntimeError("the engine's process ended before it was ready")


class EngineProcess(EngineClient):
    """A client that ends the process of its engine with it."""

    def __init__(self, config: ServeSpecConfig, actor: Any, connection: Any) -> None:
        super().__init__(config, connection)
        self._actor = actor

    def shutdown(self) -> None:
        """See `EngineClient`."""
        super().shutdown()
        ray.kill(self._actor)


@ray.remote(max_restarts=0, max_task_retries=0)
class Engine:
    """The process of an engine: owns its GPU, and ends when the replica does."""

    def listen(self) -> tuple[str, bytes]:
        """Return where the replica calls, and the key that both ends prove to know."""
        # An abstract address is no file that would have to be removed.
        address, secret = f"\0serve_spec-{os.getpid()}-{token_hex(8)}", os.urandom(32)
        self._listener = Listener(address, "AF_UNIX", authkey=secret)
        return address, secret

    def serve(self, build: str, config: ServeSpecConfig) -> None:
        """Build the engine and run it for the replica, to its end."""
        # Imported here: router and builder do without torch.
        from serve_spec.engine.server import EngineServer

        with self._listener:
            connection = self._listener.accept()
        launcher = ActorLauncher(config) if config.model.tensor_parallel_size > 1 else None
        try:
            with connection:
                engine = pkgutil.resolve_name(build)(config, launcher)
                EngineServer(config, engine, connection, on_lost=_end_process).run()
        except Exception:
            logger.exception("the engine cannot start")
            raise


def _end_process() -> None:
    """End at once, whatever a step waits for."""
    os._exit(1)
