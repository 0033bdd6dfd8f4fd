"""Acceptance of every drafter on held-out prompts, measured on text the target emits itself.

Verification keeps a draft when it equals the token the target emits, so it is enough to generate
the text once and ask each drafter, at every root, what it would have drafted after the true prefix.
Coupled drafts share the target's Gumbel noise (arXiv 2408.07978): the draft for a place is
argmax(log q / tau + gumbel) with tau = 0.85 T.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from serve_spec.training.acceptance import in_loop, walk
from serve_spec.training.batches import windows
from serve_spec.training.checkpoint import load_tensors, read_config
from serve_spec.training.eagle import EagleHead
from serve_spec.training.eagle3 import Eagle3Head
from serve_spec.training.llama import Llama
from serve_spec.training.medusa import MedusaHeads
from serve_spec.training.rollout import continue_rows, gumbel_like
from serve_spec.training.settings import EvaluationPlan, Recipe
from serve_spec.training.target import load_llama
from serve_spec.training.teacher import Lesson, Teacher
from serve_spec.training.unroll import DraftLayer, UnrollOps, unroll

# Draft logits [B, R, V] in float32 of steps 0, 1, ..: step k at row i predicts x_{i+2+k}, for rows
# i in the given slice.
DraftLogits = Callable[[Lesson, slice], Iterator[Tensor]]


def load_drafters(recipe: Recipe, teacher: Teacher, export: Path) -> dict[str, DraftLogits]:
    """Every drafter that has been exported under `export`."""
    device, dtype = teacher.device, teacher.model.embedding.dtype
    found: dict[str, DraftLogits] = {}
    if (export / "eagle3" / "config.json").exists():
        head3 = Eagle3Head(recipe.target)
        head3.load_state_dict(load_tensors(export / "eagle3", torch.device("cpu")))
        found["eagle3"] = _unrolled(head3.to(device, dtype), teacher, recipe)
    if (export / "eagle" / "config.json").exists():
        head1 = EagleHead(recipe.target, teacher.model.embedding.detach())
        head1.load_state_dict(load_tensors(export / "eagle", torch.device("cpu")))
        found["eagle"] = _unrolled(head1.to(device, dtype), teacher, recipe)
    if (export / "medusa" / "config.json").exists():
        heads = int(read_config(export / "medusa")["num_heads"])
        medusa = MedusaHeads(recipe.target, heads, teacher.model.embedding.detach())
        medusa.load_state_dict(load_tensors(export / "medusa", torch.device("cpu")))
        found["medusa"] = _medusa(medusa.to(device, dtype))
    if (export / "standalone" / "config.json").exists():
        draft = load_llama(export / "standalone", device, dtype)
        found["standalone"] = _standalone(draft, max(recipe.evaluation.num_steps))
    return found


def _unrolled(layer: DraftLayer, teacher: Teacher, recipe: Recipe) -> DraftLogits:
    ops = UnrollOps.of(layer, torch.device("cpu"))  # "cpu": run as written, nothing is compiled
    steps = max(recipe.evaluation.num_steps)

    def logits(lesson: Lesson, rows: slice) -> Iterator[Tensor]:
        for state in unroll(layer, ops, teacher, lesson, steps):
            yield layer.logits(state[:, rows]).float()

    return logits


def _medusa(heads: MedusaHeads) -> DraftLogits:
    def logits(lesson: Lesson, rows: slice) -> Iterator[Tensor]:
        for head in range(len(heads.blocks)):
            yield heads.logits(lesson.last[:, rows], head).float()

    return logits


def _standalone(draft: Llama, steps: int) -> DraftLogits:
    def logits(lesson: Lesson, rows: slice) -> Iterator[Tensor]:
        last = draft(lesson.tokens_from(0)).last
        for step in range(steps):
            shifted = slice(rows.start + 1 + step, rows.stop + 1 + step)
            yield draft.logits(last[:, shifted]).float()

    return logits


@torch.no_grad()
def evaluate(recipe: Recipe, target: Llama, held_out: Tensor, export: Path) -> dict[str, Any]:
    """Acceptance record: per temperature the share of loops, per drafter the figures."""
    plan = recipe.evaluation
    teacher = Teacher(target, padding=recipe.unroll_steps + 1, fast=False)
    drafters = load_drafters(recipe, teacher, export)
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
    drafters: dict[str, DraftLogits],
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
    for name, draft_logits in drafters.items():
        matches = _match_tables(plan, teacher, draft_logits, tokens, noise, modes)
        figures["drafters"][name] = {
            mode: _figures(plan, table, ~looping[:, :places]) for mode, table in matches.items()
        }
    return figures


def _match_tables(
    plan: EvaluationPlan,
    teacher: Teacher,
    draft_logits: DraftLogits,
    tokens: Tensor,
    noise: Tensor,
    modes: dict[str, float],
) -> dict[str, Tensor]:
    """Per mode, bool [K, B, R]: does the k-th draft at root place r equal the emitted token?

    The root at place r is x_{P+r}; its drafts come from row i = P + r - 1 and stand for the places
    r + 1 + k.
    """
    places = plan.new_tokens - max(plan.num_steps)
    first = plan.prompt_tokens - 1
    chunks: dict[str, list[Tensor]] = {mode: [] for mode in modes}
    for start in range(0, len(tokens), plan.rows_per_chunk):
        chunk = slice(start, start + plan.rows_per_chunk)
        emitted = tokens[chunk, plan.prompt_tokens :]
        steps: dict[str, list[Tensor]] = {mode: [] for mode in modes}
        lesson = teacher(tokens[chunk])
        for k, logits in enumerate(draft_logits(lesson, slice(first, first + places))):
            ahead = slice(1 + k, 1 + k + places)
            for mode, tau in modes.items():
                drafted = (logits + tau * noise[chunk, ahead]).argmax(-1)
                steps[mode].append(drafted == emitted[:, ahead])
        for mode, tables in steps.items():
            chunks[mode].append(torch.stack(tables))
    return {mode: torch.cat(tables, dim=1) for mode, tables in chunks.items()}


def _figures(plan: EvaluationPlan, matches: Tensor, outside_loops: Tensor) -> dict[str, Any]:
    """Acceptance at every chain length the drafter can serve, in all and outside loops."""
    reachable = sorted({min(k, len(matches)) for k in plan.num_steps})
    return {
        "all": [asdict(walk(matches[:k])) for k in reachable],
        "outside_loops": [asdict(walk(matches[:k], outside_loops)) for k in reachable],
    }


def write_record(record: dict[str, Any], folder: Path) -> None:
    """Write acceptance.json and, for people, acceptance.md."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, indent=1) + "\n"
    (folder / "acceptance.json").write_text(text, encoding="utf-8")
    (folder / "acceptance.md").write_text(markdown(record), encoding="utf-8")


def markdown(record: dict[str, Any]) -> str:
    """Tables: accept length by drafter, temperature and chain length; survival by position."""
    lengths = [
        "| T | drafter | drafts | K: accept length ± standard error | outside loops |",
        "|---|---|---|---|---|",
    ]
    survival = ["| T | drafter | drafts | share of rounds that keep at least 1, 2, .. drafts |"]
    survival.append("|---|---|---|---|")
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
