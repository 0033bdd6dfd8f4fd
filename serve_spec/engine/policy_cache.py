"""Keeps what the policy has learned in a file, for the next start."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from serve_spec.adaptive import AdaptiveController
from serve_spec.config import ConfigError, SpeculativeConfig, base
from serve_spec.core.registry import one_line
from serve_spec.log import get_logger

logger = get_logger(__name__)

_SAVE_EVERY_S = 300.0
_FORMAT_VERSION = 1
# Keys whose contents the name of the cost table covers, or that change nothing learned.
_OTHER_KEYS = {
    "speculative_draft_model_path",
    "speculative_cost_table",
    "speculative_adaptive_cache",
}
_HASH_LENGTH = 16


def policy_file(cost_table: Path, config: SpeculativeConfig) -> Path:
    """Return the file of the policy that runs with these settings.

    cost_table: cached file of the costs, whose name depends on models, machine and version.
    """
    settings = config.model_dump_json(exclude=_OTHER_KEYS)
    name = hashlib.sha256(settings.encode()).hexdigest()[:_HASH_LENGTH]
    return cost_table.parent.parent / "policies" / f"{cost_table.stem}-{name}.json"


class PolicyCache:
    """Restores a controller's policy from a file, and saves it every few minutes and at the end.

    Replicas that share a machine and settings share the file, and the last one wins: each of them
    has continued from it. The engine's thread collects the state, another one writes it, so a slow
    disk delays no step. A file that is damaged or of another setting is ignored with a warning.
    """

    def __init__(
        self,
        controller: AdaptiveController,
        file: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._controller, self._file, self._clock = controller, file, clock
        self._writer = ThreadPoolExecutor(1, "policy cache")
        self._due_s = clock() + _SAVE_EVERY_S
        self._num_saved_rounds = controller.num_rounds
        self._has_warned = False

    def restore(self) -> None:
        """Let the policy continue from the file, if there is one that fits."""
        try:
            if not self._file.exists():
                return
            self._controller.restore(self._read())
        except (ConfigError, OSError, ValueError) as error:
            why = " ".join(str(error).removeprefix(f"{self._file}: ").split())
            logger.warning("policy: starts without what it learned: %s: %s", self._file, why)
        else:
            logger.info("policy: continues from %s", self._file)

    def _read(self) -> dict[str, Any]:
        content = base.parse_json_object(base.read_text(self._file), "a policy's state")
        expected = {"version": _FORMAT_VERSION, "setting": self._file.stem}
        for name, value in expected.items():
            if content.get(name) != value:
                raise ValueError(f"{name}={content.get(name)!r:.80}, but {value!r} is needed")
        state = content.get("state")
        if not isinstance(state, dict):
            raise ValueError(f"state={state!r:.40}: no mapping")
        return state

    def save_if_due(self) -> None:
        """Save if minutes have passed and rounds have run since the last time."""
        if self._clock() >= self._due_s:
            self._save()

    def close(self) -> None:
        """Save for the last time, and wait for it."""
        self._save()
        self._writer.shutdown()

    def _save(self) -> None:
        self._due_s = self._clock() + _SAVE_EVERY_S
        if (num_rounds := self._controller.num_rounds) == self._num_saved_rounds:
            return
        self._num_saved_rounds = num_rounds
        content: dict[str, Any] = {"version": _FORMAT_VERSION, "setting": self._file.stem}
        try:
            if state := self._controller.state():
                text = json.dumps({**content, "state": state}, allow_nan=False)
                self._writer.submit(self._write, text + "\n")
        except Exception as error:  # a policy may raise anything, or return what is not JSON
            self._warn(error)

    def _write(self, text: str) -> None:
        try:
            base.write_text(self._file, text)
        except OSError as error:
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            logger.warning(
                "policy: what it learned is not kept for the next start: %s; make "
                "$SERVE_SPEC_CACHE writable, or set speculative_adaptive_cache=false",
                one_line(error),
            )
        self._has_warned = True
