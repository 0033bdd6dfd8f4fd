"""The training loop: optimizers, schedule, clipping, log, checkpoint, resume."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from tqdm import tqdm

from recipes.training.settings import Phase
from recipes.training.weights import load_state, save_state

P = ParamSpec("P")
R = TypeVar("R")

LossFunction = Callable[[int], tuple[Tensor, Mapping[str, Tensor]]]
"""Return the loss of a step and figures to log, each a 0-d or 1-d tensor on the device."""

# Format of the state file; older ones have another optimizer state.
_STATE_FORMAT = 2


def compiled(function: Callable[P, R], device: torch.device) -> Callable[P, R]:
    """Return `function`, compiled for fixed shapes if `device` is a GPU."""
    if device.type != "cuda":
        return function
    # Two row lengths and four drafters need more than the default limit of 8 graphs.
    torch._dynamo.config.recompile_limit = 32
    fast: Callable[P, R] = torch.compile(function, dynamic=False)
    return fast


def build_optimizers(
    parameters: Mapping[str, nn.Parameter], lr: float, weight_decay: float
) -> list[torch.optim.Optimizer]:
    """Return Muon for matrices inside layers, AdamW for embeddings, output heads and vectors.

    Muon's update is scaled to the root-mean-square of an AdamW update (arXiv 2502.16982), so both
    take one learning rate.
    """
    tables = [p for n, p in parameters.items() if p.ndim > 1 and _is_table(n)]
    matrices = [p for n, p in parameters.items() if p.ndim > 1 and not _is_table(n)]
    vectors = [p for p in parameters.values() if p.ndim < 2]
    groups: list[dict[str, Any]] = [
        {"params": params, "weight_decay": decay}
        for params, decay in ((tables, weight_decay), (vectors, 0.0))
        if params
    ]
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        optimizers.append(
            torch.optim.Muon(
                matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
            )
        )
    if groups:
        fused = bool(groups[0]["params"][0].is_cuda)
        optimizers.append(torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=fused))
    return optimizers


def _is_table(name: str) -> bool:
    return "embed_tokens" in name or "lm_head" in name


@dataclass(frozen=True)
class Run:
    """Log and resumable state of one phase."""

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


@dataclass(eq=False, repr=False)
class Trainer:
    """Trains `parameters` until the phase's schedule ends.

    `rng` is the CPU generator that the loss function draws its batches from. Its state is part of
    the checkpoint, so a resumed run sees the same batches as an uninterrupted one.
    """

    parameters: Mapping[str, nn.Parameter]
    phase: Phase
    run: Run
    rng: torch.Generator
    heldout: Callable[[], Tensor] | None = None
    step: int = 0
    elapsed_seconds: float = 0.0

    def __post_init__(self) -> None:
        phase = self.phase
        self.optimizers = build_optimizers(self.parameters, phase.learning_rate, phase.weight_decay)
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
        nn.utils.clip_grad_norm_(self.parameters.values(), self.phase.clip_norm)
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
        """Write the state for a bit-identical continuation."""
        self._saved_at = self.elapsed_seconds
        state = {
            "format": _STATE_FORMAT,
            "step": self.step,
            "elapsed_seconds": self.elapsed_seconds,
            "module": {name: p.detach() for name, p in self.parameters.items()},
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "rng": self.rng.get_state(),
        }
        save_state(self.run.state_path, state)

    def _resume(self) -> None:
        self.run.folder.mkdir(parents=True, exist_ok=True)
        if not self.run.state_path.exists():
            self.run.log_path.unlink(missing_ok=True)
            return
        device = next(iter(self.parameters.values())).device
        state = load_state(self.run.state_path, device)
        if state.get("format") != _STATE_FORMAT:
            raise ValueError(
                f"{self.run.state_path}: written by another version; remove it to restart the phase"
            )
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(state["module"][name])
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
    """Remove log rows after the checkpoint, whose steps will run again."""
    if path.exists():
        rows = read_log(path)
        kept = [json.dumps(row) + "\n" for row in rows if row["step"] <= step]
        path.write_text("".join(kept), encoding="utf-8")


def read_log(path: Path) -> Sequence[dict[str, Any]]:
    """Return the rows of a JSONL log."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
