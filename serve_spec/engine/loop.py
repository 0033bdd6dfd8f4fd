"""The engine in a thread, with asyncio streams for its requests."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from functools import partial

from serve_spec.config import ServeSpecConfig
from serve_spec.core.errors import EngineOverloaded, InvalidRequest
from serve_spec.core.grammar import Grammar
from serve_spec.core.request import FinishReason, SamplingParams, TokenDelta
from serve_spec.engine.build import build_engine
from serve_spec.engine.encoding import encode_async
from serve_spec.engine.engine import SpecEngine
from serve_spec.log import get_logger
from serve_spec.metrics import MetricsSink
from serve_spec.parallel.launch import Launcher

logger = get_logger(__name__)


class TokenStream:
    """The deltas of one request, in order; the last one carries the finish reason."""

    def __init__(self, request_id: str, num_prompt_tokens: int) -> None:
        self.request_id = request_id
        self.num_prompt_tokens = num_prompt_tokens
        self.event_loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[TokenDelta | Exception] = asyncio.Queue()

    def put(self, item: TokenDelta | Exception) -> None:
        """Add an item. Called in the reader's event loop."""
        self._items.put_nowait(item)

    async def __aiter__(self) -> AsyncIterator[TokenDelta]:
        finished = False
        while not finished:
            item = await self._items.get()
            if isinstance(item, Exception):
                raise item
            finished = item.finish_reason is not None
            yield item


def _put_all(items: Iterable[tuple[TokenStream, TokenDelta | Exception]]) -> None:
    """Add items to streams; each event loop of readers wakes up once. Called from any thread."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[TokenStream, TokenDelta | Exception]]] = {}
    for stream, item in items:
        by_loop.setdefault(stream.event_loop, []).append((stream, item))
    for event_loop, its_items in by_loop.items():
        try:
            event_loop.call_soon_threadsafe(_put_each, its_items)
        except RuntimeError:
            logger.debug("%d streams have no reader: their event loop is closed", len(its_items))


def _put_each(items: Sequence[tuple[TokenStream, TokenDelta | Exception]]) -> None:
    for stream, item in items:
        stream.put(item)


class EngineLoop:
    """Owns a `SpecEngine` and its thread. All access to the engine goes through it."""

    def __init__(self, config: ServeSpecConfig, launcher: Launcher | None = None) -> None:
        """launcher: see `build_engine`."""
        self.config = config
        self._engine: SpecEngine = self._build(config, launcher)
        self.tokenizer = self._engine.tokenizer
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._streams: dict[str, TokenStream] = {}
        self._preparing: set[str] = set()
        limits = config.scheduler
        self._max_unfinished = limits.max_num_seqs + limits.max_waiting_seqs
        self._failure: BaseException | None = None
        self._stopping = False
        self._stuck_after_s = config.replica.round_timeout_s
        self._round_started: float | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def _build(self, config: ServeSpecConfig, launcher: Launcher | None) -> SpecEngine:
        """Return the engine; a stand-in for load tests overrides it."""
        return build_engine(config, launcher)

    async def submit(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        request_id: str,
        emitted: Sequence[int] = (),
    ) -> TokenStream:
        """Queue a request and return its stream.

        emitted: see `SpecEngine.new_sequence`.

        Raises:
            InvalidRequest: the prompt or a parameter cannot be served.
            EngineOverloaded: too many requests are unfinished.
            RuntimeError: the engine thread has died.
        """
        self.check_health()
        token_ids, is_cancelled = await self._prepare(prompt, params.grammar, request_id)
        if request_id in self._streams:
            raise InvalidRequest("request_id", request_id, "is running already; use another")
        if len(self._streams) >= self._max_unfinished:
            raise EngineOverloaded(
                f"{len(self._streams)} requests are unfinished, as many as max_num_seqs and "
                "max_waiting_seqs allow; try again later"
            )
        seq = self._engine.new_sequence(request_id, token_ids, params, emitted)
        stream = TokenStream(request_id, seq.num_prompt_tokens)
        if is_cancelled:
            stream.put(TokenDelta(request_id, (), "", FinishReason.ABORT, seq.stats))
            return stream
        self._streams[request_id] = stream
        self._commands.put(lambda: self._engine.add(seq))
        # The thread may have died since the first check, before it could see this stream.
        self.check_health()
        return stream

    async def encode(self, prompt: str) -> list[int]:
        """Return the token ids of a prompt without blocking the event loop.

        Raises:
            InvalidRequest: as `SpecEngine.encode`.
        """
        return await encode_async(len(prompt), partial(self._engine.encode, prompt))

    def cancel(self, request_id: str) -> None:
        """End a request and free its pages before the next step; harmless if it has ended."""
        self._preparing.discard(request_id)

        def abort() -> None:
            delta = self._engine.abort(request_id)
            if delta is not None:
                self._deliver([delta])

        self._commands.put(abort)

    async def _prepare(
        self, prompt: str | list[int], grammar: Grammar | None, request_id: str
    ) -> tuple[list[int], bool]:
        """Encode a prompt and compile its grammar without blocking the event loop.

        Returns the token ids, and whether the request was cancelled meanwhile.
        """
        self._preparing.add(request_id)
        try:
            token_ids = await self.encode(prompt) if isinstance(prompt, str) else prompt
            if grammar is not None:
                await asyncio.to_thread(self._engine.check_grammar, grammar)
            return token_ids, request_id not in self._preparing
        finally:
            self._preparing.discard(request_id)

    def reconfigure(self, settings: Mapping[str, object]) -> None:
        """Change policy settings between steps.

        Raises:
            ValueError: the settings are invalid; nothing changed.
            RuntimeError: the engine thread has died.
        """
        self._call(lambda: self._engine.reconfigure(settings))

    def start_from(self, accept_rates: Sequence[float]) -> None:
        """Set acceptance rates learned by other engines; before the first request.

        Raises:
            ValueError: not one rate in (0, 1) per position; nothing changed.
            RuntimeError: the engine thread has died.
        """
        self._call(lambda: self._engine.controller.start_from(accept_rates))

    def report_to(self, metrics: MetricsSink) -> None:
        """Send the record of every step from now on to `metrics`, from the engine's thread."""
        self._engine.metrics = metrics

    def snapshot(self) -> dict[str, object]:
        """Return the engine's state for operators, JSON-able, without stopping it."""
        return self._engine.snapshot()

    def check_health(self) -> None:
        """Raise RuntimeError if the thread has ended or hangs in a step, or a rank is lost."""
        if self._stopping:
            raise RuntimeError("the engine has been shut down")
        if self._failure is not None:
            raise RuntimeError(f"the engine thread died: {self._failure!r}") from self._failure
        self._engine.check_health()
        started = self._round_started
        if started is not None and time.monotonic() - started > self._stuck_after_s:
            limit = f"replica.round_timeout_s={self._stuck_after_s:g}"
            reason = f"a step has been running for longer than {limit} seconds"
            self._engine.give_up(reason)
            raise RuntimeError(reason)

    def shutdown(self) -> None:
        """Stop the thread after the current step; unfinished streams are aborted."""
        self._stopping = True
        self._commands.put(lambda: None)
        self._thread.join()
        self._engine.shutdown()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._run_commands(0.0 if self._engine.has_work else self._engine.idle_wait_s())
                self._round_started = time.monotonic()
                if self._engine.has_work:
                    self._deliver(self._engine.step())
                else:
                    self._engine.use_idle_time()
                self._round_started = None
            self._deliver(
                [
                    self._engine.abort(request_id)
                    or TokenDelta(request_id, (), "", FinishReason.ABORT)
                    for request_id in list(self._streams)
                ]
            )
        except BaseException as error:  # every stream gets the error
            logger.exception("the engine thread died")
            self._failure = error
            _put_all(
                (stream, RuntimeError(f"the engine thread died: {error!r}"))
                for stream in list(self._streams.values())
            )

    def _call(self, change: Callable[[], None]) -> None:
        """Run a change between steps and wait; its errors are raised here."""
        self.check_health()
        done: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

        def apply() -> None:
            try:
                change()
            except Exception as error:  # for the caller; the engine's thread goes on
                done.put(error)
            else:
                done.put(None)

        self._commands.put(apply)
        try:
            error = done.get(timeout=self._stuck_after_s)
        except queue.Empty:
            raise RuntimeError(
                f"the engine did not answer within {self._stuck_after_s:g} s"
            ) from None
        if error is not None:
            raise error

    def _run_commands(self, wait_s: float | None) -> None:
        """Run queued commands; wait up to `wait_s` seconds for the first, None: for ever."""
        while True:
            try:
                command = self._commands.get(timeout=wait_s)
            except queue.Empty:
                return
            command()
            wait_s = 0.0

    def _deliver(self, deltas: Iterable[TokenDelta]) -> None:
        """Give each delta to the stream of its request."""
        items: list[tuple[TokenStream, TokenDelta | Exception]] = []
        for delta in deltas:
            ended = delta.finish_reason is not None
            take = self._streams.pop if ended else self._streams.get
            stream = take(delta.request_id, None)
            if stream is not None:
                items.append((stream, delta))
        _put_all(items)
