"""A configuration file of a tiny random pair, and a dataset."""

import json

import yaml

from tests.helpers.engines import make_pair


def write_config(root, algorithm="EAGLE3", pair=None, **sections):
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


def write_dataset(root):
    """Return a file of two categories of three chats each, written to `root`."""
    path = root / "asked.jsonl"
    lines = [
        {"category": category, "prompt": f"{category} {number}?"}
        for number in range(3)
        for category in ("code", "chat")
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
