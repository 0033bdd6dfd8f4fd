"""Check the checkpoints of a configuration from their headers, before anything is started."""

from __future__ import annotations

from serve_spec.adaptive import PolicySettings
from serve_spec.config import ServeSpecConfig
from serve_spec.engine.build import check_fit
from serve_spec.engine.tokenizer import Tokenizer
from serve_spec.models.draft_checkpoint import open_draft
from serve_spec.models.draft_report import check_target, describe_draft
from serve_spec.models.loader import read_spec


def check_checkpoints(config: ServeSpecConfig) -> None:
    """Raise what loading would: CheckpointError, ConfigError or ValueError. Reads no weights."""
    _ = PolicySettings.of(config.speculative).shapes  # imports a policy of another package
    folder = config.model.folder
    spec = read_spec(folder, config.model.tensor_parallel_size)
    check_fit(config, Tokenizer(config.model.tokenizer_folder))
    algorithm = config.speculative.speculative_algorithm
    draft = config.draft_folder if config.speculative.enabled else None
    load_format = config.model.load_format
    if load_format == "dummy":
        if draft is not None and algorithm != "STANDALONE":
            open_draft(draft, algorithm, load_format, spec)
        return
    check_target(folder, load_format)
    if draft is not None:
        open_draft(draft, algorithm, load_format)
        describe_draft(draft, config)
