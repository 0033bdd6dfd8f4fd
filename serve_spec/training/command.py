"""`serve-spec train`: train drafts for a target, phase by phase.

Every phase writes its result to the work folder, where later phases and runs continue:

    WORK/export/    target/ eagle3/ ...      checkpoints in the public layouts
    WORK/tokens.pt  WORK/pool.pt             token streams (train, held_out), on-policy rows
    WORK/logs/      *.jsonl  *.state.pt      loss logs and resumable state
    WORK/report/    acceptance.json  *.md  *.png

In a source checkout, recipes/tiny adds the phases of the shipped target, its corpus, and plots.
Elsewhere put your target into WORK/export/target, and {"train": ids, "held_out": ids} into
WORK/tokens.pt with torch.save (integer tensors [N]).
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Generic

import torch
from torch import Tensor

from serve_spec.models.decoder import Decoder
from serve_spec.models.loader import load_target
from serve_spec.training.drafts import Data, train_head
from serve_spec.training.evaluate import evaluate, markdown, write_record
from serve_spec.training.loop import Run
from serve_spec.training.sampling import build_pool
from serve_spec.training.settings import DRAFTERS, R, draft_recipe, with_length
from serve_spec.training.weights import load_frozen, load_state


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

    @cached_property
    def target(self) -> Decoder:
        """Return the exported target, frozen, with plain weights."""
        return load_frozen(self.export / "target", self.device, self.dtype)

    @cached_property
    def streams(self) -> tuple[Tensor, Tensor]:
        """Return training and held-out tokens on the device."""
        state = self._load("tokens.pt", "tokenizer")
        return state["train"], state["held_out"]

    @cached_property
    def pool(self) -> Tensor:
        """Return on-policy rows on the device."""
        pool: Tensor = self._load("pool.pt", "rollout")["pool"]
        return pool

    def _load(self, name: str, phase: str) -> dict[str, Any]:
        path = self.work / name
        if not path.exists():
            raise FileNotFoundError(f"{path}: missing; run `serve-spec train {phase}` first")
        return load_state(path, self.device)


PhaseFunction = Callable[[Workshop[Any]], None]


def make_pool(shop: Workshop[R]) -> None:
    """Generate the on-policy pool with the target."""
    target = load_target(shop.export / "target", shop.dtype, shop.device)
    assert isinstance(target, Decoder)
    plan, seed = shop.recipe.rollout, shop.recipe.seed
    shop.pool = build_pool(target, shop.streams[0], plan, seed, shop.work / "pool.pt")
    say(f"on-policy pool: {tuple(shop.pool.shape)}")


def make_head(name: str) -> PhaseFunction:
    """Return the phase that trains and exports drafter `name`."""

    def phase(shop: Workshop[R]) -> None:
        data = Data(*shop.streams, shop.pool)
        train_head(name, shop.recipe, shop.target, data, shop.run(name), shop.export / name)

    return phase


def make_evaluation(shop: Workshop[R]) -> None:
    """Measure acceptance of every exported drafter."""
    record = evaluate(shop.recipe, shop.export, shop.streams[1], shop.dtype)
    write_record(record, shop.report)
    say(markdown(record))


def copy_assets(shop: Workshop[R], out: Path) -> None:
    """Copy checkpoints, manifest, logs and plots to `out`, in the layout of the shipped pair."""
    for folder in sorted(shop.export.iterdir()):
        shutil.copytree(folder, out / folder.name, dirs_exist_ok=True)
    if (shop.work / "corpus.json").exists():
        shutil.copy(shop.work / "corpus.json", out / "corpus.json")
    training = out / "training"
    training.mkdir(parents=True, exist_ok=True)
    for file in (*(shop.work / "logs").glob("*.jsonl"), *shop.report.glob("*")):
        shutil.copy(file, training / file.name)


@dataclass(frozen=True)
class Program(Generic[R]):
    """Presets and phases of `serve-spec train`.

    `phases`: function of each phase, and the file that marks it as done; `all` runs them in order.
    `extra`: phases that `all` skips.
    """

    presets: Mapping[str, Callable[[], R]]
    phases: Mapping[str, tuple[PhaseFunction, str]]
    extra: Mapping[str, PhaseFunction]

    def recipe(self, preset: str) -> R:
        """Return the recipe called `preset`. Raises ValueError: the name is unknown."""
        if preset not in self.presets:
            raise ValueError(f"preset={preset!r}: unknown; use one of {sorted(self.presets)}")
        return self.presets[preset]()

    def run_all(self, shop: Workshop[R]) -> None:
        """Run all phases in order; skip those that are done."""
        for name, (phase, mark) in self.phases.items():
            if (shop.work / mark).exists():
                say(f"{name}: already done")
                continue
            started = time.monotonic()
            phase(shop)
            say(f"{name}: {time.monotonic() - started:.1f} s")

    def main(self, argv: list[str]) -> int:
        """Run one phase or all; return 0, or 2 for an invalid argument."""
        options = _parser([*self.extra, *self.phases, "export", "all"]).parse_args(argv)
        try:
            recipe = _lengths(self.recipe(options.preset), options)
            if options.phase == "export" and options.out is None:
                raise ValueError("phase='export': no folder; give --out FOLDER")
        except ValueError as error:
            print(f"serve-spec train: {error}")
            return 2
        torch.set_float32_matmul_precision("high")
        shop = Workshop(recipe, options.work, torch.device(options.device), options.quiet)
        if options.phase == "all":
            self.run_all(shop)
        elif options.phase in self.extra:
            self.extra[options.phase](shop)
        elif options.phase != "export":
            self.phases[options.phase][0](shop)
        if options.out is not None and options.phase in ("all", "export"):
            copy_assets(shop, options.out)
        return 0


DRAFT_PROGRAM = Program(
    presets={"tiny": draft_recipe},
    phases={
        "rollout": (make_pool, "pool.pt"),
        **{name: (make_head(name), f"export/{name}/config.json") for name in DRAFTERS},
        "evaluate": (make_evaluation, "report/acceptance.json"),
    },
    extra={},
)

_STARTED = time.monotonic()


def say(text: str) -> None:
    """Print one line with the seconds since start."""
    print(f"[{time.monotonic() - _STARTED:7.1f}] {text}", flush=True)


def _parser(phases: list[str]) -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="serve-spec train", description=__doc__)
    root.formatter_class = argparse.RawDescriptionHelpFormatter
    root.add_argument("phase", choices=phases)
    root.add_argument("--preset", default="tiny", help="settings (default: tiny, the shipped pair)")
    root.add_argument(
        "--work", type=Path, default=Path("train-work"), help="work folder (default: train-work)"
    )
    root.add_argument("--out", type=Path, help="output folder of `export` and `all`")
    root.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for kind, text in (
        ("seconds", "length of a phase in wall-clock seconds (repeatable)"),
        ("steps", "length of a phase in steps, reproducible (repeatable)"),
    ):
        metavar = f"PHASE={kind.upper()}"
        root.add_argument(f"--{kind}", action="append", default=[], metavar=metavar, help=text)
    root.add_argument("--quiet", action="store_true", help="no progress bars")
    return root


def _lengths(recipe: R, options: argparse.Namespace) -> R:
    for kind in ("seconds", "steps"):
        for item in getattr(options, kind):
            name, equals, value = item.partition("=")
            if not equals or not value.replace(".", "", 1).isdigit():
                raise ValueError(f"{kind}={item!r}: not PHASE=NUMBER; write e.g. target=480")
            length: dict[str, Any] = {kind: float(value) if kind == "seconds" else int(value)}
            recipe = with_length(recipe, name, **length)
    return recipe


def main(argv: list[str]) -> int:
    """Run `serve-spec train`, in a source checkout with the phases of recipes/tiny."""
    checkout = Path(__file__).parents[2]
    if (checkout / "recipes" / "tiny" / "program.py").exists():
        sys.path.append(str(checkout))
        program: Program[Any] = import_module("recipes.tiny.program").PROGRAM
        return program.main(argv)
    return DRAFT_PROGRAM.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
