"""Loads on an engine in this process, without HTTP."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from serve_spec.bench.online.load import Load, LoadRun, Requests, Served
from serve_spec.core.request import TokenDelta
from serve_spec.core.sequence import Sequence
from serve_spec.engine.engine import SpecEngine
from serve_spec.engine.output import OutputProcessor


@dataclass
class _Running:
    """An open request; deltas count as chunks by the rule of the HTTP stream.

    Without `detokenize` every delta with tokens is a chunk.
    """

    due_s: float
    sent_s: float
    sequence: Sequence
    chunk_s: list[float] = field(default_factory=list)
    deltas: list[TokenDelta] = field(default_factory=list)

    @property
    def has_text(self) -> bool:
        """Return whether its tokens become text."""
        return self.sequence.params.detokenize

    def served(self) -> Served:
        token_ids = tuple(token_id for delta in self.deltas for token_id in delta.token_ids)
        return Served(
            due_s=self.due_s,
            sent_s=self.sent_s,
            ended_s=self.chunk_s[-1],
            chunk_s=tuple(self.chunk_s),
            text="".join(delta.text for delta in self.deltas),
            num_tokens=len(token_ids),
            num_prompt_tokens=self.sequence.num_prompt_tokens,
            speculation=self.sequence.stats.as_dict(),
            token_ids=token_ids,
        )


def run_offline(
    engine: SpecEngine,
    load: Load,
    requests: Requests,
    *,
    seed: int = 0,
    on_end: Callable[[int], object] = int,
) -> LoadRun:
    """Run a load on an idle engine; raise InvalidRequest if it cannot be served.

    seed: of the schedule of an open loop. on_end: gets the number of requests that have just ended.
    """
    schedule, most_at_once = load.arrivals(len(requests), seed), load.num_streams or len(requests)
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
        for delta in outputs.process(engine.step()):
            mine = running[delta.request_id]
            mine.deltas.append(delta)
            if delta.text or delta.finish_reason is not None or not mine.has_text:
                mine.chunk_s.append(time.perf_counter() - started_s)
            if delta.finish_reason is not None:
                served[delta.request_id] = running.pop(delta.request_id).served()
                on_end(1)
        engine.raise_failed()
    return LoadRun([served[str(number)] for number in range(len(requests))])
