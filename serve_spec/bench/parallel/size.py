"""One tensor-parallel size of `bench parallel`: its engine, in a process that is its rank 0."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

from serve_spec.bench.adaptive.arms import make_arms
from serve_spec.bench.kernels.setting import Row
from serve_spec.bench.parallel.profile import RoundProfile
from serve_spec.bench.waves import SETTLE_ROUNDS, Wave, run_wave
from serve_spec.bench.workload import held_out_prompts
from serve_spec.config import ServeSpecConfig
from serve_spec.core.request import RequestOutput, SamplingParams
from serve_spec.engine.llm import LLM
from serve_spec.metrics import StepStats


class SizeArm:
    """An engine of fixed depths. num_steps: the depths, ascending from 0."""

    def __init__(self, config: ServeSpecConfig, num_steps: tuple[int, ...]) -> None:
        self._config = config
        self._num_steps = num_steps
        self._llm: LLM | None = None
        # Other ranks may read what is in it after this one is done.
        self._folder = tempfile.TemporaryDirectory()

    def build(self) -> Row:
        """Starts every rank; what that took, and what came of it."""
        started = time.perf_counter()
        self._llm = llm = LLM(self._config, **self._tiers())
        seconds = time.perf_counter() - started
        arms = make_arms(llm.engine.controller, [k for k in self._num_steps if k], [])
        self._controllers = {
            k: arm.controller for k, arm in zip(self._num_steps, arms, strict=True)
        }
        worker = llm.engine.worker
        return {
            "start_s": seconds,
            "execution": worker.execution,
            "dtype": str(worker.dtype).removeprefix("torch."),
            "num_pages": llm.engine.scheduler.cache.num_pages,
        }

    def rounds(self, wave: Wave) -> dict[int, list[StepStats]]:
        """Full rounds of every depth, in turns on the same texts."""
        arms = {str(k): [controller] for k, controller in self._controllers.items()}
        found = run_wave(self._engine.engine, wave, self._controllers[0], arms)
        return {int(name): rounds for name, rounds in found.items()}

    def profile(self, wave: Wave) -> dict[int, list[Row]]:
        """What rank 0's rounds of every depth consist of."""
        engine, found = self._engine.engine, {}
        for num_steps, controller in self._controllers.items():
            watch = RoundProfile(SETTLE_ROUNDS, on_gpu=engine.worker.device.type == "cuda")
            arms = {str(num_steps): [controller]}
            run_wave(engine, wave, self._controllers[0], arms, watch)
            found[num_steps] = watch.rows()
        return found

    def texts(
        self, num_texts: int, prompt_tokens: int, output_tokens: int
    ) -> dict[int, list[RequestOutput]]:
        """Greedy continuations of held-out prompts, at every depth."""
        prompts = held_out_prompts(
            self._engine.engine.tokenizer.encode, count=num_texts, num_tokens=prompt_tokens
        )
        params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
        found = {}
        for num_steps, controller in self._controllers.items():
            self._engine.engine.controller = controller
            found[num_steps] = self._engine.generate(prompts, params)
        return found

    def close(self) -> None:
        """Ends every rank."""
        if self._llm is not None:
            self._llm.shutdown()
        self._folder.cleanup()

    @property
    def _engine(self) -> LLM:
        assert self._llm is not None, "it is built before anything else is asked"
        return self._llm

    def _tiers(self) -> dict[str, Any]:
        """A tier for each depth, and none of a policy that would first measure costs."""
        if not self._config.speculative.enabled:
            return {}
        tiers = Path(self._folder.name) / "tiers.json"
        tiers.write_text(json.dumps({"candidate_steps": list(self._num_steps)}))
        return {
            "speculative_adaptive": True,
            "speculative_adaptive_strategy": "ema",
            "speculative_adaptive_config": tiers,
        }
