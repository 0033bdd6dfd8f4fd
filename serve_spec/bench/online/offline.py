"""The same load on an engine in this process: what HTTP, Ray and the client are compared with."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from serve_spec.bench.online.load import ClosedLoop, Load
from serve_spec.bench.online.record import LoadRun, Served, TextRequest
from serve_spec.core.request import TokenDelta
from serve_spec.core.sequence import Sequence as EngineSequence
from serve_spec.engine.engine import SpecEngine
from serve_spec.engine.output import OutputProcessor


@dataclass
class _Running:
    """A request on its way; deltas count as chunks by the rule of the HTTP stream."""

    due_s: float
    sent_s: float
    sequence: EngineSequence
    chunk_s: list[float] = field(default_factory=list)
    deltas: list[TokenDelta] = field(default_factory=list)

    def add(self, delta: TokenDelta, now_s: float) -> None:
        self.deltas.append(delta)
        if delta.text or delta.finish_reason is not None:
            self.chunk_s.append(now_s)

    def served(self) -> Served:
        return Served(
            due_s=self.due_s,
            sent_s=self.sent_s,
            ended_s=self.chunk_s[-1],
            chunk_s=tuple(self.chunk_s),
            text="".join(delta.text for delta in self.deltas),
            num_tokens=sum(len(delta.token_ids) for delta in self.deltas),
            num_prompt_tokens=self.sequence.num_prompt_tokens,
            speculation=self.sequence.stats.as_dict(),
        )


def run_offline(
    engine: SpecEngine, load: Load, requests: Sequence[TextRequest], *, seed: int = 0
) -> LoadRun:
    """Runs every request on an idle engine, as `load` says, rounds without pause between.

    Raises:
        InvalidRequest: a request can not be served by this engine.
    """
    if isinstance(load, ClosedLoop):
        schedule, most_at_once = None, load.num_streams
    else:
        schedule, most_at_once = load.arrivals(len(requests), seed), len(requests)
    waiting = deque(enumerate(requests))
    outputs = OutputProcessor(engine.tokenizer, engine.abort)
    running: dict[str, _Running] = {}
    served: dict[str, Served] = {}
    started_s = time.perf_counter()
    while waiting or running:
        now_s = time.perf_counter() - started_s
        while waiting and len(running) < most_at_once:
            number, request = waiting[0]
            due_s = now_s if schedule is None else schedule[number]
            if due_s > now_s:
                break
            waiting.popleft()
            sequence = engine.new_sequence(str(number), request.prompt, request.params)
            engine.add(sequence)
            outputs.add(sequence)
            running[str(number)] = _Running(due_s, now_s, sequence)
        if not running:
            time.sleep(due_s - now_s)
            continue
        deltas = outputs.process(engine.step())
        now_s = time.perf_counter() - started_s
        for delta in deltas:
            running[delta.request_id].add(delta, now_s)
            if delta.finish_reason is not None:
                served[delta.request_id] = running.pop(delta.request_id).served()
    return LoadRun([served[str(number)] for number in range(len(requests))])
