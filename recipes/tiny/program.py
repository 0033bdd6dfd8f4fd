"""Phases of the shipped pair: corpus, tokenizer, target, drafts, plots."""

from __future__ import annotations

import json
from collections.abc import Mapping

from recipes.tiny.corpus import build_corpus, find_sources, write_manifest
from recipes.tiny.settings import PairRecipe, smoke, tiny
from recipes.tiny.target import train_target
from recipes.tiny.tokenizer import encode_documents, load_tokenizer, save_tokenizer, train_tokenizer
from recipes.training.phases import DRAFT_PHASES, Phases, Program, Workshop, say
from recipes.training.plots import plot_losses, plot_survival
from recipes.training.weights import save_state


def make_tokenizer(shop: Workshop[PairRecipe]) -> None:
    """Write token streams, corpus.json and the tokenizer files."""
    limits, seed = shop.recipe.corpus, shop.recipe.seed
    corpus = build_corpus(*find_sources(), limits, seed)
    say(f"corpus: {json.dumps(corpus.manifest()['totals'])}")
    config = shop.recipe.target
    folder = shop.export / "target"
    if (folder / "tokenizer.json").exists():
        # A target may have been trained on it: its ids must keep their meaning.
        tokenizer = load_tokenizer(folder)
        say("tokenizer: kept the one that is there")
    else:
        tokenizer = train_tokenizer(corpus.train, config["vocab_size"], limits.tokenizer_chars)
        save_tokenizer(tokenizer, folder, config["max_position_embeddings"])
        say("tokenizer trained")
    streams = {
        "train": encode_documents(tokenizer, corpus.train, limits.max_train_tokens),
        "held_out": encode_documents(tokenizer, corpus.held_out, limits.max_heldout_tokens),
    }
    counts = {name: len(stream) for name, stream in streams.items()}
    say(f"tokens: {counts}")
    write_manifest(corpus, shop.work / "corpus.json", counts)
    save_state(shop.work / "tokens.pt", streams)


def show_corpus(shop: Workshop[PairRecipe]) -> None:
    """Read the corpus and write its manifest only."""
    corpus = build_corpus(*find_sources(), shop.recipe.corpus, shop.recipe.seed)
    write_manifest(corpus, shop.work / "corpus.json", {})
    say(json.dumps(corpus.manifest()["totals"]))


def make_target(shop: Workshop[PairRecipe]) -> None:
    """Train and export the target."""
    train_target(shop.recipe, *shop.streams, shop.run("target"), shop.export / "target")


def make_pool(shop: Workshop[PairRecipe]) -> None:
    """Let the target write the on-policy pool; print one row per temperature."""
    DRAFT_PHASES["rollout"][0](shop)
    tokenizer = load_tokenizer(shop.export / "target")
    for row in shop.pool[: len(shop.recipe.rollout.temperatures)].tolist():
        say(repr(tokenizer.decode(row, skip_special_tokens=False)[:600]))


def make_plots(shop: Workshop[PairRecipe]) -> None:
    """Draw loss curves and survival."""
    shop.report.mkdir(parents=True, exist_ok=True)
    plot_losses(shop.work / "logs", shop.report / "losses.png")
    acceptance = shop.report / "acceptance.json"
    if acceptance.exists():
        record = json.loads(acceptance.read_text(encoding="utf-8"))
        plot_survival(record, shop.report / "survival.png")


PHASES: Phases = {
    "tokenizer": (make_tokenizer, "tokens.pt"),
    "target": (make_target, "export/target/config.json"),
    **DRAFT_PHASES,
    "rollout": (make_pool, "pool.pt"),
    "plot": (make_plots, "report/losses.png"),
}

EXTRA = {"corpus": show_corpus}

PROGRAMS: Mapping[str, Program[PairRecipe]] = {
    name: Program(recipe, PHASES, EXTRA) for name, recipe in (("tiny", tiny), ("smoke", smoke))
}
"""Programs by preset."""
