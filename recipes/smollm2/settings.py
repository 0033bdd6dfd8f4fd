"""Presets: `smollm2` is the shipped head (one GPU, eight minutes), `smollm2-smoke` a toy."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from recipes.training.settings import Phase, Recipe, Schedule


@dataclass(frozen=True)
class PromptPlan:
    """Prompts by category, each of at most `max_tokens` tokens as a chat.

    counts: most prompts of a category. held_out_fraction: of the prompts that no step trains with.
    """

    counts: dict[str, int] = field(
        default_factory=lambda: {"chat": 60_000, "code": 24_000, "tools": 8_000}
    )
    max_tokens: int = 384
    held_out_fraction: float = 0.01


@dataclass(frozen=True)
class AnswerPlan:
    """Answers of at most `max_tokens` tokens, written until all prompts or `seconds` are over.

    Each prompt is answered at every temperature. Whole chats fill rows of `row_tokens` tokens.
    """

    concurrent: int = 1024
    max_tokens: int = 320
    row_tokens: int = 640
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    seconds: float = 140.0


@dataclass(frozen=True)
class ChatRecipe(Recipe):
    """Settings of drafts that are trained on a chat model's answers."""

    target: str = "asset:smollm2"
    prompts: PromptPlan = field(default_factory=PromptPlan)
    answers: AnswerPlan = field(default_factory=AnswerPlan)


def smollm2() -> ChatRecipe:
    """Return the settings of the shipped head."""
    schedule = Schedule(seconds=290, stable_fraction=0.2)
    phase = Phase(2e-3, schedule, 32, 640, clip_norm=0.5, heldout_every=500)
    return ChatRecipe(
        standalone={},
        phases={"eagle3": phase},
        unroll_steps=5,
        draft_vocab_size=8192,
    )


def smoke() -> ChatRecipe:
    """Return settings of toy size, for a CPU."""
    schedule = Schedule(seconds=20)
    return replace(
        smollm2(),
        phases={"eagle3": Phase(2e-3, schedule, 2, 128, log_every=2, heldout_every=5)},
        unroll_steps=3,
        draft_vocab_size=2048,
        prompts=PromptPlan({"chat": 8, "code": 4, "tools": 2}, held_out_fraction=0.2),
        answers=AnswerPlan(concurrent=8, max_tokens=24, row_tokens=128, seconds=60),
    )
