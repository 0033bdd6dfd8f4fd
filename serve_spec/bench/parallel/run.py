"""Runs `bench parallel`: a process per size, all of them alive, taking turns.

Ranks of different sizes share GPUs, and one size runs at a time while the others wait for orders;
so whatever drifts hits all of them alike. A size that fails leaves the others to go on.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import torch

from serve_spec.bench.kernels.setting import Row, Section, Sizes
from serve_spec.bench.parallel.aside import Aside, AsideFailed
from serve_spec.bench.parallel.figures import (
    rounds_section,
    texts_section,
    with_all_columns,
)
from serve_spec.bench.parallel.latency import LatencyArm, Traffic
from serve_spec.bench.parallel.size import SizeArm
from serve_spec.bench.report import environment, save
from serve_spec.bench.waves import Wave
from serve_spec.config import ServeSpecConfig
from serve_spec.core.request import RequestOutput
from serve_spec.metrics import StepStats

P = ParamSpec("P")
T = TypeVar("T")

_WARM_UP = -1
"""Seed of the waves that are not counted."""
_NUM_TEXTS = 8
_ON_CPU = (
    "nccl_us, one_shot_us, two_shot_us: need GPUs; gloo's sums were timed one by one, not in a "
    "graph"
)
_NO_GROUP = "one rank exchanges nothing; name a size above 1"


@dataclass(frozen=True)
class Ranks:
    """The tensor-parallel sizes, ascending, whether they are GPUs, and the time each may take."""

    sizes: tuple[int, ...]
    on_gpus: bool
    limit_s: float


class _Arms:
    """Processes of several sizes. One that fails is told to `fail`, ended, and asked no more."""

    def __init__(
        self, asides: dict[int, Aside[SizeArm]], fail: Callable[[int, AsideFailed], None]
    ) -> None:
        self._asides = asides
        self._fail = fail

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for aside in self._asides.values():
            aside.dismiss()
        for aside in self._asides.values():
            aside.close()

    def __contains__(self, size: int) -> bool:
        return size in self._asides

    def ask(
        self,
        size: int,
        work: Callable[Concatenate[SizeArm, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T | None:
        """None: this size has failed, now or before."""
        if size not in self:
            return None
        try:
            return self._asides[size].ask(work, *args, **kwargs)
        except AsideFailed as why:
            self._fail(size, why)
            self._asides.pop(size).close()
            return None


class ParallelRun:
    """`result` is what there is to say so far; it is also in `path`, if given, after each section.

    config: has room for the largest wave, whatever the number of ranks.
    """

    def __init__(
        self,
        config: ServeSpecConfig,
        work: Sizes,
        ranks: Ranks,
        arguments: Mapping[str, Any],
        path: Path | None,
    ) -> None:
        self._config = config
        self._work = work
        self._ranks = ranks
        self._path = path
        self._started = time.perf_counter()
        num_gpus = torch.cuda.device_count() if ranks.on_gpus else 0
        self.result: dict[str, Any] = {
            "bench": "parallel",
            "environment": {**environment(config), "num_gpus": num_gpus},
            "arguments": dict(arguments),
            "sections": {},
            "left_out": {},
            "failed": {},
        }

    def rounds(self, *, profile: bool = False) -> None:
        """Starts every size, one after the other, then runs waves on them in turns.

        profile: which kernels rounds consist of, too, once all of them have been timed.
        """
        measured: dict[tuple[int, int, int], list[StepStats]] = {}
        starts: list[Row] = []
        with self._arms(self._config) as arms:
            for size in self._ranks.sizes:
                starts += self._start(arms, size)
                self._keep("start", Section(starts))
            for repetition in range(self._work.repetitions):
                for batch_size in self._work.batch_sizes:
                    wave = self._wave(batch_size, repetition)
                    sizes = self._ranks.sizes
                    for size in random.Random(repetition).sample(sizes, len(sizes)):
                        found = arms.ask(size, SizeArm.rounds, wave) or {}
                        for num_steps, rounds in found.items():
                            measured.setdefault((batch_size, num_steps, size), []).extend(rounds)
                self._keep("rounds", rounds_section(measured, on_gpus=self._ranks.on_gpus))
                self._say(f"repetition {repetition + 1}")
            if profile:
                self._profile(arms)

    def latency(self) -> None:
        """What ranks exchange, by rows; each size in processes of its own."""
        on_gpus = self._ranks.on_gpus
        traffic = Traffic.of(self._config, self._work.rows, on_gpus=on_gpus)
        rows: list[Row] = []
        for size in [size for size in self._ranks.sizes if size > 1]:
            with Aside(partial(LatencyArm, traffic, size), self._ranks.limit_s) as aside:
                mine: list[Row] = []
                try:
                    for part in ("engine", "ways") if on_gpus else ("engine",):
                        found = aside.ask(LatencyArm.measure, part)
                        mine = [{**a, **b} for a, b in zip(mine or found, found, strict=True)]
                except AsideFailed as why:
                    self._fail(f"latency, tensor_parallel_size={size}", why)
                rows += mine
        if rows:
            facts = {"width": traffic.width, "num_norms": traffic.num_norms, "dtype": traffic.dtype}
            left_out = [] if on_gpus else [_ON_CPU]
            self._keep("latency", Section(with_all_columns(rows), facts, left_out=left_out))
        elif self._ranks.sizes[-1] == 1:
            self.result["left_out"]["latency"] = _NO_GROUP

    def texts(self) -> None:
        """Greedy texts in float32 at every size and depth."""
        config = ServeSpecConfig.load(self._config, dtype="float32", synthetic_acceptance=None)
        lengths = self._work.prompt_tokens, self._work.output_tokens
        texts: dict[tuple[int, int], list[RequestOutput]] = {}
        with self._arms(config, "texts, ") as arms:
            for size in self._ranks.sizes:
                arms.ask(size, SizeArm.build)
                found = arms.ask(size, SizeArm.texts, _NUM_TEXTS, *lengths) or {}
                texts |= {(size, num_steps): outputs for num_steps, outputs in found.items()}
                self._say(f"texts of size {size}")
        if texts:
            self._keep("texts", texts_section(texts))

    def _profile(self, arms: _Arms) -> None:
        rows: list[Row] = []
        for batch_size, size in product(self._work.batch_sizes, self._ranks.sizes):
            found = arms.ask(size, SizeArm.profile, self._wave(batch_size, _WARM_UP)) or {}
            for num_steps, kernels in found.items():
                at = {"batch_size": batch_size, "num_steps": num_steps}
                rows += [{**at, "tensor_parallel_size": size, **kernel} for kernel in kernels]
        if rows:
            self._keep("profile", Section(rows, {"rank": 0}))

    def _arms(self, config: ServeSpecConfig, what: str = "") -> _Arms:
        configs = {
            size: ServeSpecConfig.load(config, tensor_parallel_size=size)
            for size in self._ranks.sizes
        }
        asides = {
            size: Aside(partial(SizeArm, mine, self._work.num_steps), self._ranks.limit_s)
            for size, mine in configs.items()
        }
        return _Arms(
            asides, lambda size, why: self._fail(f"{what}tensor_parallel_size={size}", why)
        )

    def _start(self, arms: _Arms, size: int) -> list[Row]:
        """Builds an engine and warms it up; its row, if it could."""
        before = self._used_gib()
        row = arms.ask(size, SizeArm.build)
        for batch_size in self._work.batch_sizes:
            arms.ask(size, SizeArm.rounds, self._wave(batch_size, _WARM_UP))
        if row is None or size not in arms:
            return []
        taken = [round(b - a, 2) for a, b in zip(before, self._used_gib(), strict=True)]
        self._say(f"size {size} is warm")
        return [{"tensor_parallel_size": size, **row, "gib_per_rank": taken[:size] or None}]

    def _wave(self, batch_size: int, seed: int) -> Wave:
        return Wave(batch_size, self._work.prompt_tokens, self._work.output_tokens, seed)

    def _fail(self, name: str, why: AsideFailed) -> None:
        self._say(f"{name}: {why}")
        self.result["failed"][name] = str(why)
        save(self.result, self._path)

    def _keep(self, name: str, section: Section) -> None:
        self.result["sections"][name] = asdict(section)
        save(self.result, self._path)

    def _used_gib(self) -> list[float]:
        """Memory in use on every GPU, whoever uses it."""
        if not self._ranks.on_gpus:
            return []
        states = map(torch.cuda.mem_get_info, range(torch.cuda.device_count()))
        return [(total - free) / 2**30 for free, total in states]

    def _say(self, text: str) -> None:
        """To stderr: the table and the JSON line have stdout."""
        print(f"[{time.perf_counter() - self._started:6.1f} s] {text}", file=sys.stderr, flush=True)
