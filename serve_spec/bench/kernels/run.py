"""Runs the sections of `bench kernels`, one engine at a time, and keeps what is measured so far."""

from __future__ import annotations

import gc
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from serve_spec.bench.kernels.setting import LeftOut, Section, Setting, Sizes
from serve_spec.bench.report import environment, save
from serve_spec.config import ServeSpecConfig
from serve_spec.engine.llm import LLM

Measure = Callable[[Setting], Section]


class KernelsRun:
    """`result` is what there is to say so far; it is also in `path`, if given, after each section.

    A section that fails does not take the others with it, for a device's time is dear.
    """

    def __init__(
        self,
        config: ServeSpecConfig,
        sizes: Sizes,
        assistant: str | None,
        arguments: Mapping[str, Any],
        path: Path | None,
    ) -> None:
        self._config = config
        self._sizes = sizes
        self._assistant = assistant
        self._path = path
        self._started = time.perf_counter()
        self.result: dict[str, Any] = {
            "bench": "kernels",
            "environment": environment(),
            "arguments": dict(arguments),
            "sections": {},
            "left_out": {},
            "failed": {},
        }

    def on_engine(self, sections: Mapping[str, Measure], **how: Any) -> None:
        """Builds an engine, measures `sections` on it, frees it. how: keys of its configuration."""
        self._say(f"building an engine for {', '.join(sections)}")
        acceptance = how.get("synthetic_acceptance")
        if acceptance is not None:
            self.result["environment"]["synthetic_acceptance"] = acceptance
        try:
            llm = LLM(self._config, **how)
        except Exception as error:
            for name in sections:
                self._fail(name, error)
            return
        self._say("built")
        controller = llm.engine.controller
        for name, measure in sections.items():
            say = self._speaker(name)
            setting = Setting(llm, controller, self._sizes, acceptance, self._assistant, say)
            self._measure(name, measure, setting)
        llm.shutdown()
        del llm, controller, setting
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def leave_out(self, names: Iterable[str], why: str) -> None:
        """Says that these are not measured here."""
        self.result["left_out"] |= dict.fromkeys(names, why)

    def _measure(self, name: str, measure: Measure, setting: Setting) -> None:
        try:
            self.result["sections"][name] = asdict(measure(setting))
            self._say(f"{name}: done")
        except LeftOut as why:
            self.leave_out([name], str(why))
        except Exception as error:
            self._fail(name, error)
        save(self.result, self._path)

    def _fail(self, name: str, error: Exception) -> None:
        traceback.print_exception(error)
        self.result["failed"][name] = f"{type(error).__name__}: {error}"

    def _speaker(self, name: str) -> Callable[[str], None]:
        return lambda text: self._say(f"{name}: {text}")

    def _say(self, text: str) -> None:
        """To stderr: the table and the JSON line have stdout."""
        print(f"[{time.perf_counter() - self._started:6.1f} s] {text}", file=sys.stderr, flush=True)
