"""The client of an engine in another process: texts, checks and grammars, and asyncio streams."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection

import msgspec

from serve_spec.config import ServeSpecConfig
from serve_spec.core.errors import EngineOverloaded, InvalidRequest
from serve_spec.core.grammar import Grammar
from serve_spec.core.record import StepRecord
from serve_spec.core.request import (
    Prompt,
    SamplingParams,
    TokenDelta,
)
from serve_spec.engine import messages
from serve_spec.engine.collector import MetricsCollector
from serve_spec.engine.inputs import InputProcessor
from serve_spec.engine.output import OutputProcessor
from serve_spec.engine.tokenizer import Tokenizer
from serve_spec.log import get_logger
from serve_spec.metrics import MetricsSink, NullSink
from serve_spec.structured.compiler import GrammarCompiler

logger = get_logger(__name__)


class TokenStream:
    """The deltas of one request, in order; the last one carries the finish reason."""

    def __init__(self, request_id: str, num_prompt_tokens: int) -> None:
        self.request_id = request_id
        self.num_prompt_tokens = num_prompt_tokens
        self._early: list[TokenDelta | Exception] = []
        """Items that came before a reader."""
        self._take: Callable[[TokenDelta], None] | None = None
        self._end: asyncio.Future[None]

    def put(self, item: TokenDelta | Exception) -> None:
        """Add an item. To be called on the event loop of the reader."""
        if self._take is None:
            self._early.append(item)
        else:
            self._hand_over(item, self._take)

    async def each(self, take: Callable[[TokenDelta], None]) -> None:
        """Call `take` with every delta as it comes, without a task; return after the last one.

        Raises what ended the stream instead of a last delta, or what `take` raised.
        """
        self._take, self._end = take, asyncio.get_running_loop().create_future()
        for item in self._early:
            self._hand_over(item, take)
        await self._end

    def _hand_over(self, item: TokenDelta | Exception, take: Callable[[TokenDelta], None]) -> None:
        if self._end.done():  # the reader has left, or the text has ended
            return
        try:
            if isinstance(item, Exception):
                raise item
            take(item)
            if item.finish_reason is not None:
                self._end.set_result(None)
        except Exception as error:  # the streams of other requests go on
            self._end.set_exception(error)


class EngineClient:
    """Gives requests to the `EngineServer` at the other end of a connection.

    Streams belong to the event loop that asks for them; each message of the engine wakes it once.
    """

    def __init__(self, config: ServeSpecConfig, connection: Connection) -> None:
        """Wait until the engine is ready. Raises EOFError: it has ended before."""
        self.config = config
        self._connection = connection
        self.tokenizer = Tokenizer(config.model.tokenizer_folder)
        first = messages.decode_message(connection.recv_bytes())
        limits = first.limits
        assert limits is not None, "the first message says that the engine is ready"
        grammars = GrammarCompiler(
            partial(self.tokenizer.describe, limits.vocab_size),
            limits.vocab_size,
            limits.eos_token_ids,
        )
        grammars.prepare()
        self._grammars = grammars
        self._inputs = InputProcessor(self.tokenizer, limits, grammars.matcher)
        self._outputs = OutputProcessor(self.tokenizer, self._abort)
        self._collector = MetricsCollector()
        self._metrics: MetricsSink = NullSink()
        self._streams: dict[str, TokenStream] = {}
        self._max_unfinished = config.scheduler.max_num_seqs + config.scheduler.max_waiting_seqs
        self._calls = itertools.count()
        self._replies: queue.SimpleQueue[messages.Reply] = queue.SimpleQueue()
        self._call_lock = threading.Lock()
        self._sender = messages.Sender[list[msgspec.Raw]](connection, messages.encode, list.extend)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: str | None = None
        self._snapshot: dict[str, object] = {}
        self._stopping = False
        self._stuck_after_s = config.replica.round_timeout_s
        self._take(first)
        self._reader = threading.Thread(target=self._read, name="engine reader", daemon=True)
        self._reader.start()

    async def submit(
        self, prompt: Prompt, params: SamplingParams, request_id: str, emitted: Sequence[int] = ()
    ) -> TokenStream:
        """Queue a request and return its stream, which continues after `emitted` tokens.

        Cancelling this coroutine cancels the request. Raises InvalidRequest, EngineOverloaded, or
        RuntimeError if the engine has died.
        """
        self.check_health()
        # Neither blocks the event loop.
        token_ids = await self.token_ids(prompt, params)
        if params.grammar is not None:
            grammar = await asyncio.to_thread(self._translate, params.grammar)
            params = replace(params, grammar=grammar)
        if request_id in self._streams:
            raise InvalidRequest("request_id", request_id, "is running already; use another")
        if len(self._streams) >= self._max_unfinished:
            raise EngineOverloaded(
                f"{len(self._streams)} requests are unfinished, as many as max_num_seqs and "
                "max_waiting_seqs allow; try again later"
            )
        seq = self._inputs.new_sequence(request_id, token_ids, params, emitted)
        stream = TokenStream(request_id, seq.num_prompt_tokens)
        command = messages.Add.of(seq)
        self._loop = asyncio.get_running_loop()
        self._streams[request_id] = stream
        self._outputs.add(seq)
        self._command(command)
        # The engine may have died since the first check, before this stream was added.
        self.check_health()
        return stream

    async def token_ids(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        """Return the token ids that a request begins with; see `InputProcessor.token_ids`."""
        if not isinstance(prompt, str):
            return self._inputs.token_ids(prompt, params)
        return await messages.encode_async(
            len(prompt), partial(self._inputs.token_ids, prompt, params)
        )

    def cancel(self, request_id: str) -> None:
        """End a request that was submitted and free its pages before the next step; else no-op."""
        if request_id in self._streams:
            self._abort(request_id)

    def _translate(self, grammar: Grammar) -> Grammar:
        self._inputs.check_grammar(grammar)
        return self._grammars.translate(grammar)

    def reconfigure(self, settings: Mapping[str, object]) -> None:
        """Change policy settings between steps.

        Raises ValueError if they are invalid, and nothing changed; RuntimeError if the engine has
        died.
        """
        self._call("reconfigure", dict(settings))

    def start_from(self, accept_rates: Iterable[float]) -> None:
        """Start from acceptance rates of other engines, in (0, 1) per position.

        Call it before the first request. Raises as `reconfigure`.
        """
        self._call("start_from", list(accept_rates))

    def flush_cache(self) -> None:
        """Drop the cached prefixes that no request uses, before the next step."""
        self._command(messages.FlushCache())

    def report_to(self, metrics: MetricsSink) -> None:
        """Send the record of every step from now on to `metrics`, from a thread of the client."""
        self._metrics = metrics

    def snapshot(self) -> dict[str, object]:
        """Return the engine's newest state for operators, JSON-able, without stopping it."""
        return self._snapshot

    def check_health(self) -> None:
        """Raise RuntimeError if the engine has ended or hangs in a step."""
        if self._stopping:
            raise RuntimeError("the engine has been shut down")
        if self._failure is None and time.monotonic() - self._received_at > self._stuck_after_s:
            limit = f"replica.round_timeout_s={self._stuck_after_s:g}"
            self._lose(f"a step has been running for longer than {limit} seconds")
        if self._failure is not None:
            raise RuntimeError(self._failure)

    def shutdown(self) -> None:
        """Stop the engine after the current step; unfinished streams are aborted."""
        self._stopping = True
        self._command(messages.Stop())
        self._reader.join(self._stuck_after_s)
        messages.hang_up(self._connection)
        self._reader.join()
        self._sender.close()
        self._connection.close()

    def _abort(self, request_id: str) -> None:
        self._command(messages.Abort(request_id))

    def _call(self, method: str, argument: object) -> None:
        """Call a method of the engine between steps and wait; its refusal is raised here."""
        self.check_health()
        with self._call_lock:
            number = next(self._calls)
            self._command(messages.Call(number, method, argument))
            try:
                reply = self._replies.get(timeout=self._stuck_after_s)
                while reply.number != number:  # of a call that was given up
                    reply = self._replies.get(timeout=self._stuck_after_s)
            except queue.Empty:
                self.check_health()
                raise RuntimeError(f"no answer within {self._stuck_after_s:g} s") from None
        if reply.error is not None:
            raise ValueError(reply.error)

    def _command(self, command: messages.Command) -> None:
        self._sender.put([msgspec.Raw(messages.encode(command))])

    def _read(self) -> None:
        try:
            while True:
                self._take(messages.decode_message(self._connection.recv_bytes()))
        except (EOFError, OSError):
            reason = "the engine's process has ended"
        except msgspec.MsgspecError as error:
            reason = f"a message of the engine cannot be decoded: {error}"
        self._lose(reason)

    def _take(self, message: messages.EngineMessage) -> None:
        self._received_at = time.monotonic()
        if message.deltas or message.failed:  # first: tokens do not wait for metrics
            self._in_loop(partial(self._deliver, message))
        for record in message.records:
            self._observe(record)
        if message.snapshot is not None:
            self._snapshot = {**message.snapshot, "speculation": self._collector.snapshot()}
        for reply in message.replies:
            self._replies.put(reply)
        if message.death is not None:
            self._lose(f"the engine died: {message.death}")

    def _observe(self, record: StepRecord) -> None:
        speedup = self._collector.speedup(record.batch_size)
        self._collector.observe(record)
        self._metrics.observe(replace(record, speedup=speedup))

    def _deliver(self, message: messages.EngineMessage) -> None:
        for delta in self._outputs.process(message.deltas):
            if (stream := self._streams.get(delta.request_id)) is not None:
                stream.put(delta)
        # The engine has a request until it reports the end, also after a stop string.
        for delta in message.deltas:
            if delta.finish_reason is not None:
                self._streams.pop(delta.request_id, None)
        for request_id, failure in message.failed.items():
            if (stream := self._streams.pop(request_id, None)) is not None:
                stream.put(failure.error())
            self._outputs.forget(request_id)

    def _lose(self, reason: str) -> None:
        """Note that the engine is lost, and tell all streams. The first reason counts."""
        if self._failure is None and not self._stopping:
            logger.error("%s", reason)
        self._failure = self._failure or reason
        messages.hang_up(self._connection)
        self._in_loop(self._fail_streams)

    def _fail_streams(self) -> None:
        for stream in self._streams.values():
            stream.put(RuntimeError(self._failure))
        self._streams.clear()

    def _in_loop(self, callback: Callable[[], None]) -> None:
        """Run a callback on the event loop of the streams, if there is one."""
        if self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:  # the loop is closed: its streams have no readers
            callback()
