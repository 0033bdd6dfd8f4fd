"""The one training loop: schedule, clipping, log, checkpoint, resume."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from serve_spec.training.checkpoint import load_state, save_state
from serve_spec.training.optimizer import build_optimizers
from serve_spec.training.settings import Phase

# Loss of training step `step` and figures worth logging, each a 0-d or 1-d tensor on the device.
LossFunction = Callable[[int], tuple[Tensor, Mapping[str, Tensor]]]


@dataclass(frozen=True)
class Run:
    """Where one phase keeps its log and its resumable state."""

    name: str
    folder: Path
    checkpoint_seconds: float = 120.0
    show_progress: bool = True

    @property
    def state_path(self) -> Path:
        return self.folder / f"{self.name}.state.pt"

    @property
    def log_path(self) -> Path:
        return self.folder / f"{self.name}.jsonl"


class Trainer:
    """Trains `module` by `loss_fn` until the phase's schedule ends.

    `rng` is the CPU generator that the loss function draws its batches from; its state travels
    with the checkpoint, so a resumed run sees the batches the interrupted one would have seen.
    """

    def __init__(
        self,
        module: nn.Module,
        phase: Phase,
        run: Run,
        rng: torch.Generator,
        heldout: Callable[[], Tensor] | None = None,
    ) -> None:
        self.module = module
        self.phase = phase
        self.run = run
        self.rng = rng
        self.heldout = heldout
        self.optimizers = build_optimizers(
            module.named_parameters(), phase.learning_rate, phase.weight_decay
        )
        self.params = [p for p in module.parameters() if p.requires_grad]
        self.step = 0
        self.elapsed_seconds = 0.0
        self._saved_at = 0.0

    def train(self, loss_fn: LossFunction, stop_after: int | None = None) -> None:
        """Resume if there is a state file, then train to the end (or to step `stop_after`)."""
        self._resume()
        started = time.monotonic() - self.elapsed_seconds
        schedule = self.phase.schedule
        with tqdm(
            total=100, desc=self.run.name, unit="%", disable=not self.run.show_progress
        ) as bar:
            while stop_after is None or self.step < stop_after:
                progress = schedule.progress(self.step, self.elapsed_seconds)
                if progress >= 1.0:
                    break
                factor = schedule.factor(self.step, progress)
                loss, figures = self._update(loss_fn, factor)
                self.step += 1
                self.elapsed_seconds = time.monotonic() - started
                self._report(loss, figures, factor)
                bar.update(int(100 * progress) - bar.n)
                if self.elapsed_seconds - self._saved_at > self.run.checkpoint_seconds:
                    self.save()
        self.save()

    def _update(self, loss_fn: LossFunction, factor: float) -> tuple[Tensor, Mapping[str, Tensor]]:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.phase.learning_rate * factor
        loss, figures = loss_fn(self.step)
        loss.backward()
        nn.utils.clip_grad_norm_(self.params, self.phase.clip_norm)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.detach(), figures

    def _report(self, loss: Tensor, figures: Mapping[str, Tensor], factor: float) -> None:
        with_heldout = self.heldout is not None and self.step % self.phase.heldout_every == 0
        if self.step % self.phase.log_every and not with_heldout:
            return
        row: dict[str, Any] = {
            "step": self.step,
            "tokens": self.step * self.phase.rows * self.phase.row_tokens,
            "seconds": round(self.elapsed_seconds, 2),
            "lr_factor": round(factor, 4),
            "loss": loss.item(),
        }
        row.update({name: _rounded(value) for name, value in figures.items()})
        if with_heldout:
            assert self.heldout is not None
            row["heldout_loss"] = self.heldout().item()
        with self.run.log_path.open("a", encoding="utf-8") as log:
            log.write(json.dumps(row) + "\n")
        if with_heldout:
            tqdm.write(f"{self.run.name} {json.dumps(row)}")

    def save(self) -> None:
        """Write everything a bit-identical continuation needs."""
        self._saved_at = self.elapsed_seconds
        state = {
            "step": self.step,
            "elapsed_seconds": self.elapsed_seconds,
            "module": self.module.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "rng": self.rng.get_state(),
        }
        save_state(self.run.state_path, state)

    def _resume(self) -> None:
        self.run.folder.mkdir(parents=True, exist_ok=True)
        if not self.run.state_path.exists():
            self.run.log_path.unlink(missing_ok=True)
            return
        device = self.params[0].device
        state = load_state(self.run.state_path, device)
        self.module.load_state_dict(state["module"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.rng.set_state(state["rng"].cpu())
        self.step = state["step"]
        self.elapsed_seconds = self._saved_at = state["elapsed_seconds"]
        _drop_rows_after(self.run.log_path, self.step)


def _rounded(value: Tensor) -> float | list[float]:
    figures = value.detach().float().cpu()
    if figures.ndim == 0:
        return round(float(figures), 4)
    return [round(float(figure), 4) for figure in figures]


def _drop_rows_after(path: Path, step: int) -> None:
    """Forget log rows past the checkpoint: those steps are about to be run again."""
    if path.exists():
        rows = read_log(path)
        kept = [json.dumps(row) + "\n" for row in rows if row["step"] <= step]
        path.write_text("".join(kept), encoding="utf-8")


def read_log(path: Path) -> Sequence[dict[str, Any]]:
    """Rows of a JSONL log."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
