"""Seconds that traces with prompts take under chunks and policies, in simulated time.

The scheduler and the policy are the engine's; the time of a step comes from a model of one GPU, and
drafts are accepted at random. Prints a line per trace, depth and chunk.

    python -m benchmarks.prompt_plans --traces mid long --depths 0 3 adaptive --chunks 640 2048 auto
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import NamedTuple

from serve_spec.adaptive import AdaptiveController
from serve_spec.adaptive.prompts import PromptLimits
from serve_spec.adaptive.settings import PolicySettings
from serve_spec.config import SchedulerConfig
from serve_spec.config.cost_table import FORMAT_VERSION, CostKey, CostTable
from serve_spec.core.draft import DraftShape, ModelDrafts
from serve_spec.core.plan import BatchResult, ScheduledBatch
from serve_spec.core.request import SamplingParams
from serve_spec.core.sequence import Sequence as Text
from serve_spec.engine.engine import StepInFlight, step_record
from serve_spec.kvcache.manager import KVCacheManager
from serve_spec.scheduler.scheduler import Scheduler
from serve_spec.worker.graphs import mixed_token_counts, token_counts

MAX_STEPS = 7


class Trace(NamedTuple):
    """Requests of a closed loop: `size` run at a time, lengths are uniform within bounds."""

    num_requests: int
    size: int
    prompts: tuple[int, int]
    outputs: tuple[int, int]

    def requests(self, seed: int = 0) -> Iterator[tuple[int, int]]:
        """Return prompt and output tokens of each."""
        rng = random.Random(seed)
        for _ in range(self.num_requests):
            yield rng.randint(*self.prompts), rng.randint(*self.outputs)


TRACES = {
    "mid": Trace(192, 64, (256, 3840), (64, 320)),
    "long": Trace(48, 16, (6000, 14000), (96, 256)),
    "chat": Trace(512, 64, (32, 512), (32, 256)),
    "few": Trace(64, 4, (256, 3840), (64, 320)),
}


@dataclass(frozen=True)
class Gpu:
    """Milliseconds of the parts of a step. The defaults: Llama-3.1-8B on an H100, EAGLE-3."""

    weights_ms: float = 5.8
    token_ms: float = 0.021
    context_token_ms: float = 4.4e-5
    pair_ms: float = 0.3e-6
    mixed_ms: float = 3.5
    chunk_context_ms: float = 3e-4
    """What a chunk pays again for every token before it."""
    draft_step_ms: float = 0.35
    draft_token_ms: float = 0.0015
    draft_context_ms: float = 1.4e-6

    def verify_ms(self, tokens: float) -> float:
        """Return the time of a forward of so many tokens: reading and arithmetic overlap."""
        return float((self.weights_ms**2 + (self.token_ms * tokens) ** 2) ** 0.5)

    def draft_ms(self, size: int, depth: int) -> float:
        """Return the time of drafting."""
        return depth * (self.draft_step_ms + self.draft_token_ms * size)

    def step_ms(self, plan: ScheduledBatch) -> float:
        """Return the time of a step."""
        reqs = plan.decode_requests
        ms = self.verify_ms(plan.num_tokens) + self.pair_ms * plan.num_prefill_pairs
        ms += self.context_token_ms * sum(req.start for req in reqs)
        ms += self.mixed_ms * bool(plan.prefill_requests)
        ms += self.chunk_context_ms * sum(req.start for req in plan.prefill_requests)
        depth = max((req.model_steps for req in reqs), default=0)
        entries = sum(len(req.extend_ids) for req in reqs if req.model_steps)
        return ms + self.draft_ms(len(reqs), depth) + self.draft_token_ms * entries

    def table(self) -> CostTable:
        """Return what measuring costs finds."""
        sizes, tokens = (1, 2, 4, 8, 16, 32, 64, 128, 256), (1, 64, 128, 256, 512, 1024, 2048)
        fields = ("hardware", "target", "draft", "algorithm", "dtype", "draft_dtype", "code")
        key = dict.fromkeys(fields, "x") | {"threads": 1, "tensor_parallel_size": 1}
        steps = range(1, MAX_STEPS + 1)
        return CostTable(
            version=FORMAT_VERSION,
            key=CostKey(**key, attention_backend="x"),
            context=256,
            batch_sizes=sizes,
            num_steps=tuple(steps),
            draft_ms=tuple(tuple(self.draft_ms(size, k) for k in steps) for size in sizes),
            draft_context_ms=self.draft_context_ms,
            num_tokens=tokens,
            verify_ms=tuple(map(self.verify_ms, tokens)),
            verify_context_ms=self.context_token_ms,
            sampled_token_ms=0.0,
            extrapolated=(),
            measured_s=1.0,
        )


@dataclass
class Report:
    """Milliseconds, and what requests saw."""

    total_ms: float = 0.0
    num_tokens: int = 0
    firsts: list[tuple[int, float]] = field(default_factory=list)
    """Of each request: prompt tokens, and ms to the first token."""
    gaps_ms: list[float] = field(default_factory=list)
    steps: list[tuple[int, int, int, float]] = field(default_factory=list)
    """Of each step: decoding requests, prompt tokens, drafts per request, ms."""

    @property
    def first_ms(self) -> list[float]:
        """Return the ms to the first token of every request."""
        return [ms for _, ms in self.firsts]

    def line(self) -> str:
        """Return the figures."""
        first, gaps = quantiles(self.first_ms, n=100), quantiles(self.gaps_ms, n=100)
        mixed = [tokens for size, tokens, _, _ in self.steps if tokens and size]
        return (
            f"{self.total_ms / 1e3:7.2f} s {self.num_tokens / self.total_ms * 1e3:7.0f} tok/s "
            f"TTFT {median(self.first_ms):6.0f} {first[-1]:6.0f} "
            f"gap {median(self.gaps_ms):5.1f} {gaps[-1]:6.1f} ms "
            f"prompt tokens {sum(mixed) / max(1, len(mixed)):6.0f}"
        )


def simulate(
    trace: Trace,
    limits: SchedulerConfig,
    settings: PolicySettings,
    *,
    gpu: Gpu | None = None,
    acceptance: float = 0.69,
    seed: int = 0,
) -> Report:
    """Run a trace to its end."""
    gpu, rng, report = gpu or Gpu(), random.Random(seed), Report()
    drafts = ModelDrafts(lambda shape: shape.size, first_entry=0)
    scheduler = Scheduler(
        limits, KVCacheManager(60_000, 16, prefix_caching=False), model_drafts=drafts
    )
    controller = AdaptiveController(settings, gpu.table())
    waiting = trace.requests(seed)
    now, arrived, last = 0.0, {}, {}

    def arrive() -> None:
        for prompt, output in waiting:
            name = str(len(arrived))
            params = SamplingParams(max_tokens=output, ignore_eos=True)
            scheduler.queue.add(Text(name, params, [0] * prompt, prompt, 0))
            arrived[name] = now
            return

    for _ in range(trace.size):
        arrive()
    while scheduler.queue.has_work:
        plan = scheduler.plan(controller.choose_steps, 16)
        assert plan is not None
        tokens = [
            [0] * (1 + _accepted(rng, acceptance, req.num_steps)) for req in plan.sampling_requests
        ]
        ms = gpu.step_ms(plan)
        now += ms
        result = BatchResult(tokens, 0.0, ms)
        step = StepInFlight(plan, result, 0.0, None, controller.notes)
        committed = scheduler.commit(plan, result, Text.cut)
        record = step_record(scheduler, step, result, committed, ms)
        report.steps.append((plan.batch_size, plan.num_prefill_tokens, plan.shape.depth, ms))
        if record.batch_size:
            controller.on_verify_complete(record)
        for each in committed:
            name = each.seq.request_id
            if name in last:
                report.gaps_ms.append(now - last[name])
            else:
                report.firsts.append((each.seq.num_prompt_tokens, now - arrived[name]))
            last[name] = now
            report.num_tokens += len(each.token_ids)
            if each.seq.finished:
                arrive()
    report.total_ms = now
    return report


def _accepted(rng: random.Random, acceptance: float, num_steps: int) -> int:
    return next((k for k in range(num_steps) if rng.random() >= acceptance), num_steps)


def settings_of(depth: str, limits: SchedulerConfig) -> PolicySettings:
    """Return the policy of a depth, or of `adaptive`."""
    is_fixed = depth != "adaptive"
    return PolicySettings(
        DraftShape.chain(int(depth) if is_fixed else 3),
        adaptive=not is_fixed,
        max_steps=MAX_STEPS,
        token_counts=token_counts(512),
        prompts=PromptLimits(limits, mixed_token_counts(2048)),
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line per trace, depth and chunk."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", nargs="+", choices=TRACES, default=["mid", "long", "chat"])
    parser.add_argument("--depths", nargs="+", default=["0", "3", "adaptive"])
    parser.add_argument("--chunks", nargs="+", default=["512", "2048", "8192", "auto"])
    parser.add_argument("--max-step-ratio", type=float, default=None)
    parser.add_argument("--max-inter-token-ms", type=float, default=None)
    parser.add_argument("--acceptance", type=float, default=0.69)
    args = parser.parse_args(argv)
    for name in args.traces:
        for depth in args.depths:
            for chunk in args.chunks:
                bounds = {}
                if chunk == "auto":
                    given = ("max_step_ratio", "max_inter_token_ms")
                    bounds = {x: vars(args)[x] for x in given if vars(args)[x] is not None}
                limits = SchedulerConfig(
                    max_num_seqs=256,
                    max_num_batched_tokens=9216,
                    chunked_prefill_size=chunk if chunk == "auto" else int(chunk),
                    **bounds,
                )
                report = simulate(
                    TRACES[name],
                    limits,
                    settings_of(depth, limits),
                    acceptance=args.acceptance,
                )
                print(f"{name:5} {depth:8} {chunk:5}: {report.line()}", flush=True)


if __name__ == "__main__":
    main()
