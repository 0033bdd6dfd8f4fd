"""`serve-spec train`: makes the shipped pair, phase by phase or all at once.

Every phase leaves its result in the work folder and is skipped by `all` when it is already there,
so a run that was cut short goes on where it stopped:

    WORK/tokens.pt  corpus.json  pool.pt     token streams, manifest, on-policy rows
    WORK/logs/      *.jsonl  *.state.pt      loss logs and resumable state
    WORK/export/    target/ eagle3/ ...      checkpoints in the public layouts
    WORK/report/    acceptance.json  *.md  *.png
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from serve_spec.training.checkpoint import load_state, save_state
from serve_spec.training.corpus import build_corpus, find_sources, write_manifest
from serve_spec.training.evaluate import evaluate, markdown, write_record
from serve_spec.training.heads import Data, train_head
from serve_spec.training.llama import Llama
from serve_spec.training.loop import Run
from serve_spec.training.plots import plot_losses, plot_survival
from serve_spec.training.rollout import build_pool
from serve_spec.training.settings import Recipe, recipe_named, with_length
from serve_spec.training.target import load_llama, train_target
from serve_spec.training.tokenizer import (
    encode_documents,
    load_tokenizer,
    save_tokenizer,
    train_tokenizer,
)

_HEADS = ("eagle3", "medusa", "standalone", "eagle")


@dataclass
class Workshop:
    """The work folder and what has been made in it so far."""

    recipe: Recipe
    work: Path
    device: torch.device
    quiet: bool = False

    @property
    def export(self) -> Path:
        return self.work / "export"

    @property
    def report(self) -> Path:
        return self.work / "report"

    @property
    def dtype(self) -> torch.dtype:
        """bfloat16 on a GPU, where the target is used in it; float32 on a CPU."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def run(self, name: str) -> Run:
        """Log and state of phase `name`."""
        return Run(name, self.work / "logs", show_progress=not self.quiet)

    @cached_property
    def target(self) -> Llama:
        """The exported target, frozen."""
        return load_llama(self.export / "target", self.device, self.dtype)

    @cached_property
    def streams(self) -> tuple[Tensor, Tensor]:
        """Training and held-out tokens on the device."""
        path = self.work / "tokens.pt"
        if not path.exists():
            raise FileNotFoundError(f"{path} is missing; run `serve-spec train tokenizer` first")
        state = load_state(path, self.device)
        return state["train"], state["held_out"]

    @cached_property
    def pool(self) -> Tensor:
        """On-policy rows on the device."""
        path = self.work / "pool.pt"
        if not path.exists():
            raise FileNotFoundError(f"{path} is missing; run `serve-spec train rollout` first")
        pool: Tensor = load_state(path, self.device)["pool"]
        return pool


def make_tokenizer(shop: Workshop) -> None:
    """Corpus and tokenizer: token streams, corpus.json and the tokenizer files."""
    limits, seed = shop.recipe.corpus, shop.recipe.seed
    corpus = build_corpus(*find_sources(), limits, seed)
    say(f"corpus: {json.dumps(corpus.manifest()['totals'])}")
    shape = shop.recipe.target
    folder = shop.export / "target"
    if (folder / "tokenizer.json").exists():
        # A target may have been trained on it already: its ids must keep their meaning.
        tokenizer = load_tokenizer(folder)
        say("tokenizer: kept the one that is there")
    else:
        tokenizer = train_tokenizer(corpus.train, shape.vocab_size, limits.tokenizer_chars)
        save_tokenizer(tokenizer, folder, shape.max_position_embeddings)
        say("tokenizer trained")
    streams = {
        "train": encode_documents(tokenizer, corpus.train, limits.max_train_tokens),
        "held_out": encode_documents(tokenizer, corpus.held_out, limits.max_heldout_tokens),
    }
    counts = {name: len(stream) for name, stream in streams.items()}
    say(f"tokens: {counts}")
    write_manifest(corpus, shop.work / "corpus.json", counts)
    save_state(shop.work / "tokens.pt", streams)


def show_corpus(shop: Workshop) -> None:
    """Read the corpus and write its manifest only."""
    corpus = build_corpus(*find_sources(), shop.recipe.corpus, shop.recipe.seed)
    write_manifest(corpus, shop.work / "corpus.json", {})
    say(json.dumps(corpus.manifest()["totals"]))


def make_target(shop: Workshop) -> None:
    """Train and export the target."""
    train_target(shop.recipe, *shop.streams, shop.run("target"), shop.export / "target")


def make_pool(shop: Workshop) -> None:
    """Let the target write the on-policy pool."""
    pool = build_pool(
        shop.target, shop.streams[0], shop.recipe.rollout, shop.recipe.seed, shop.work / "pool.pt"
    )
    shop.pool = pool
    say(f"on-policy pool: {tuple(pool.shape)}")
    tokenizer = load_tokenizer(shop.export / "target")
    for row in pool[: len(shop.recipe.rollout.temperatures)].tolist():
        say(repr(tokenizer.decode(row, skip_special_tokens=False)[:600]))


def make_head(name: str) -> Callable[[Workshop], None]:
    """Phase that trains and exports drafter `name`."""

    def phase(shop: Workshop) -> None:
        data = Data(*shop.streams, shop.pool)
        train_head(name, shop.recipe, shop.target, data, shop.run(name), shop.export / name)

    return phase


def make_evaluation(shop: Workshop) -> None:
    """Measure acceptance of every exported drafter."""
    record = evaluate(shop.recipe, shop.target, shop.streams[1], shop.export)
    write_record(record, shop.report)
    say(markdown(record))


def make_plots(shop: Workshop) -> None:
    """Draw loss curves and survival."""
    shop.report.mkdir(parents=True, exist_ok=True)
    plot_losses(shop.work / "logs", shop.report / "losses.png")
    acceptance = shop.report / "acceptance.json"
    if acceptance.exists():
        record = json.loads(acceptance.read_text(encoding="utf-8"))
        plot_survival(record, shop.report / "survival.png")


def copy_assets(shop: Workshop, out: Path) -> None:
    """Copy checkpoints, manifest, logs and plots to `out`, the layout that ships."""
    for folder in sorted(shop.export.iterdir()):
        shutil.copytree(folder, out / folder.name, dirs_exist_ok=True)
    shutil.copy(shop.work / "corpus.json", out / "corpus.json")
    training = out / "training"
    training.mkdir(parents=True, exist_ok=True)
    for file in (*(shop.work / "logs").glob("*.jsonl"), *shop.report.glob("*")):
        shutil.copy(file, training / file.name)


# Phase name, function, and the file whose presence says that it is done.
PHASES: dict[str, tuple[Callable[[Workshop], None], str]] = {
    "tokenizer": (make_tokenizer, "tokens.pt"),
    "target": (make_target, "export/target/config.json"),
    "rollout": (make_pool, "pool.pt"),
    **{name: (make_head(name), f"export/{name}/config.json") for name in _HEADS},
    "evaluate": (make_evaluation, "report/acceptance.json"),
    "plot": (make_plots, "report/losses.png"),
}


def run_all(shop: Workshop) -> None:
    """Every phase in order, skipping those that are done."""
    for name, (phase, mark) in PHASES.items():
        if (shop.work / mark).exists():
            say(f"{name}: already done")
            continue
        started = time.monotonic()
        phase(shop)
        say(f"{name}: {time.monotonic() - started:.1f} s")


_BORN = time.monotonic()


def say(text: str) -> None:
    """One line for people, with the seconds since start."""
    print(f"[{time.monotonic() - _BORN:7.1f}] {text}", flush=True)


def parser() -> argparse.ArgumentParser:
    """Command line of `serve-spec train`."""
    root = argparse.ArgumentParser(prog="serve-spec train", description=__doc__)
    root.formatter_class = argparse.RawDescriptionHelpFormatter
    root.add_argument("phase", choices=["corpus", *PHASES, "export", "all"])
    root.add_argument("--preset", default="tiny", help="tiny (the shipped pair) or smoke")
    root.add_argument("--work", type=Path, default=Path("train-work"), help="work folder")
    root.add_argument("--out", type=Path, help="folder that `export` and `all` copy results to")
    root.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    root.add_argument(
        "--seconds",
        action="append",
        default=[],
        metavar="PHASE=SECONDS",
        help="length of a phase by wall clock; may be repeated",
    )
    root.add_argument(
        "--steps",
        action="append",
        default=[],
        metavar="PHASE=STEPS",
        help="length of a phase in steps (reproducible); may be repeated",
    )
    root.add_argument("--quiet", action="store_true", help="no progress bars")
    return root


def _lengths(recipe: Recipe, options: argparse.Namespace) -> Recipe:
    for kind in ("seconds", "steps"):
        for item in getattr(options, kind):
            name, equals, value = item.partition("=")
            if not equals or not value.replace(".", "", 1).isdigit():
                raise ValueError(f"--{kind} {item!r} is not PHASE=NUMBER, as in target=480")
            length: dict[str, Any] = {kind: float(value) if kind == "seconds" else int(value)}
            recipe = with_length(recipe, name, **length)
    return recipe


def main(argv: list[str]) -> int:
    """Run one phase, or all of them; 0 on success, 2 on an argument that makes no sense."""
    options = parser().parse_args(argv)
    try:
        recipe = _lengths(recipe_named(options.preset), options)
        if options.phase == "export" and options.out is None:
            raise ValueError("phase=export needs --out FOLDER")
    except ValueError as error:
        print(f"serve-spec train: {error}")
        return 2
    torch.set_float32_matmul_precision("high")
    shop = Workshop(recipe, options.work, torch.device(options.device), options.quiet)
    if options.phase == "all":
        run_all(shop)
    elif options.phase == "corpus":
        show_corpus(shop)
    elif options.phase != "export":
        PHASES[options.phase][0](shop)
    if options.out is not None and options.phase in ("all", "export"):
        copy_assets(shop, options.out)
    return 0


if __name__ == "__main__":
    import sys

    sys.exit(main(sys.argv[1:]))
