"""Phases of training drafts for a target, and the files by which they continue each other.

WORK/export/    target/ eagle3/ ...      checkpoints in the public layouts
WORK/tokens.pt  WORK/pool.pt             token streams (train, held_out), on-policy rows
WORK/logs/      *.jsonl  *.state.pt      loss logs and resumable state
WORK/report/    acceptance.json  *.md  *.png
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Generic

import torch
from torch import Tensor

from recipes.training.drafts import Corpus, Texts, train_head
from recipes.training.evaluate import evaluate, markdown, write_record
from recipes.training.loop import Run
from recipes.training.sampling import build_pool
from recipes.training.settings import DRAFTERS, R
from recipes.training.weights import load_frozen, load_state
from serve_spec.models.decoder import Decoder
from serve_spec.models.loader import load_target


@dataclass
class Workshop(Generic[R]):
    """Settings of a run, and the files in its work folder."""

    recipe: R
    work: Path
    device: torch.device
    quiet: bool = False

    def __post_init__(self) -> None:
        self.export, self.report = self.work / "export", self.work / "report"

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the frozen target: bfloat16 on a GPU, float32 on a CPU."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def run(self, name: str) -> Run:
        """Return the log and state of phase `name`."""
        return Run(name, self.work / "logs", show_progress=not self.quiet)

    @property
    def target_folder(self) -> Path:
        """Return the folder of the target's checkpoint."""
        return self.export / "target"

    @cached_property
    def target(self) -> Decoder:
        """Return the target, frozen, with plain weights."""
        return load_frozen(self.target_folder, self.device, self.dtype)

    @cached_property
    def streams(self) -> tuple[Tensor, Tensor]:
        """Return training and held-out tokens on the device."""
        state = self.load("tokens.pt", "tokenizer")
        return state["train"], state["held_out"]

    @cached_property
    def pool(self) -> Tensor:
        """Return on-policy rows on the device."""
        pool: Tensor = self.load("pool.pt", "rollout")["pool"]
        return pool

    @cached_property
    def texts(self) -> Texts:
        """Return what drafts are trained on."""
        return Corpus(*self.streams, self.pool)

    def load(self, name: str, phase: str) -> dict[str, Any]:
        """Return state of the work folder, on the device; phase: the one that writes it."""
        path = self.work / name
        if not path.exists():
            raise FileNotFoundError(f"{path}: missing; run `python -m recipes.train {phase}` first")
        return load_state(path, self.device)


PhaseFunction = Callable[[Any], None]
"""What a phase does in a workshop of its program."""


Phases = Mapping[str, tuple[PhaseFunction, str]]
"""Function of each phase, and the file of the work folder that marks it as done, in order."""


@dataclass(frozen=True)
class Program(Generic[R]):
    """What a preset runs.

    shop: makes the workshop of its recipe. extra: phases that run alone and mark nothing.
    """

    recipe: Callable[[], R]
    phases: Phases
    extra: Mapping[str, PhaseFunction] = field(default_factory=dict)
    shop: type[Workshop[R]] = Workshop


def make_pool(shop: Workshop[R]) -> None:
    """Generate the on-policy pool with the target."""
    target = load_target(shop.target_folder, shop.dtype, shop.device)
    assert isinstance(target, Decoder)
    plan, seed = shop.recipe.rollout, shop.recipe.seed
    shop.pool = build_pool(target, shop.streams[0], plan, seed, shop.work / "pool.pt")
    say(f"on-policy pool: {tuple(shop.pool.shape)}")


def make_head(name: str) -> PhaseFunction:
    """Return the phase that trains and exports drafter `name`."""

    def phase(shop: Workshop[R]) -> None:
        train_head(name, shop.recipe, shop.target, shop.texts, shop.run(name), shop.export / name)

    return phase


def make_evaluation(shop: Workshop[R]) -> None:
    """Measure acceptance of every exported drafter."""
    record = evaluate(shop.recipe, shop.export, shop.streams[1], shop.dtype)
    write_record(record, shop.report)
    say(markdown(record))


DRAFT_PHASES: Phases = {
    "rollout": (make_pool, "pool.pt"),
    **{name: (make_head(name), f"export/{name}/config.json") for name in DRAFTERS},
    "evaluate": (make_evaluation, "report/acceptance.json"),
}
"""Phases that every draft of a target in the work folder has."""

_STARTED = time.monotonic()


def say(text: str) -> None:
    """Print one line with the seconds since start."""
    print(f"[{time.monotonic() - _STARTED:7.1f}] {text}", flush=True)
