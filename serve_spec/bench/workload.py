"""Prompts a benchmark runs on: windows of source files that no model here was trained on."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Sequence
from pathlib import Path

# Held out of the shipped pair's corpus, and installed with torch and Ray wherever we are.
HELD_OUT_PACKAGES = ("networkx", "aiohttp")


def held_out_prompts(
    encode: Callable[[str], list[int]],
    *,
    count: int,
    num_tokens: int,
    seed: int = 0,
    packages: Sequence[str] = HELD_OUT_PACKAGES,
) -> list[list[int]]:
    """`count` prompts of `num_tokens` token ids, from random places in held-out source files.

    Each starts at a line of a file chosen at random, so prompts look like code being continued.

    Raises:
        ValueError: no package is installed, or none holds a file long enough.
    """
    files = [path for package in packages for path in _source_files(package)]
    if not files:
        raise ValueError(f"packages={list(packages)}: none is installed; name installed ones")
    rng = random.Random(seed)
    prompts: list[list[int]] = []
    for _ in range(count * 50):
        lines = rng.choice(files).read_text(encoding="utf-8").splitlines(keepends=True)
        if len(lines) < 40:
            continue
        start = rng.randrange(len(lines) - 20)
        ids = encode("".join(lines[start : start + num_tokens]))
        if len(ids) >= num_tokens:
            prompts.append(ids[:num_tokens])
        if len(prompts) == count:
            return prompts
    raise ValueError(f"num_tokens={num_tokens}: no held-out file is that long; ask for less")


def _source_files(package: str) -> list[Path]:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return []
    root = Path(spec.submodule_search_locations[0])
    return sorted(path for path in root.rglob("*.py") if "tests" not in path.parts)
