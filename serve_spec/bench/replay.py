"""Saved answers of a target, which `bench offline --replay` drafts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from serve_spec.bench.report import append_record
from serve_spec.config import ConfigError, ServeSpecConfig, SpeculativeConfig
from serve_spec.config.drafts import METHODS
from serve_spec.core.request import RequestOutput
from serve_spec.engine.engine import SpecEngine

ALGORITHM = "REPLAY"

_KEPT = {
    *("speculative_num_steps", "speculative_adaptive_config", "speculative_adaptive_strategy"),
    *("speculative_per_sequence", "min_dwell_rounds"),
}
"""Keys of the policy, which also chooses the depth of replayed drafts."""


def replay_keys(answers: Path) -> dict[str, Any]:
    """Return the keys that replace a configuration's drafts, if any, by an empty answer file.

    Raises ConfigError: the file cannot be written.
    """
    try:
        answers.parent.mkdir(parents=True, exist_ok=True)
        answers.write_text("")
    except OSError as error:
        fix = "give a file that can be written"
        raise ConfigError(f"--replay={answers}: {error.strerror}; {fix}") from error
    fields = SpeculativeConfig.model_fields.items()
    defaults = {key: field.get_default() for key, field in fields if key not in _KEPT}
    drafts = {"speculative_algorithm": ALGORITHM, "speculative_replay_answers": str(answers)}
    return {**defaults, **drafts, "speculative_adaptive": True}


def replay(engine: SpecEngine, config: ServeSpecConfig, outputs: Iterable[RequestOutput]) -> None:
    """Append answers to the configured file and draft them, the newest first."""
    for output in outputs:
        answer = {"prompt_token_ids": output.prompt_token_ids, "token_ids": output.token_ids}
        append_record(config.speculative.speculative_replay_answers, answer)
    ngrams = engine.scheduler.drafts.ngrams
    assert ngrams is not None, "REPLAY drafts on the host"
    deepest = max(shape.depth for shape in engine.controller.shapes)
    create = METHODS[ALGORITHM].load()
    ngrams.drafter = create(config.speculative, engine.tokenizer.encode, deepest)
