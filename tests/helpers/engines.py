"""Tiny random pairs whose drafts are right sometimes, and engines that check themselves."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from serve_spec import LLM
from serve_spec.core.request import TokenDelta
from tests.helpers.checkpoints import make_eagle, make_eagle3, make_target

MakeLLM = Callable[..., LLM]


@dataclass(frozen=True)
class Pair:
    """Folders of a target and of its heads."""

    target: Path
    heads: dict[str, Path]


def make_pair(root: Path) -> Pair:
    """A random pair under `root`."""
    target = make_target(root / "target", layer_scale=0.3)
    return Pair(
        target,
        {
            "EAGLE3": make_eagle3(root / "eagle3", target, mimic=True),
            "EAGLE": make_eagle(root / "eagle", target, mimic=True),
        },
    )


class SwitchingController:
    """Another tier every round: what no policy would do, and every engine must survive."""

    def __init__(self, steps: Sequence[int]) -> None:
        self.candidate_steps = tuple(sorted(set(steps)))
        self.switch_reason = None
        self._steps = cycle(steps)

    def choose_steps(self, batch_size: int) -> int:
        return next(self._steps)

    def on_verify_complete(self, correct: Sequence[int], batch_size: int, num_steps: int) -> None:
        assert all(0 <= n <= num_steps for n in correct)

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
        if algorithm != "NONE":
            settings["speculative"]["speculative_draft_model_path"] = str(pair.heads[algorithm])
        return checked(LLM(settings, **{"max_model_len": 128, **overrides}))

    return make


def checked(llm: LLM) -> LLM:
    """The same engine, with its pages and lengths verified after every step."""
    step = llm.engine.step

    def step_and_check() -> list[TokenDelta]:
        deltas = step()
        llm.engine.scheduler.check_integrity()
        return deltas

    llm.engine.step = step_and_check  # type: ignore[method-assign]
    return llm


def switch_every_round(llm: LLM, steps: Sequence[int]) -> None:
    """Replaces the policy by one that changes tier every round."""
    engine = llm.engine
    controller = SwitchingController(steps)
    engine.worker.init_states(controller.candidate_steps)
    engine.controller = controller  # type: ignore[assignment]
