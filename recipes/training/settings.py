"""Schedules, plans and recipes of a training run, as frozen records."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

EOS_ID = 0
DRAFTERS = ("eagle3", "medusa", "standalone", "eagle")


def llama_config(**sizes: int) -> dict[str, Any]:
    """Return the config.json of a Llama with tied embeddings; `sizes` replace keys of it.

    `rope_theta` is written in the classic place and in transformers 5's `rope_parameters`.
    """
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 8192,
        "hidden_size": 512,
        "intermediate_size": 1792,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": EOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": None,
        "initializer_range": 0.02,
        "use_cache": True,
    }
    if unknown := sizes.keys() - config.keys():
        raise TypeError(f"llama_config: unknown {sorted(unknown)}")
    return {**config, **sizes}


@dataclass(frozen=True)
class Schedule:
    """Learning-rate schedule: warm-up, constant, linear decay.

    Its length is given in steps or in seconds. A schedule in steps is reproducible bit for bit; one
    in seconds ends on time on any machine.
    """

    steps: int | None = None
    seconds: float | None = None
    warmup_steps: int = 50
    stable_fraction: float = 0.4
    floor: float = 0.02

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            raise ValueError(
                f"steps={self.steps} and seconds={self.seconds}: set exactly one of them"
            )

    def progress(self, step: int, elapsed_seconds: float) -> float:
        """Return the fraction of the schedule that is done, 0..1."""
        if self.steps is not None:
            return min(1.0, step / self.steps)
        assert self.seconds is not None
        return min(1.0, elapsed_seconds / self.seconds)

    def factor(self, step: int, progress: float) -> float:
        """Return the learning-rate factor at `step`, 0..1."""
        warm = min(1.0, (step + 1) / max(1, self.warmup_steps))
        if progress <= self.stable_fraction:
            return warm
        fall = (1.0 - progress) / (1.0 - self.stable_fraction)
        return warm * max(self.floor, fall)


@dataclass(frozen=True)
class Phase:
    """Optimizer, batch and length of one training phase."""

    learning_rate: float
    schedule: Schedule
    rows: int
    row_tokens: int
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    log_every: int = 25
    heldout_every: int = 500
    heldout_batches: int = 4


@dataclass(frozen=True)
class RolloutPlan:
    """On-policy pool: rows of `prompt_tokens` corpus tokens continued by the target."""

    rows_per_batch: int = 8192
    row_tokens: int = 512
    prompt_tokens: int = 96
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    max_batches: int = 14
    seconds: float = 45.0


@dataclass(frozen=True)
class EvaluationPlan:
    """Held-out prompts and the drafting settings that acceptance is measured at."""

    prompts: int = 512
    rows_per_chunk: int = 64
    prompt_tokens: int = 128
    new_tokens: int = 256
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    num_steps: tuple[int, ...] = (1, 3, 5, 7)
    draft_temperature_ratio: float = 0.85
    loop_tokens: int = 64
    seed: int = 5


@dataclass(frozen=True)
class Recipe:
    """Settings of a run; `standalone` is the config.json of the stand-alone draft.

    draft_vocab_size: number of ids that an EAGLE-3 head draws from; None: the target's.
    """

    standalone: dict[str, Any]
    phases: dict[str, Phase]
    rollout: RolloutPlan = field(default_factory=RolloutPlan)
    evaluation: EvaluationPlan = field(default_factory=EvaluationPlan)
    unroll_steps: int = 8
    unroll_decay: float = 0.8
    overlap_weight: float = 1.0
    feature_weight: float = 0.1
    medusa_heads: int = 4
    draft_vocab_size: int | None = None
    seed: int = 0


R = TypeVar("R", bound=Recipe)


def draft_recipe() -> Recipe:
    """Return the settings that the shipped drafts were trained with."""

    def head(seconds: float) -> Phase:
        schedule = Schedule(seconds=seconds, stable_fraction=0.2)
        return Phase(2e-3, schedule, 24, 1024, clip_norm=0.5, heldout_every=1000)

    return Recipe(
        standalone=llama_config(
            hidden_size=256,
            intermediate_size=896,
            num_hidden_layers=2,
            num_key_value_heads=4,
            head_dim=64,
        ),
        phases={
            "eagle3": head(350),
            "eagle": head(85),
            "medusa": head(70),
            "standalone": Phase(
                3e-3, Schedule(seconds=70, warmup_steps=100), 48, 1024, heldout_every=1000
            ),
        },
    )


def with_length(recipe: R, name: str, seconds: float | None = None, steps: int | None = None) -> R:
    """Return `recipe` with another length of phase `name`, or of "rollout" (seconds only)."""
    if name == "rollout" and seconds is not None:
        return replace(recipe, rollout=replace(recipe.rollout, seconds=seconds))
    if name not in recipe.phases:
        known = [*recipe.phases, "rollout"]
        raise ValueError(f"phase={name!r}: unknown; use one of {known}")
    phase = recipe.phases[name]
    schedule = replace(phase.schedule, seconds=seconds, steps=steps)
    phases = {**recipe.phases, name: replace(phase, schedule=schedule)}
    return replace(recipe, phases=phases)
