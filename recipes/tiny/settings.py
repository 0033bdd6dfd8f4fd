"""Presets: `tiny` is the shipped pair (one NVIDIA H200, about twenty minutes), `smoke` a toy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from recipes.training.settings import (
    EvaluationPlan,
    Phase,
    Recipe,
    RolloutPlan,
    Schedule,
    draft_recipe,
    llama_config,
)

EOS_TOKEN = "<eos>"


@dataclass(frozen=True)
class CorpusLimits:
    """Limits of the corpus, in characters and tokens; `held_out` packages are not trained on."""

    held_out: tuple[str, ...] = ("networkx", "aiohttp", "werkzeug", "seaborn")
    min_chars: int = 200
    max_chars: int = 200_000
    max_files: int = 200_000
    max_train_tokens: int = 140_000_000
    max_heldout_tokens: int = 4_000_000
    tokenizer_chars: int = 40_000_000


@dataclass(frozen=True)
class PairRecipe(Recipe):
    """Settings of drafts, target and corpus; `target` is the target's config.json."""

    target: dict[str, Any] = field(default_factory=llama_config)
    corpus: CorpusLimits = field(default_factory=CorpusLimits)


def tiny() -> PairRecipe:
    """Return the settings of the shipped pair."""
    drafts = draft_recipe()
    target = Phase(2e-3, Schedule(seconds=480, warmup_steps=150), 64, 1024, weight_decay=0.1)
    return PairRecipe(standalone=drafts.standalone, phases={"target": target, **drafts.phases})


def smoke() -> PairRecipe:
    """Return settings of toy size, for a CPU."""
    sizes = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "head_dim": 16,
        "max_position_embeddings": 256,
    }
    small = {**sizes, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    phase = Phase(3e-3, Schedule(seconds=20), 4, 64, log_every=5, heldout_every=20)
    names = ("target", "eagle3", "eagle", "medusa", "standalone")
    return PairRecipe(
        target=llama_config(**sizes),
        standalone=llama_config(**small),
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
