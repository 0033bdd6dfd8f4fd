"""Check the checkpoints of a configuration from their headers, before anything is started."""

from __future__ import annotations

from serve_spec.adaptive import PolicySettings
from serve_spec.config import ServeSpecConfig
from serve_spec.engine.build import check_fit
from serve_spec.engine.tokenizer import Tokenizer
from serve_spec.models.drafts.base import DraftOptions
from serve_spec.models.drafts.loader import check_draft
from serve_spec.models.loader import check_target, read_spec
from serve_spec.worker.drafters.base import drafter_class


def check_checkpoints(config: ServeSpecConfig) -> None:
    """Raise what loading would: CheckpointError, ConfigError or ValueError. Reads no weights."""
    _ = PolicySettings.of(config.speculative).shapes  # imports a policy of another package
    folder = config.model.folder
    read_spec(folder, config.model.tensor_parallel_size)
    check_fit(config, Tokenizer(config.model.tokenizer_folder))
    target = check_target(folder, config.model.load_format)
    draft = config.draft_folder if config.speculative.enabled else None
    if draft is not None:
        options = DraftOptions.of(config.speculative, config.model.load_format)
        head = check_draft(draft, target, config.speculative.speculative_algorithm, options)
        drafter_class(head)  # imports a drafter of another package
