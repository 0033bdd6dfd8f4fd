"""Tiny random pairs whose drafts are right sometimes, and engines that check themselves."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from serve_spec import LLM
from serve_spec.core.draft_shape import DraftShape
from serve_spec.core.plan import PendingRound, StepPlan
from serve_spec.core.request import RequestOutput, SamplingParams, TokenDelta
from serve_spec.core.round import NO_NOTES, DecodeBatch, RoundSteps, VerifiedRound
from tests.helpers.checkpoints import make_eagle, make_eagle3, make_target, write_checkpoint

MakeLLM = Callable[..., LLM]


@dataclass(frozen=True)
class Pair:
    """Folders of a target and of its heads."""

    target: Path
    heads: dict[str, Path]


def make_pair(root: Path, **config: Any) -> Pair:
    """A random pair under `root`; `config` replaces keys of the target's config.json."""
    target = make_target(root / "target", layer_scale=0.3, **config)
    return Pair(
        target,
        {
            "EAGLE3": make_eagle3(root / "eagle3", target, mimic=True),
            "EAGLE": make_eagle(root / "eagle", target, mimic=True),
            # Its own draft: wrong only where it draws at another temperature.
            "STANDALONE": target,
            "MEDUSA": _repeating_heads(root / "medusa", target, num_heads=4),
        },
    )


def _repeating_heads(directory: Path, target: Path, num_heads: int) -> Path:
    """Medusa heads that draft the next token again and again."""
    hidden = int(json.loads((target / "config.json").read_text())["hidden_size"])
    tensors = {}
    for head in range(num_heads):
        tensors[f"blocks.{head}.layers.0.weight"] = torch.zeros(hidden, hidden)
        tensors[f"blocks.{head}.layers.0.bias"] = torch.zeros(hidden)
    return write_checkpoint(directory, {"model_type": "medusa", "num_heads": num_heads}, tensors)


class SwitchingController:
    """Another shape every round, and another share of it for each row if `ragged`.

    A number stands for the chain of that depth.
    """

    def __init__(self, tiers: Sequence[int | DraftShape], ragged: bool) -> None:
        self.shapes = [DraftShape.chain(t) if isinstance(t, int) else t for t in tiers]
        self.ragged = ragged
        self.switch_reason = None
        self.notes = NO_NOTES
        self._turns = cycle(self.shapes)
        self._num_rounds = 0

    def choose_steps(self, batch: DecodeBatch) -> RoundSteps:
        self._num_rounds += 1
        shape = next(self._turns)
        if not self.ragged:
            return RoundSteps(shape)
        row_steps = [shape.depth - (self._num_rounds + i) % 3 for i in range(batch.size)]
        return RoundSteps(shape, [max(0, steps) for steps in row_steps])

    def on_verify_complete(self, verified: VerifiedRound) -> None:
        rows = zip(verified.num_correct_drafts, verified.row_steps, strict=True)
        assert all(0 <= correct <= steps <= verified.shape.depth for correct, steps in rows)

    def forget(self, request_id: str) -> None:
        pass

    def snapshot(self) -> dict[str, object]:
        return {}


def llm_maker(pair: Pair, device: str) -> MakeLLM:
    """Builds float32 engines on the pair; each checks its integrity after every round."""

    def make(algorithm: str = "NONE", num_steps: int = 0, **overrides: Any) -> LLM:
        settings: dict[str, Any] = {
            "model": {"path": str(pair.target), "device": device, "dtype": "float32"},
            "speculative": {
                "speculative_algorithm": algorithm,
                "speculative_num_steps": num_steps,
                "speculative_adaptive": False,
                "speculative_draft_dtype": "float32",
            },
            "cache": {"page_size": 4, "num_pages": 512},
        }
        if algorithm in pair.heads:
            settings["speculative"]["speculative_draft_model_path"] = str(pair.heads[algorithm])
        return checked(LLM(settings, **{"max_model_len": 128, **overrides}))

    return make


def continued(
    llm: LLM,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    outputs: Sequence[RequestOutput],
    num_emitted: int,
) -> list[tuple[int, ...]]:
    """What comes of requests of whose `outputs` another engine generated so many tokens."""
    said: dict[str, list[int]] = {}
    for i, output in enumerate(outputs):
        emitted = output.token_ids[:num_emitted]
        said[str(i)] = list(emitted)
        if len(emitted) < len(output.token_ids):
            llm.engine.add(llm.engine.new_sequence(str(i), prompts[i], params[i], emitted))
    while llm.engine.has_work:
        for delta in llm.engine.step():
            said[delta.request_id] += delta.token_ids
    return [tuple(tokens) for tokens in said.values()]


def texts(outputs: Sequence[RequestOutput]) -> list[tuple[int, ...]]:
    """The generated tokens of every request."""
    return [output.token_ids for output in outputs]


def checked(llm: LLM) -> LLM:
    """The same engine, with its pages and lengths verified after every step."""
    step = llm.engine.step

    def step_and_check() -> list[TokenDelta]:
        deltas = step()
        llm.engine.scheduler.check_integrity()
        return deltas

    llm.engine.step = step_and_check  # type: ignore[method-assign]
    return llm


def switch_every_round(llm: LLM, tiers: Sequence[int | DraftShape], *, ragged: bool = True) -> None:
    """Replaces the policy by one that changes tier every round: no policy would, engines must."""
    engine = llm.engine
    controller = SwitchingController(tiers, ragged)
    engine.worker.init_states(controller.shapes)
    engine.controller = controller  # type: ignore[assignment]


def heard_plans(llm: LLM) -> list[StepPlan]:
    """Every plan the worker gets from now on."""
    plans: list[StepPlan] = []
    submit = llm.engine.worker.submit

    def hear(plan: StepPlan) -> PendingRound:
        plans.append(plan)
        return submit(plan)

    llm.engine.worker.submit = hear  # type: ignore[method-assign]
    return plans
