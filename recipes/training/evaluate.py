"""Measure the acceptance of every drafter on held-out prompts.

Verification accepts a draft that equals the token the target emits. So the target's text is
generated once, and each drafter drafts at every position of it.
Coupled drafts share the target's Gumbel noise (arXiv 2408.07978): the draft for a position is
argmax(log q / tau + gumbel) with tau = 0.85 T.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipes.training import unroll
from recipes.training.sampling import continue_rows, gumbel_like, windows
from recipes.training.settings import DRAFTERS, EvaluationPlan, Recipe
from recipes.training.unroll import Lesson, Teacher
from serve_spec.models.decoder import Decoder
from serve_spec.models.drafts.base import DraftHead
from serve_spec.models.drafts.loader import load_draft
from serve_spec.models.drafts.standalone import Standalone
from serve_spec.models.loader import load_target


def draft_logits(head: DraftHead, lesson: Lesson, rows: slice, steps: int) -> Iterator[Tensor]:
    """Yield logits float32 [B, R, V] of steps 0, 1, ..: step k at row i predicts x_{i+2+k}."""
    if isinstance(head, Standalone):
        assert isinstance(head.model, Decoder)
        last, _ = unroll.forward_rows(head.model, lesson.tokens_from(0))
        for step in range(steps):
            yield _logits(head, last[:, rows.start + 1 + step : rows.stop + 1 + step])
    elif head.max_steps is not None:
        for step in range(head.max_steps):
            yield _logits(head, head.encode(lesson.last[:, rows]), step)
    else:
        start = head.encode(unroll.features_of(head, lesson))
        for state in unroll.unroll(unroll.unroll_step(head), start, lesson, steps):
            yield _logits(head, state.unflatten(0, (-1, lesson.row_tokens))[:, rows])


def _logits(head: DraftHead, states: Tensor, step: int = 0) -> Tensor:
    """Return logits [B, R, V] of states [B, R, H]."""
    logits: Tensor = head.logits(states.flatten(0, 1), step).unflatten(0, states.shape[:2])
    return logits


@torch.no_grad()
def evaluate(recipe: Recipe, export: Path, held_out: Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """Return the acceptance record of the target and the drafts in `export`.

    Per temperature: the fraction of tokens in loops, and the figures of every drafter.
    """
    plan = recipe.evaluation
    target = load_target(export / "target", dtype, held_out.device)
    assert isinstance(target, Decoder)
    teacher = Teacher(target, padding=recipe.unroll_steps + 1, fast=False)
    names = [name for name in DRAFTERS if (export / name / "config.json").exists()]
    drafters: dict[str, DraftHead] = {}
    for name in names:
        head = load_draft(export / name, target, name.upper())
        assert isinstance(head, DraftHead)
        drafters[name] = head
    rng = torch.Generator().manual_seed(plan.seed)
    prompts = windows(held_out, plan.prompts, plan.prompt_tokens, rng)
    record: dict[str, Any] = {"plan": asdict(plan), "temperatures": {}}
    for temperature in plan.temperatures:
        torch.manual_seed(plan.seed)
        figures = _at_temperature(plan, teacher, drafters, prompts, temperature)
        record["temperatures"][str(temperature)] = figures
    return record


def _at_temperature(
    plan: EvaluationPlan,
    teacher: Teacher,
    drafters: dict[str, DraftHead],
    prompts: Tensor,
    temperature: float,
) -> dict[str, Any]:
    rows, device = len(prompts), prompts.device
    vocab = teacher.model.shape.vocab_size
    noise = gumbel_like(torch.empty(rows, plan.new_tokens, vocab, device=device))
    warmth = torch.full((rows, 1), temperature, device=device)
    tokens = continue_rows(teacher.model, prompts, plan.new_tokens, warmth, noise)
    looping = in_loop(tokens, plan.loop_tokens)[:, plan.prompt_tokens :]
    places = plan.new_tokens - max(plan.num_steps)
    figures: dict[str, Any] = {
        "loop_share": round(float(looping.float().mean()), 4),
        "drafters": {},
    }
    modes = {"greedy": 0.0}
    if temperature > 0:
        modes["coupled"] = plan.draft_temperature_ratio * temperature
    for name, head in drafters.items():
        matches = _match_tables(plan, teacher, head, tokens, noise, modes)
        figures["drafters"][name] = {
            mode: _figures(plan, table, ~looping[:, :places]) for mode, table in matches.items()
        }
    return figures


def _match_tables(
    plan: EvaluationPlan,
    teacher: Teacher,
    head: DraftHead,
    tokens: Tensor,
    noise: Tensor,
    modes: dict[str, float],
) -> dict[str, Tensor]:
    """Return per mode bool [K, B, R]: whether the k-th draft at root r equals the emitted token.

    The root at r is x_{P+r}; its drafts come from row P + r - 1 and stand for places r + 1 + k.
    """
    places = plan.new_tokens - max(plan.num_steps)
    first = plan.prompt_tokens - 1
    chunks: dict[str, list[Tensor]] = {mode: [] for mode in modes}
    for start in range(0, len(tokens), plan.rows_per_chunk):
        chunk = slice(start, start + plan.rows_per_chunk)
        emitted = tokens[chunk, plan.prompt_tokens :]
        steps: dict[str, list[Tensor]] = {mode: [] for mode in modes}
        lesson = teacher(tokens[chunk])
        rows, most = slice(first, first + places), max(plan.num_steps)
        for k, logits in enumerate(draft_logits(head, lesson, rows, most)):
            ahead = slice(1 + k, 1 + k + places)
            for mode, tau in modes.items():
                drafted = (logits + tau * noise[chunk, ahead]).argmax(-1)
                steps[mode].append(drafted == emitted[:, ahead])
        for mode, tables in steps.items():
            chunks[mode].append(torch.stack(tables))
    return {mode: torch.cat(tables, dim=1) for mode, tables in chunks.items()}


def _figures(plan: EvaluationPlan, matches: Tensor, outside_loops: Tensor) -> dict[str, Any]:
    """Return acceptance at every chain length the drafter supports, in all and outside loops."""
    reachable = sorted({min(k, len(matches)) for k in plan.num_steps})
    return {
        "all": [asdict(walk(matches[:k])) for k in reachable],
        "outside_loops": [asdict(walk(matches[:k], outside_loops)) for k in reachable],
    }


def write_record(record: dict[str, Any], folder: Path) -> None:
    """Write acceptance.json and acceptance.md."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, indent=1) + "\n"
    (folder / "acceptance.json").write_text(text, encoding="utf-8")
    (folder / "acceptance.md").write_text(markdown(record), encoding="utf-8")


def markdown(record: dict[str, Any]) -> str:
    """Return tables of accept length and survival, by drafter and temperature."""
    head = "| T | drafter | drafts |"
    lengths = [
        f"{head} K: accept length ± standard error | outside loops |",
        "|---|---|---|---|---|",
    ]
    survival = [
        f"{head} fraction of rounds that keep at least 1, 2, .. drafts |",
        "|---|---|---|---|",
    ]
    for temperature, figures in record["temperatures"].items():
        for drafter, modes in figures["drafters"].items():
            for mode, outcome in modes.items():
                head = f"| {temperature} | {drafter} | {mode} |"
                full = ", ".join(
                    f"{a['num_steps']}: {a['accept_length']:.2f} ± {a['standard_error']:.2f}"
                    for a in outcome["all"]
                )
                rest = ", ".join(
                    f"{a['num_steps']}: {a['accept_length']:.2f}" for a in outcome["outside_loops"]
                )
                lengths.append(f"{head} {full} | {rest} |")
                deepest = outcome["all"][-1]["survival"]
                survival.append(f"{head} {' '.join(f'{s:.2f}' for s in deepest)} |")
    loops = ", ".join(
        f"T={t}: {100 * f['loop_share']:.1f}%" for t, f in record["temperatures"].items()
    )
    return "\n".join([*lengths, "", *survival, "", f"Tokens in repetition loops: {loops}.", ""])


@dataclass(frozen=True)
class Acceptance:
    """Acceptance of chains of `num_steps` drafts over a set of sequences."""

    num_steps: int
    accept_length: float  # tokens emitted per round: accepted drafts + 1
    standard_error: float  # of accept_length, over sequences
    survival: list[float]  # fraction of rounds that accept at least 1, 2, .. num_steps drafts
    rounds: int


def walk(matches: Tensor, counted: Tensor | None = None) -> Acceptance:
    """Return the acceptance of chains, from the rounds of every sequence.

    matches: bool [K, B, R]; matches[k, b, r] is true if the k-th draft of a round whose root is at
    place r equals the emitted token at place r + 1 + k.
    counted: bool [B, R]; only rounds whose root is counted are included. Default: all.

    A round at root r accepts m drafts (the matches before the first miss), emits m + 1 tokens, and
    the next root is r + m + 1.

        matches of one sequence, K=2:   r:      0 1 2 3
                                        k=0:    1 0 1 1
                                        k=1:    0 1 1 0
        rounds: root 0 accepts 1, root 2 accepts 2 -> accept length (2 + 3) / 2
    """
    matches = matches.cpu()
    steps, rows, places = matches.shape
    accepted = matches.int().cumprod(0).sum(0)
    if counted is None:
        counted = torch.ones(rows, places, dtype=torch.bool)
    counted = counted.cpu()
    root = torch.zeros(rows, dtype=torch.long)
    tally = torch.zeros(rows, steps + 1, dtype=torch.long)
    every = torch.arange(rows)
    while bool((root < places).any()):
        inside = root < places
        at = root.clamp(max=places - 1)
        correct = accepted[every, at].long()
        use = inside & counted[every, at]
        tally[every[use], correct[use]] += 1
        root = root + correct + 1
    return _summary(tally, steps)


def _summary(tally: Tensor, steps: int) -> Acceptance:
    """Return figures from rounds per sequence and number of accepted drafts, [B, K + 1]."""
    rounds = int(tally.sum())
    if rounds == 0:
        return Acceptance(steps, float("nan"), float("nan"), [], 0)
    lengths = torch.arange(1, steps + 2, dtype=torch.double)
    per_row_rounds = tally.sum(1).double()
    per_row_tokens = (tally.double() * lengths).sum(1)
    mean = float(per_row_tokens.sum() / rounds)
    # Ratio estimator: residual tokens of each sequence around the common mean.
    residual = per_row_tokens - mean * per_row_rounds
    error = float(residual.square().sum().sqrt() / rounds)
    at_least = tally.sum(0).flip(0).cumsum(0).flip(0)[1:]
    survival = [round(float(count) / rounds, 4) for count in at_least]
    return Acceptance(steps, round(mean, 4), round(error, 4), survival, rounds)


def in_loop(tokens: Tensor, longest: int) -> Tensor:
    """Return which tokens are in a repetition loop: bool, the shape of `tokens` [B, T].

    A token is in a loop if, for some n <= `longest`, the last n tokens up to and including it
    appear three times in a row.
    """
    looping = torch.zeros_like(tokens, dtype=torch.bool)
    for period in range(1, min(longest, tokens.shape[1] // 3) + 1):
        same = torch.zeros_like(looping)
        same[:, period:] = tokens[:, period:] == tokens[:, :-period]
        # Length of the current run of matches at distance `period`: places since the last miss.
        place = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        last_miss = torch.where(same, torch.full_like(place, -1), place).cummax(1).values
        looping |= place - last_miss >= 2 * period
    return looping
