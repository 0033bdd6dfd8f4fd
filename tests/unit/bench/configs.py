"""A configuration file of a tiny random pair."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.helpers.engines import Pair, make_pair


def write_config(
    root: Path, algorithm: str = "EAGLE3", pair: Pair | None = None, **sections: Any
) -> Path:
    """Return the file, written to `root`; `sections` add keys to those of the pair."""
    pair = pair or make_pair(root)
    draft = {
        "speculative_algorithm": algorithm,
        "speculative_draft_model_path": str(pair.heads[algorithm]),
    }
    model = {"path": str(pair.target), "device": "cpu", "max_model_len": 128}
    settings = {
        **sections,
        "model": {**model, **sections.get("model", {})},
        "speculative": {**draft, **sections.get("speculative", {})},
    }
    path = root / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path
