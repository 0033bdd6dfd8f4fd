"""Shapes, schedules and recipes of the trained pair, as frozen records.

Two presets: `tiny` is the shipped pair (one NVIDIA H200, about twenty minutes), `smoke` is the same
pipeline at toy size for a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

EOS_ID = 0
EOS_TOKEN = "<eos>"


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of one Llama decoder with tied embeddings; names follow the public config.json."""

    vocab_size: int = 8192
    hidden_size: int = 512
    intermediate_size: int = 1792
    num_hidden_layers: int = 8
    num_attention_heads: int = 4
    num_key_value_heads: int = 1
    head_dim: int = 128
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    @property
    def captures(self) -> tuple[int, int, int]:
        """Layers whose input EAGLE-3 reads when the config names none: low, middle, high."""
        n = self.num_hidden_layers
        return (2, n // 2, n - 3)


@dataclass(frozen=True)
class Schedule:
    """Warm-up, stable, linear decay; the length is given in steps or in seconds, never both.

    A schedule in steps is reproducible bit for bit; one in seconds ends on time on any machine.
    """

    steps: int | None = None
    seconds: float | None = None
    warmup_steps: int = 50
    stable_fraction: float = 0.4
    floor: float = 0.02

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            raise ValueError(
                f"schedule has steps={self.steps} and seconds={self.seconds}; give exactly one"
            )

    def progress(self, step: int, elapsed_seconds: float) -> float:
        """Share of the schedule that is done, 0..1."""
        if self.steps is not None:
            return min(1.0, step / self.steps)
        assert self.seconds is not None
        return min(1.0, elapsed_seconds / self.seconds)

    def factor(self, step: int, progress: float) -> float:
        """Learning-rate factor at `step`, 0..1."""
        warm = min(1.0, (step + 1) / max(1, self.warmup_steps))
        if progress <= self.stable_fraction:
            return warm
        fall = (1.0 - progress) / (1.0 - self.stable_fraction)
        return warm * max(self.floor, fall)


@dataclass(frozen=True)
class Phase:
    """One training phase: optimiser, batch and length."""

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
class CorpusLimits:
    """What of the machine's Python source is read. Sizes in characters and tokens."""

    held_out: tuple[str, ...] = ("networkx", "aiohttp", "werkzeug", "seaborn")
    min_chars: int = 200
    max_chars: int = 200_000
    max_files: int = 200_000
    max_train_tokens: int = 140_000_000
    max_heldout_tokens: int = 4_000_000
    tokenizer_chars: int = 40_000_000


@dataclass(frozen=True)
class RolloutPlan:
    """On-policy pool: rows of `prompt_tokens` corpus tokens continued by the target itself."""

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
    """Everything that decides the result, apart from the machine's own Python source."""

    target: LlamaShape
    standalone: LlamaShape
    phases: dict[str, Phase]
    corpus: CorpusLimits = field(default_factory=CorpusLimits)
    rollout: RolloutPlan = field(default_factory=RolloutPlan)
    evaluation: EvaluationPlan = field(default_factory=EvaluationPlan)
    unroll_steps: int = 8
    unroll_decay: float = 0.8
    overlap_weight: float = 1.0
    feature_weight: float = 0.1
    medusa_heads: int = 4
    seed: int = 0


def _head_phase(seconds: float) -> Phase:
    return Phase(
        2e-3,
        Schedule(seconds=seconds, stable_fraction=0.2),
        rows=24,
        row_tokens=1024,
        clip_norm=0.5,
        heldout_every=1000,
    )


def _tiny() -> Recipe:
    return Recipe(
        target=LlamaShape(),
        standalone=LlamaShape(
            hidden_size=256,
            intermediate_size=896,
            num_hidden_layers=2,
            num_key_value_heads=4,
            head_dim=64,
        ),
        phases={
            "target": Phase(
                2e-3, Schedule(seconds=480, warmup_steps=150), 64, 1024, weight_decay=0.1
            ),
            "eagle3": _head_phase(350),
            "eagle": _head_phase(85),
            "medusa": _head_phase(70),
            "standalone": Phase(
                3e-3, Schedule(seconds=70, warmup_steps=100), 48, 1024, heldout_every=1000
            ),
        },
    )


def _smoke() -> Recipe:
    shape = LlamaShape(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        head_dim=16,
        max_position_embeddings=256,
    )
    phase = Phase(3e-3, Schedule(seconds=20), 4, 64, log_every=5, heldout_every=20)
    names = ("target", "eagle3", "eagle", "medusa", "standalone")
    return Recipe(
        target=shape,
        standalone=replace(shape, hidden_size=32, intermediate_size=64, num_hidden_layers=2),
        phases=dict.fromkeys(names, phase),
        corpus=CorpusLimits(
            max_files=300,
            max_train_tokens=400_000,
            max_heldout_tokens=60_000,
            tokenizer_chars=1_000_000,
        ),
        rollout=RolloutPlan(
            rows_per_batch=32, row_tokens=48, prompt_tokens=16, max_batches=2, seconds=20
        ),
        evaluation=EvaluationPlan(
            prompts=8, rows_per_chunk=4, prompt_tokens=24, new_tokens=32, loop_tokens=8
        ),
    )


def recipe_named(preset: str) -> Recipe:
    """The recipe called `preset`.

    Raises:
        ValueError: for an unknown name.
    """
    presets = {"tiny": _tiny, "smoke": _smoke}
    if preset not in presets:
        raise ValueError(f"preset={preset!r} is unknown; use one of {sorted(presets)}")
    return presets[preset]()


def with_length(
    recipe: Recipe, name: str, seconds: float | None = None, steps: int | None = None
) -> Recipe:
    """`recipe` with the length of phase `name` replaced; also accepts "rollout" (seconds only)."""
    if name == "rollout" and seconds is not None:
        return replace(recipe, rollout=replace(recipe.rollout, seconds=seconds))
    if name not in recipe.phases:
        raise ValueError(f"phase {name!r} is unknown; use one of {[*recipe.phases, 'rollout']}")
    phase = recipe.phases[name]
    schedule = replace(phase.schedule, seconds=seconds, steps=steps)
    phases = {**recipe.phases, name: replace(phase, schedule=schedule)}
    return replace(recipe, phases=phases)
