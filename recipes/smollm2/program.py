"""Phases of the drafts for SmolLM2: prompts, answers, head, evaluation, plots.

WORK/prompts.pt  WORK/answers.pt   token ids of prompts, rows of chats with the target's answers
WORK/offline.jsonl                 records of `serve-spec bench offline`, for a plot
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from recipes.smollm2.answers import (
    Answers,
    all_tokens,
    fill_rows,
    join,
    open_target,
    split,
    write_answers,
)
from recipes.smollm2.prompts import counted, training_prompts
from recipes.smollm2.settings import ChatRecipe, smoke, smollm2
from recipes.training.drafts import Batch
from recipes.training.phases import Phases, Program, Workshop, make_head, say
from recipes.training.plots import plot_accept_lengths, plot_losses
from recipes.training.weights import save_state
from serve_spec.bench.report import read_records
from serve_spec.config import ServeSpecConfig


class ChatWorkshop(Workshop[ChatRecipe]):
    """A workshop whose drafts are trained on answers."""

    @cached_property
    def texts(self) -> Answers:
        """Return the rows of answers."""
        state = self.load("answers.pt", "answers")
        train, held_out = (
            Batch(state[name], state[f"{name}_counted"]) for name in ("train", "held_out")
        )
        return Answers(train, held_out)

    @property
    def target_folder(self) -> Path:
        """Return the folder of the target's checkpoint."""
        return ServeSpecConfig.load(self.recipe.target).download().model.metadata_folder


def make_prompts(shop: ChatWorkshop) -> None:
    """Write the token ids of prompts."""
    prompts = training_prompts(shop.recipe.target, shop.recipe.prompts, shop.recipe.seed)
    say(f"prompts: {counted(prompts)}")
    state = {}
    for name, part in prompts.items():
        state[name], state[f"{name}_lengths"] = join(part)
    save_state(shop.work / "prompts.pt", state)


def make_answers(shop: ChatWorkshop) -> None:
    """Let the target answer; print how many ids cover the answers."""
    plan, seed = shop.recipe.answers, shop.recipe.seed
    stored = shop.load("prompts.pt", "prompts")
    llm = open_target(shop.target_folder, plan.concurrent, shop.device)
    state = {}
    for name, seconds in (("held_out", plan.seconds), ("train", plan.seconds)):
        prompts = split(stored[name], stored[f"{name}_lengths"])
        chats = write_answers(llm, prompts, plan, seed, seconds)
        rows = fill_rows(chats, plan.row_tokens)
        assert rows.counted is not None, "answers are counted"
        state[name], state[f"{name}_counted"] = rows.tokens, rows.counted
        say(f"{name}: {len(chats)} answers, {all_tokens(rows)} tokens in {len(rows.tokens)} rows")
        for chat in chats[: len(plan.temperatures)]:
            say(repr(llm.engine.tokenizer.decode(list(chat.answer))[:400]))
    llm.shutdown()
    save_state(shop.work / "answers.pt", state)
    answers = shop.texts
    for size in (2048, 4096, 8192, 16384, 32768):
        say(f"{size} ids cover {answers.coverage(answers.draft_ids(size)):.4f} of the answers")


def make_plots(shop: ChatWorkshop) -> None:
    """Draw loss curves, and accept lengths if `serve-spec bench offline` has measured them."""
    shop.report.mkdir(parents=True, exist_ok=True)
    plot_losses(shop.work / "logs", shop.report / "losses.png")
    measured = shop.work / "offline.jsonl"
    if measured.exists():
        records = read_records(measured, "offline")
        found = [record for record in records if record["section"] == "measurement"]
        plot_accept_lengths(found, shop.report / "accept-lengths.png")


PHASES: Phases = {
    "prompts": (make_prompts, "prompts.pt"),
    "answers": (make_answers, "answers.pt"),
    "eagle3": (make_head("eagle3"), "export/eagle3/config.json"),
    "plot": (make_plots, "report/losses.png"),
}
"""Phases in order; acceptance is measured by `serve-spec bench offline`."""

PROGRAMS: Mapping[str, Program[ChatRecipe]] = {
    name: Program(recipe, PHASES, shop=ChatWorkshop)
    for name, recipe in (("smollm2", smollm2), ("smollm2-smoke", smoke))
}
"""Programs by preset."""
