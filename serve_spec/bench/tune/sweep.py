"""Runs the cells of a sweep on one engine: static shapes in turn on prompts of several kinds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from tqdm import tqdm

from serve_spec.bench.adaptive.arms import fixed_shape
from serve_spec.bench.phases import TextKind, shuffled
from serve_spec.bench.tune.cells import Cell, CellFile
from serve_spec.bench.workload import held_out_prompts
from serve_spec.config import ConfigError
from serve_spec.core.draft import PLAIN, DraftShape
from serve_spec.core.request import SamplingParams
from serve_spec.core.sequence import Sequence as TextSequence
from serve_spec.engine.engine import SpecEngine

Prompts = list[list[int]]

PROMPT_CLASSES = {
    "predictable": TextKind("code", 0.0),
    "mixed": TextKind("code", 0.7),
    "unpredictable": TextKind("shuffled", 1.0),
}
"""Prompts that are alike in how well their continuations can be drafted."""


@dataclass(frozen=True)
class Workload:
    """What every cell runs: at least `num_prompts`, more where they do not fill whole batches."""

    num_prompts: int
    prompt_tokens: int
    output_tokens: int
    repetitions: int


@dataclass
class _Run:
    """Sums over the measured rounds of one pass through the prompts, and its texts."""

    num_rounds: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    texts: Prompts = field(default_factory=list)


def sweep(
    engine: SpecEngine,
    record: CellFile,
    batch_sizes: Sequence[int],
    shapes: Sequence[DraftShape],
    work: Workload,
) -> None:
    """Measures every group (prompt class at a batch size) that lacks a cell, into `record`.

    shapes: 0 first; the engine has built them all.

    Raises:
        ConfigError: the engine has no room for a batch, or the texts are too short.
    """
    missing = [
        (batch_size, prompt_class)
        for batch_size in sorted(batch_sizes, reverse=True)  # what does not fit is known at once
        for prompt_class in PROMPT_CLASSES
        if any((batch_size, prompt_class, shape) not in record.cells for shape in shapes)
    ]
    with tqdm(total=len(missing) * len(shapes) * work.repetitions, unit="run") as bar:
        for batch_size, prompt_class in missing:
            bar.set_description(f"batch {batch_size}, {prompt_class}")
            cells = _measure_group(engine, prompt_class, batch_size, shapes, work, bar.update)
            record.append(cells)


def _measure_group(
    engine: SpecEngine,
    prompt_class: str,
    batch_size: int,
    shapes: Sequence[DraftShape],
    work: Workload,
    tick: Callable[[], object],
) -> list[Cell]:
    """The cells of one prompt class at one batch size; the shapes take turns.

    shapes: 0 first, whose texts the others are compared with.
    tick: called after every run, `repetitions` times per cell.
    """
    count = -(-work.num_prompts // batch_size) * batch_size
    kind = PROMPT_CLASSES[prompt_class]
    prompts = held_out_prompts(engine.tokenizer.encode, count=count, num_tokens=work.prompt_tokens)
    if kind.prompts == "shuffled":
        prompts = shuffled(prompts)
    params = [
        SamplingParams(
            max_tokens=work.output_tokens,
            temperature=kind.temperature,
            seed=1000 + i,
            ignore_eos=True,
        )
        for i in range(count)
    ]
    runs: dict[DraftShape, list[_Run]] = {shape: [] for shape in shapes}
    for shape in shapes:
        num_tokens = min(work.output_tokens, 4 * (shape.depth + 1))
        warm_up = [replace(p, max_tokens=num_tokens) for p in params[:batch_size]]
        _run_batch(engine, shape, prompts[:batch_size], warm_up, _Run())
    for _ in range(work.repetitions):
        for shape in shapes:
            runs[shape].append(_run(engine, shape, prompts, params, batch_size))
            tick()
    reference = runs[shapes[0]][-1].texts
    return [_cell(batch_size, prompt_class, shape, runs[shape], reference) for shape in shapes]


def _run(
    engine: SpecEngine,
    shape: DraftShape,
    prompts: Prompts,
    params: Sequence[SamplingParams],
    batch_size: int,
) -> _Run:
    run = _Run()
    for first in range(0, len(prompts), batch_size):
        group = slice(first, first + batch_size)
        _run_batch(engine, shape, prompts[group], params[group], run)
    if not run.num_rounds:
        raise ConfigError(
            f"output_tokens={params[0].max_tokens}: at batch size {batch_size} a text ends before "
            f"one round with num_steps={shape.depth} could be measured; give more"
        )
    return run


def _run_batch(
    engine: SpecEngine,
    shape: DraftShape,
    prompts: Prompts,
    params: Sequence[SamplingParams],
    run: _Run,
) -> None:
    """Runs one batch until a sequence has too little left to draft in full; adds it to `run`."""
    sequences = [
        engine.new_sequence(f"tune-{i}", prompt, p)
        for i, (prompt, p) in enumerate(zip(prompts, params, strict=True))
    ]
    try:
        for seq in sequences:
            engine.add(seq)
        _hold(engine, PLAIN)
        while not all(seq.is_decoding for seq in sequences):
            engine.step()
        _hold(engine, shape)
        engine.step()  # not measured: here drafts catch up over the prompts
        _measure(engine, shape, sequences, run)
    finally:
        for seq in sequences:
            engine.abort(seq.request_id)


def _measure(
    engine: SpecEngine, shape: DraftShape, sequences: Sequence[TextSequence], run: _Run
) -> None:
    before = replace(engine.counters)
    num_rounds = 0
    started = time.perf_counter()
    while min(seq.num_remaining for seq in sequences) > shape.depth:
        engine.step()
        num_rounds += 1
    run.seconds += time.perf_counter() - started
    after = engine.counters
    num_rows = num_rounds * len(sequences)
    if (
        after.num_decode_requests - before.num_decode_requests != num_rows
        or after.num_draft_tokens - before.num_draft_tokens != num_rows * shape.size
    ):
        raise ConfigError(
            f"batch_size={len(sequences)}: there was no room for {shape.size} drafts of every "
            "sequence in every round; raise num_pages (cache), or measure smaller batches"
        )
    run.num_rounds += num_rounds
    run.num_tokens += after.num_decode_tokens - before.num_decode_tokens
    run.draft_ms += after.draft_ms - before.draft_ms
    run.verify_ms += after.verify_ms - before.verify_ms
    run.texts += [seq.output_token_ids for seq in sequences]


def _hold(engine: SpecEngine, shape: DraftShape) -> None:
    """Stays at one shape from the next round on."""
    engine.reconfigure({"speculative_adaptive": False, **fixed_shape(shape)})


def _cell(
    batch_size: int, prompt_class: str, shape: DraftShape, runs: list[_Run], reference: Prompts
) -> Cell:
    speeds = [run.num_tokens / run.seconds for run in runs]
    num_rounds = sum(run.num_rounds for run in runs)
    texts = runs[-1].texts
    return Cell(
        batch_size=batch_size,
        prompt_class=prompt_class,
        num_steps=shape.depth,
        tree_drafts=shape.tree_size,
        topk=shape.topk,
        tokens_per_second=statistics.median(speeds),
        tokens_per_second_low=min(speeds),
        accept_length=sum(run.num_tokens for run in runs) / num_rounds / batch_size,
        round_ms=1e3 * sum(run.seconds for run in runs) / num_rounds,
        draft_ms=sum(run.draft_ms for run in runs) / num_rounds,
        verify_ms=sum(run.verify_ms for run in runs) / num_rounds,
        same_texts=sum(map(_agree, texts, reference)),
        num_texts=len(texts),
    )


def _agree(text: list[int], other: list[int]) -> bool:
    """Whether one begins with the other: each ends where its batch stopped being full."""
    length = min(len(text), len(other))
    return text[:length] == other[:length]
