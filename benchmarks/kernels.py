"""Time a pair on one device: matrix products, draws, rounds of every depth, depth switches.

    python benchmarks/kernels.py --config configs/tiny.yaml --sections rounds --json kernels.jsonl

Sections:

    products  matrix products of one step, by torch and by this package; speed of a memory copy
    draws     draws of a tree level's children and of a chain's draft, and torch's topk
    rounds    rounds of every fixed depth and of the goodput policy, at a forced acceptance
    switch    rounds that alternate between two depths, and rounds of each depth alone

Every row is printed, and appended to the file of --json, as soon as it is measured. To time
compiled layers or another policy setting, run again with --set KEY=VALUE.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.benchmark import Timer

from benchmarks.steady import Controllers, SteadyLoad, figures, run_variants, with_room
from serve_spec.adaptive import AdaptiveController
from serve_spec.bench.command import add_configuration, configured
from serve_spec.bench.report import environment, print_record
from serve_spec.bench.variants import make_variants
from serve_spec.core.record import StepRecord
from serve_spec.engine.llm import LLM
from serve_spec.layers.formats.plain import PlainWeight
from serve_spec.layers.linear import Linear
from serve_spec.ops import draw
from serve_spec.ops.draw import DrawParams

Acceptance = float | tuple[float, ...]

_COPIED_BYTES = {"cuda": 1 << 30, "cpu": 1 << 25}
# Widths of the logits, numbers of rows, numbers of children.
_DRAWS = {"cuda": ((32_000, 128_256), (4, 32, 128, 256), (4, 8)), "cpu": ((500,), (4,), (4,))}


@dataclass(frozen=True)
class Bench:
    """An idle engine and the sizes to run. `controller`: the engine's own, still unused."""

    args: argparse.Namespace
    llm: LLM
    controller: AdaptiveController
    acceptance: Acceptance | None
    device: torch.device

    def fixed(self, num_steps: int) -> AdaptiveController:
        """Return a policy of one depth."""
        return make_variants(self.controller, [num_steps], [])[-1].controller

    def run(self, batch_size: int, *groups: Controllers) -> dict[str, list[StepRecord]]:
        """Return the steps of every variant; the variants of a group take turns in one batch."""
        measured: dict[str, list[StepRecord]] = {name: [] for group in groups for name in group}
        for seed in range(self.args.repetitions):
            for group in random.Random(seed).sample(groups, len(groups)):
                for name, rounds in self.batch(batch_size, seed, group).items():
                    measured[name] += rounds
        return measured

    def batch(self, batch_size: int, seed: int, group: Controllers) -> dict[str, list[StepRecord]]:
        """Return the steps of one batch; seed -1 is for warm-up."""
        load = SteadyLoad(batch_size, self.args.prompt_tokens, self.args.output_tokens, seed)
        return run_variants(self.llm.engine, load, self.fixed(0), group)


@torch.inference_mode()
def products(bench: Bench) -> Iterator[dict[str, Any]]:
    """Time all products of the target, head included, on random inputs."""
    worker: Any = bench.llm.engine.worker
    target = worker.target.model
    linears = [module for module in target.modules() if isinstance(module, Linear)]
    formats = [linear.format for linear in linears]
    weights = [each.weight for each in formats if isinstance(each, PlainWeight)]
    if len(weights) < len(linears):
        raise ValueError("sections=products: the weights are packed on a CPU; use a GPU")
    num_bytes = sum(weight.nbytes for weight in weights)
    source = torch.empty(_COPIED_BYTES[bench.device.type], dtype=torch.uint8, device=bench.device)
    copy = torch.empty_like(source)
    # A copied byte is read and written.
    bytes_per_ms = 2 * source.nbytes / time_ms(lambda: copy.copy_(source), bench.device)
    for count in bench.args.rows:
        torch_ms, ours_ms = _product_times_ms(linears, weights, count, bench.device)
        yield {
            "rows": count,
            "torch_ms": torch_ms,
            "ours_ms": ours_ms,
            "weights_at_copy_speed_ms": num_bytes / bytes_per_ms,
        }


def _product_times_ms(
    linears: Sequence[Linear], weights: Sequence[Tensor], count: int, device: torch.device
) -> tuple[float, float]:
    """Return the time of torch's products of `count` rows, and of this package's."""
    inputs = {
        weight.shape[1]: torch.randn(count, weight.shape[1], dtype=weight.dtype, device=device)
        for weight in weights
    }

    def by_torch() -> None:
        for weight in weights:
            F.linear(inputs[weight.shape[1]], weight)

    def ours() -> None:
        for linear, weight in zip(linears, weights, strict=True):
            linear(inputs[weight.shape[1]])

    return time_ms(by_torch, device), time_ms(ours, device)


def draws(bench: Bench) -> Iterator[dict[str, Any]]:
    """Time draws from random logits, one row for each width, number of rows and of children."""
    for sizes in product(*_DRAWS[bench.device.type]):
        yield _draw_row(*sizes, bench.device)


@torch.inference_mode()
def _draw_row(width: int, count: int, topk: int, device: torch.device) -> dict[str, Any]:
    """Return the times of draws from the same logits.

    greedy_us, random_us: a level's children, with temperature and noise. torch_us: topk and
    logsumexp alone. draft_us: a chain's random draft, which is the best child.
    """
    logits = torch.randn(count, width, device=device)
    owners = torch.zeros(count, dtype=torch.int32, device=device)
    positions = torch.arange(count, device=device)
    scale, target_ids = torch.ones(1, device=device), torch.arange(width, device=device)

    def us(work: Callable[[], object]) -> float:
        return time_ms(work, device) * 1e3

    def draw_us(function: Callable[..., object], inverse_temperature: float, *topk: int) -> float:
        params = DrawParams(
            inverse_temperature=torch.full((1,), inverse_temperature, device=device),
            seeds=torch.zeros(1, 2, dtype=torch.int32, device=device),
            top_k=torch.zeros(1, dtype=torch.int32, device=device),
            top_p=torch.ones(1, device=device),
            min_p=torch.zeros(1, device=device),
        )
        return us(lambda: function(logits, owners, positions, params, scale, target_ids, *topk))

    return {
        "width": width,
        "rows": count,
        "topk": topk,
        "greedy_us": draw_us(draw.draw_children, 0.0, topk),
        "random_us": draw_us(draw.draw_children, 1.0, topk),
        "torch_us": us(lambda: (logits.topk(topk, dim=1), logits.logsumexp(dim=1))),
        "draft_us": draw_us(draw.draw_children, 1.0, 1),
    }


def rounds(bench: Bench) -> Iterator[dict[str, Any]]:
    """Time every fixed depth and, with drafts, the goodput policy.

    The policy keeps what it learns from batch to batch. `expected_tokens_per_second` counts the
    tokens that the forced acceptance gives on average, not those that probability gave.
    """
    groups = [{f"K={k}": [bench.fixed(k)] for k in bench.args.num_steps}]
    if bench.acceptance is not None:
        goodput = make_variants(bench.controller, [], ["goodput"])[-1]
        groups.append({"goodput": [goodput.controller]})
    for batch_size in bench.args.batch_sizes:
        bench.batch(batch_size, -1, groups[-1])
        measured = bench.run(batch_size, *groups)
        expected = {
            name: _expected_speed(mine, bench.acceptance) for name, mine in measured.items()
        }
        plain = figures(measured["K=0"])["tokens_per_second"]
        for name, mine in measured.items():
            row = figures(mine)
            over_plain = row["tokens_per_second"] / plain
            counts = Counter(steps for r in mine for steps in r.steps_per_req)
            yield {
                "batch_size": batch_size,
                "variant": name,
                **row,
                "idle_share": sum(r.idle_ms for r in mine) / sum(r.step_ms for r in mine),
                "over_plain": over_plain,
                "efficiency": over_plain / row["accept_length"],
                "expected_tokens_per_second": expected[name],
                "over_best_fixed": expected[name] / max(expected[name] for name in groups[0]),
                "share_by_steps": {str(k): counts[k] / counts.total() for k in sorted(counts)},
            }


def _expected_speed(rounds: Sequence[StepRecord], acceptance: Acceptance | None) -> float:
    tokens = sum(expected_tokens(acceptance, k) for r in rounds for k in r.steps_per_req)
    return tokens / sum(r.step_ms for r in rounds) * 1e3


def switch(bench: Bench) -> Iterator[dict[str, Any]]:
    """Compare rounds that change the depth every time with rounds of the same two depths alone."""
    steps = [k for k in bench.args.num_steps if k]
    if len(steps) < 2:
        raise ValueError(f"num_steps={bench.args.num_steps}: give two depths above 0")
    fixed = {k: bench.fixed(k) for k in (steps[0], steps[-1])}
    variants = {"both": [*fixed.values()], **{str(k): [one] for k, one in fixed.items()}}
    batch_size = bench.args.batch_sizes[0]
    bench.batch(batch_size, -1, variants)
    before = torch.cuda.memory_allocated()
    measured = bench.run(batch_size, variants)
    alone, alternating = (
        fmean(median(r.step_ms for r in measured[name] if r.shape.depth == k) for k, name in names)
        for names in ([(k, str(k)) for k in fixed], [(k, "both") for k in fixed])
    )
    yield {
        "batch_size": batch_size,
        "num_steps": [*fixed],
        "alone_ms": alone,
        "alternating_ms": alternating,
        "switch_us": (alternating - alone) * 1e3,
        "allocated_bytes": torch.cuda.memory_allocated() - before,
    }


SECTIONS = {"products": products, "draws": draws, "rounds": rounds, "switch": switch}


def time_ms(work: Callable[[], object], device: torch.device) -> float:
    """Return the median time of `work`; on a GPU in a CUDA graph, without the host."""
    if device.type == "cpu":
        return Timer("work()", globals={"work": work}).blocked_autorange().median * 1e3
    from triton.testing import do_bench_cudagraph

    return float(do_bench_cudagraph(work, return_mode="median"))


def expected_tokens(acceptance: Acceptance | None, num_steps: int) -> float:
    """Return the mean number of tokens that a round of `num_steps` drafts gives a request."""
    if acceptance is None:
        return 1.0
    if isinstance(acceptance, float):
        return min(acceptance, num_steps + 1.0)
    probabilities = [acceptance[min(i, len(acceptance) - 1)] for i in range(num_steps)]
    return 1.0 + sum(prod(probabilities[: i + 1]) for i in range(num_steps))


def main(argv: list[str] | None = None) -> int:
    """Run the sections; return the process exit status, 1 if a section failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_configuration(parser)
    what = "sections to run"
    parser.add_argument(
        "--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), help=what
    )
    sizes = [1, 8, 16, 32, 64, 128]
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=sizes, help="requests")
    parser.add_argument("--num-steps", type=int, nargs="+", default=list(range(8)), help="depths")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="tokens per prompt")
    parser.add_argument("--output-tokens", type=int, default=256, help="mean tokens per request")
    parser.add_argument("--repetitions", type=int, default=2, help="batches of every variant")
    forced = (
        "forced acceptance: one accept length (at least 1), or the probability of each position"
    )
    parser.add_argument("--acceptance", type=float, nargs="+", default=[2.5], help=forced)
    rows = [1, 8, 32, 64, 128, 256, 512]
    parser.add_argument("--rows", type=int, nargs="+", default=rows, help="rows of products")
    parser.add_argument("--json", type=Path, help="file to append every row to (JSON lines)")
    args = parser.parse_args(argv)
    args.num_steps = sorted({0, *args.num_steps})
    longest = SteadyLoad(max(args.batch_sizes), args.prompt_tokens, args.output_tokens)
    config = with_room(configured(args), longest, args.num_steps[-1])
    acceptance: Acceptance | None = None
    how: dict[str, Any] = {"speculative_adaptive": False}
    if config.speculative.enabled:
        first, *more = args.acceptance
        acceptance = first if first >= 1 and not more else (first, *more)
        how = {"speculative_adaptive": True, "speculative_adaptive_strategy": "goodput"}
        how["synthetic_acceptance"] = acceptance
    else:
        args.num_steps = [0]
    llm = LLM(config, **how)
    bench = Bench(args, llm, llm.engine.controller, acceptance, llm.engine.worker.device)
    print_record(args.json, section="environment", **environment(llm.config))
    has_failed = False
    for name in args.sections:
        try:
            for row in SECTIONS[name](bench):
                print_record(args.json, section=name, **row)
        except (ValueError, RuntimeError) as error:
            has_failed = True
            print_record(args.json, section=name, failed=str(error))
    llm.shutdown()
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
