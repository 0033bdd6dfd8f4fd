"""`serve-spec bench trace`: record the accepted drafts at every position of texts.

A text is a function of its prompt and seed, and the drafts at a position depend only on the text
before it. So a trace replays any policy without a model (`benchmarks/simulator.py`).
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias

import numpy as np
from tqdm import tqdm

from serve_spec.adaptive.drafts import DraftCalibration
from serve_spec.bench.command import configured
from serve_spec.bench.harness import new_sequence
from serve_spec.bench.report import table
from serve_spec.bench.workload import CLASSES, TextKind, TextRequest, prompts_by_source
from serve_spec.config import ConfigError
from serve_spec.core.draft import DraftShape
from serve_spec.core.plan import PendingBatch, ScheduledBatch
from serve_spec.engine.engine import SpecEngine
from serve_spec.engine.llm import LLM

FORMAT = 1
LEARNED_TOGETHER = 256
"""Positions per update of a calibration."""


@dataclass(frozen=True)
class AcceptanceTrace:
    """Accepted drafts of one request, position by position."""

    prompts: str
    temperature: float
    seed: int
    num_prompt_tokens: int
    num_correct_drafts: tuple[int, ...]
    """Value i: accepted drafts of a round of full depth that starts after i + 1 output tokens."""
    of_trees: tuple[tuple[int, ...], ...] = ()
    """The same for every shape in `TraceSet.trees`."""
    draft_logprobs: tuple[tuple[float, ...], ...] = ()
    """Log probability of each draft in such a round (`ops.draw`); empty without a draft model."""

    @property
    def kind(self) -> TextKind:
        """Return the kind of text."""
        return TextKind(self.prompts, self.temperature)

    @property
    def max_tokens(self) -> int:
        """Return the maximum tokens of a replay."""
        return len(self.num_correct_drafts) + 1


@dataclass(frozen=True)
class TraceSet:
    """Traces recorded at one depth; smaller depths use the same traces, truncated."""

    num_steps: int
    traces: tuple[AcceptanceTrace, ...]
    trees: tuple[DraftShape, ...] = ()
    """All of one topk."""

    def with_tree(self, tree: DraftShape, recorded: TraceSet) -> TraceSet:
        """Return these traces with those of a tree; raise ValueError if the requests differ."""
        pairs = list(zip(self.traces, recorded.traces, strict=True))
        if any((a.kind, a.seed, a.max_tokens) != (b.kind, b.seed, b.max_tokens) for a, b in pairs):
            raise ValueError(f"recorded={tree}: has other requests; record all with the same ones")
        traces = (
            replace(mine, of_trees=(*mine.of_trees, theirs.num_correct_drafts))
            for mine, theirs in pairs
        )
        return replace(self, traces=tuple(traces), trees=(*self.trees, tree))

    def of(self, kind: TextKind) -> list[AcceptanceTrace]:
        """Return the traces of one kind, as recorded; raise ValueError if there is none."""
        found = [trace for trace in self.traces if trace.kind == kind]
        if not found:
            known = sorted({(t.prompts, t.temperature) for t in self.traces})
            raise ValueError(f"kind={kind}: not in the file; use one of {known}")
        return found


def save_traces(traces: TraceSet, path: Path) -> None:
    """Write JSON: a header, and one line per trace."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(asdict(trace), separators=(",", ":")) for trace in traces.traces]
    shapes = [[tree.depth, tree.size] for tree in traces.trees]
    topk = traces.trees[0].topk if traces.trees else 1
    known = f'"num_steps":{traces.num_steps},"trees":{json.dumps(shapes)},"topk":{topk}'
    head = f'{{"format":{FORMAT},{known},"traces":[\n'
    path.write_text(head + ",\n".join(lines) + "\n]}\n")


def load_traces(path: Path) -> TraceSet:
    """Return what `save_traces` wrote; raise ValueError for any other file."""
    try:
        return _parsed(json.loads(path.read_text()))
    except (KeyError, TypeError) as error:
        fix = "record it again with `serve-spec bench trace`"
        raise ValueError(f"{path}: {error!r}: not an acceptance trace; {fix}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _parsed(data: Mapping[str, Any]) -> TraceSet:
    if data["format"] != FORMAT:
        fix = f"this version reads format {FORMAT}; record it again"
        raise ValueError(f"format={data['format']!r}: {fix}")
    most = data["num_steps"]
    topk = data.get("topk", 1)
    trees = tuple(DraftShape(depth, size, topk) for depth, size in data.get("trees", ()))
    traces = []
    for trace in data["traces"]:
        counts = _counts("num_correct_drafts", trace["num_correct_drafts"], most)
        pairs = zip(trees, trace.get("of_trees", ()), strict=True)
        of_trees = tuple(_counts("of_trees", mine, tree.depth) for tree, mine in pairs)
        logprobs = tuple(map(tuple, trace.get("draft_logprobs", ())))
        known = {"num_correct_drafts": counts, "of_trees": of_trees, "draft_logprobs": logprobs}
        traces.append(AcceptanceTrace(**{**trace, **known}))
    return TraceSet(most, tuple(traces), trees)


def _counts(name: str, counts: Sequence[int], most: int) -> tuple[int, ...]:
    wrong = [n for n in counts if type(n) is not int or not 0 <= n <= most]
    if wrong:
        raise ValueError(f"{name}={wrong[0]!r}: must be an integer in 0..{most}")
    return tuple(counts)


def record(engine: SpecEngine, requests: Sequence[TextRequest], num_tokens: int) -> TraceSet:
    """Run every request and record each position of texts of `num_tokens` tokens.

    engine: with one depth or tree, the one to record. Rounds draft it in full and commit one token.
    Raises ValueError: the engine has several depths, or drafts were cut (pages, token budget).
    """
    depths = sorted({shape.depth for shape in engine.controller.shapes})
    if len(depths) != 1:
        raise ValueError(f"candidate_steps={depths}: build the engine with strategy static")
    num_steps = depths[0]
    # Requests near their end draft less, so texts run longer than they are recorded.
    for index, request in enumerate(requests):
        engine.add(new_sequence(engine, str(index), request, num_tokens + num_steps))
    with _one_token_per_round(engine, num_steps) as rounds, tqdm(total=len(requests)) as bar:
        while engine.has_work:
            if num_done := sum(delta.finish_reason is not None for delta in engine.step()):
                bar.update(num_done)
            engine.raise_failed()
    traces = []
    for index, request in enumerate(requests):
        mine = rounds[str(index)][: num_tokens - 1]
        if len(mine) < num_tokens - 1:
            raise ValueError(
                f"num_pages={engine.scheduler.cache.num_pages}: rounds drafted less than "
                f"num_steps={num_steps}; give more pages and a larger max_num_batched_tokens"
            )
        traces.append(
            AcceptanceTrace(
                prompts=request.kind.prompts,
                temperature=request.kind.temperature,
                seed=request.seed,
                num_prompt_tokens=len(request.prompt),
                num_correct_drafts=tuple(kept for kept, _ in mine),
                draft_logprobs=tuple(logprobs for _, logprobs in mine if logprobs),
            )
        )
    return TraceSet(num_steps, tuple(traces))


_Round: TypeAlias = tuple[int, tuple[float, ...]]
"""Accepted drafts, and the log probability of each draft."""


@contextmanager
def _one_token_per_round(engine: SpecEngine, num_steps: int) -> Iterator[dict[str, list[_Round]]]:
    """Let steps commit one token, without scheduling ahead; yield rounds by request, in order."""
    rounds: dict[str, list[_Round]] = defaultdict(list)
    worker = engine.worker
    submit = worker.submit

    def first_token_only(plan: ScheduledBatch) -> PendingBatch:
        result = submit(plan).result()
        worker.drain()  # request slots hold more tokens than the engine commits
        for number, row in enumerate(plan.sampling_requests):
            if row.num_steps == num_steps:
                logprobs: tuple[float, ...] = ()
                if result.draft_logprobs is not None and plan.shape.is_chain:
                    logprobs = tuple(
                        result.draft_logprobs[number, :num_steps].astype(float).round(3).tolist()
                    )
                rounds[row.request_id].append((len(result.token_ids[number]) - 1, logprobs))
        return replace(result, token_ids=[tokens[:1] for tokens in result.token_ids])

    worker.submit = first_token_only  # type: ignore[method-assign]
    try:
        yield rounds
    finally:
        worker.submit = submit  # type: ignore[method-assign]


def run(args: argparse.Namespace) -> int:
    """Record every kind of text that `CLASSES` has; print a table."""
    forced = configured(args).speculative.synthetic_acceptance
    if forced is not None:
        fix = "a trace needs real texts; omit the key"
        raise ConfigError(f"speculative.synthetic_acceptance={forced!r}: {fix}")
    fixed = {
        "speculative_adaptive": False,
        "max_num_batched_tokens": 4096,
        "async_scheduling": False,
    }
    llm = LLM(configured(args, speculative_num_steps=args.num_steps, **fixed))
    prompts = prompts_by_source(
        llm.engine.tokenizer.encode, count=args.num_requests, num_tokens=args.prompt_tokens
    )
    kinds = dict.fromkeys(kind for kinds in CLASSES.values() for kind in kinds)
    requests = [
        TextRequest(kind, prompt, seed)
        for kind in kinds
        for seed, prompt in enumerate(prompts[kind.prompts])
    ]
    traces = record(llm.engine, requests, args.num_tokens)
    for depth, size in sorted(args.trees):
        tree = DraftShape(depth, size, args.topk)
        shape = {
            "speculative_num_steps": depth,
            "speculative_num_draft_tokens": size + 1,
            "speculative_eagle_topk": args.topk,
        }
        llm.shutdown()
        llm = LLM(configured(args, **fixed, **shape))
        traces = traces.with_tree(tree, record(llm.engine, requests, args.num_tokens))
    save_traces(traces, args.json)
    print(_table(traces))
    return 0


def _table(traces: TraceSet) -> str:
    rows = []
    for kind in dict.fromkeys(trace.kind for trace in traces.traces):
        counts = [n for trace in traces.of(kind) for n in trace.num_correct_drafts]
        # Survival: fraction of positions with at least k accepted drafts.
        survival = [
            sum(n >= k for n in counts) / len(counts) for k in range(1, traces.num_steps + 1)
        ]
        rows.append(
            [
                kind.prompts,
                kind.temperature,
                len(counts),
                *survival,
                *confidence_of(traces.of(kind)).values(),
                *_kept(traces, kind),
            ]
        )
    depths = [f"≥ {k}" for k in range(1, traces.num_steps + 1)]
    trees = [f"accepted of {tree}" for tree in traces.trees]
    confidence = confidence_of(traces.traces)
    return table(["prompts", "T", "positions", *depths, *confidence, *trees], rows)


def confidence_of(traces: Sequence[AcceptanceTrace]) -> dict[str, float]:
    """Return how well logprobs predict acceptance, of the drafts that were reached.

    `AUC`: probability that an accepted draft seemed more probable than a rejected one. `error`:
    mean difference between the calibrated probability, taken before its outcome is learned, and
    acceptance, over ten equal bins of each position. Empty without logprobs.
    """
    rows = [
        (at, index, trace.temperature > 0, kept, logprobs)
        for index, trace in enumerate(traces)
        for at, (kept, logprobs) in enumerate(
            zip(trace.num_correct_drafts, trace.draft_logprobs, strict=False)
        )
    ]
    if not rows:
        return {}
    # In order of position, as if all texts ran in one batch.
    columns = list(zip(*sorted(rows), strict=True))
    kinds, correct, logprobs = (
        np.array(columns[i], t) for i, t in ((2, int), (3, int), (4, float))
    )
    width = logprobs.shape[1]
    known, parts = DraftCalibration(width), []
    for i in range(0, len(rows), LEARNED_TOGETHER):
        part = slice(i, i + LEARNED_TOGETHER)
        parts.append(known.probabilities(logprobs[part], kinds[part]))
        verified = np.full_like(correct[part], width)
        known.learn(logprobs[part], kinds[part], verified, correct[part])
    reached, kept = (np.arange(width) <= each[:, None] for each in (correct, correct - 1))
    probabilities, errors, sizes = np.concatenate(parts), [], []
    for position in range(width):
        of_one = np.flatnonzero(reached[:, position])
        ranked = of_one[probabilities[of_one, position].argsort()]
        for members in np.array_split(ranked, 10):
            if len(members):
                gap = probabilities[members, position].mean() - kept[members, position].mean()
                errors.append(abs(gap))
                sizes.append(len(members))
    outcomes = kept[reached][logprobs[reached].argsort(kind="stable")]
    num_kept, places = int(outcomes.sum()), np.flatnonzero(outcomes)
    pairs = num_kept * (len(outcomes) - num_kept)
    above = places.sum() - num_kept * (num_kept - 1) / 2
    return {
        "AUC": float(above / pairs) if pairs else float("nan"),
        "error": float(np.average(errors, weights=sizes)),
    }


def _kept(traces: TraceSet, kind: TextKind) -> list[float]:
    columns = zip(*(trace.of_trees for trace in traces.of(kind)), strict=True)
    return [fmean(chain.from_iterable(counts)) for counts in columns]
