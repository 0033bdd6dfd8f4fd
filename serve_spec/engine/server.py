"""The engine's end of the channel: steps in the caller's thread, commands in one of their own."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection

import msgspec

from serve_spec.config import ServeSpecConfig
from serve_spec.core.errors import InvalidRequest, RequestFailed
from serve_spec.core.record import StepRecord
from serve_spec.core.request import FinishReason, TokenDelta
from serve_spec.core.sequence import Sequence
from serve_spec.engine import messages
from serve_spec.engine.engine import SpecEngine
from serve_spec.log import get_logger

logger = get_logger(__name__)

_SNAPSHOT_S = 1.0
"""Seconds between snapshots for operators while the engine works."""
_IDLE_S = 1.0
"""Most seconds between messages of an idle engine."""


class EngineServer:
    """Runs an engine for an `EngineClient` at the other end of a connection.

    on_lost: called in another thread if the client is gone; a step may be running.
    """

    def __init__(
        self,
        config: ServeSpecConfig,
        engine: SpecEngine,
        connection: Connection,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._connection = connection
        self._on_lost = on_lost
        # A client that receives nothing for longer considers the engine hung.
        self._idle_s = min(_IDLE_S, config.replica.round_timeout_s / 4)
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._sender = messages.Sender(connection, messages.encode, messages.merge)
        self._next = messages.EngineMessage()
        self._snapshot_at = 0.0
        self._open: set[str] = set()
        self._compiling: set[str] = set()
        self._compiler = ThreadPoolExecutor(1, "grammar")
        self._stopping = False
        engine.metrics = self

    def run(self) -> None:
        """Serve until the client stops the engine or is gone. Log the error if the engine dies."""
        receiver = threading.Thread(target=self._receive, name="receive", daemon=True)
        self._next.limits = self._engine.limits
        self._flush()
        receiver.start()
        try:
            while not self._stopping:
                self._advance()
            for request_id in self._open.copy():
                self._abort(request_id)
        except BaseException as error:
            logger.exception("the engine died")
            self._next.death = repr(error)
        self._compiler.shutdown(wait=False, cancel_futures=True)
        self._sender.put(self._next)
        self._sender.close()
        receiver.join()
        self._connection.close()
        self._engine.shutdown()

    def observe(self, record: StepRecord) -> None:
        """Send the record of a step with its tokens. See `MetricsSink`."""
        self._next.records.append(messages.for_metrics(record))

    def _advance(self) -> None:
        engine = self._engine
        wait_s = 0.0 if engine.has_work else min(self._idle_s, engine.idle_wait_s())
        self._run_commands(wait_s)
        if engine.has_work:
            self._deliver(engine.step())
            if failed := engine.take_failed():
                for request_id, error in failed.items():
                    self._fail(request_id, error)
                engine.check_health()
        else:
            engine.check_health()
            engine.use_idle_time()
        self._flush()

    def _flush(self) -> None:
        """Hand over this step's message, then a snapshot if one is due: no token waits for it."""
        now, message = time.monotonic(), self._next
        if message.replies or message.limits:  # the client may look at once
            self._snapshot_at, message.snapshot = now + _SNAPSHOT_S, self._engine.snapshot()
        self._put(message)
        if now >= self._snapshot_at:
            self._snapshot_at = now + _SNAPSHOT_S
            self._put(messages.EngineMessage(snapshot=self._engine.snapshot()))

    def _put(self, message: messages.EngineMessage) -> None:
        self._next = messages.EngineMessage()
        self._sender.put(message)

    def _run_commands(self, wait_s: float) -> None:
        """Run queued commands; wait up to `wait_s` seconds for the first."""
        with suppress(queue.Empty):
            while True:
                self._commands.get(timeout=wait_s)()
                wait_s = 0.0

    def _deliver(self, deltas: list[TokenDelta]) -> None:
        self._next.deltas += deltas
        self._open.difference_update([d.request_id for d in deltas if d.finish_reason is not None])

    def _add(self, seq: Sequence) -> None:
        """Queue a request, once its grammar is compiled in another thread."""
        self._open.add(seq.request_id)
        grammar = seq.params.grammar
        if grammar is None:
            self._engine.add(seq)
            return

        def compile_grammar() -> None:
            problem = None
            try:
                self._engine.check_grammar(grammar)
            except Exception as error:
                problem = str(error)
            self._commands.put(lambda: self._add_compiled(seq, problem))

        self._compiling.add(seq.request_id)
        self._compiler.submit(compile_grammar)

    def _add_compiled(self, seq: Sequence, problem: str | None) -> None:
        if seq.request_id not in self._compiling:  # aborted meanwhile
            return
        self._compiling.remove(seq.request_id)
        if problem is None:
            self._engine.add(seq)
        else:
            self._fail(seq.request_id, RequestFailed(problem))

    def _abort(self, request_id: str) -> None:
        if request_id in self._compiling:
            self._compiling.remove(request_id)
            self._deliver([TokenDelta(request_id, (), "", FinishReason.ABORT)])
        elif (delta := self._engine.abort(request_id)) is not None:
            self._deliver([delta])

    def _fail(self, request_id: str, error: Exception) -> None:
        if not isinstance(error, InvalidRequest):
            logger.error("request %s: %s", request_id, error)
        self._open.discard(request_id)
        self._next.failed[request_id] = messages.Failure.of(error)

    def _call(self, call: messages.Call) -> None:
        error = None
        try:
            if call.method == "reconfigure":
                self._engine.reconfigure(call.argument)
            else:
                self._engine.controller.start_from(call.argument)
        except Exception as refusal:  # for the caller; the engine continues
            error = str(refusal)
        self._next.replies.append(messages.Reply(call.number, error))

    def _receive(self) -> None:
        """Decode commands until the client stops the engine or is gone."""
        with suppress(EOFError, OSError):
            while not self._stopping:
                self._handle_all(self._connection.recv_bytes())
        if not self._stopping:
            self._stopping = True
            self._engine.give_up("the engine's client is gone")
            self._on_lost()
        self._commands.put(lambda: None)

    def _handle_all(self, message: bytes) -> None:
        try:
            commands = messages.decode_commands(message)
        except msgspec.MsgspecError as error:
            logger.error("commands cannot be decoded: %s", error)
            return
        for command in commands:
            self._handle(command)

    def _handle(self, encoded: msgspec.Raw) -> None:
        try:
            command = messages.decode_command(encoded)
        except msgspec.MsgspecError as error:
            logger.error("a command cannot be decoded: %s", error)
            return
        match command:
            case messages.Add(request_id, request):
                try:
                    seq = messages.decode_request(request)
                except msgspec.MsgspecError as error:
                    failure = RequestFailed(f"the engine cannot decode the request: {error}")
                    self._commands.put(lambda: self._fail(request_id, failure))
                else:
                    self._commands.put(lambda: self._add(seq))
            case messages.Abort(request_id):
                self._commands.put(lambda: self._abort(request_id))
            case messages.Call():
                self._commands.put(lambda: self._call(command))
            case messages.FlushCache():
                self._commands.put(self._engine.flush_cache)
            case messages.Stop():
                self._stopping = True
