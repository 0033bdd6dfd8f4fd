"""Description of a draft checkpoint, for `serve-spec check-config --draft`.

Everything is read as the engine reads it. With a configuration the draft is compared with its
target, tensor by tensor; without one, facts that depend on the target stay open.
"""

from __future__ import annotations

from pathlib import Path

from serve_spec.config import ServeSpecConfig
from serve_spec.models.drafts.base import DraftOptions, load_family
from serve_spec.models.drafts.checkpoint import open_draft
from serve_spec.models.loader import check_target


def describe_draft(path: Path, config: ServeSpecConfig | None) -> str:
    """Return one line per fact about a draft, for `config`'s target; may raise CheckpointError."""
    options, target = DraftOptions(), None
    if config is not None:
        load_format = config.model.load_format
        # Only files tell facts.
        options = DraftOptions.of(
            config.speculative, "auto" if load_format == "dummy" else load_format
        )
        target = check_target(config.model.folder, options.load_format)
    file = open_draft(path, load_format=options.load_format)
    family = load_family(file.family)
    if target is not None:
        family.check(file, target, options)
    facts = {
        "draft": str(file.path),
        "family": f"{file.family}, layout: {file.exporter}",
        "recognised by": file.evidence,
        **family.facts(file, target, options),
        "target": _fit(config, file.family),
    }
    width = max(map(len, facts)) + 2
    return "\n".join(f"{name + ':':<{width}}{text}" for name, text in facts.items())


def _fit(config: ServeSpecConfig | None, family: str) -> str:
    if config is None:
        return "not compared: name a configuration file"
    asked = config.speculative.speculative_algorithm
    fix = "" if asked == family else f"; speculative_algorithm={asked!r}: set it to {family!r}"
    return f"{config.model.path}: fits{fix}"
