"""Tables, the machine line, plots: what every benchmark shares."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from serve_spec.config import ServeSpecConfig
from serve_spec.core.machine import cpu_model


def environment(config: ServeSpecConfig | None = None) -> dict[str, Any]:
    """Hardware, versions and commit: what a figure is worthless without.

    config: what was measured. If it forces acceptance, that is said here; `show` and `forced_note`
        repeat it.
    """
    import torch  # here: what needs no model, such as `breakeven`, starts without it

    forced = None if config is None else config.speculative.synthetic_acceptance
    cuda = torch.cuda.is_available()
    versions = {name: _version(name) for name in ("torch", "triton", "flashinfer-python", "ray")}
    return {
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "cpu": f"{cpu_model()} ({os.cpu_count()} cores)",
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {name: version for name, version in versions.items() if version},
        "commit": _commit(),
        "command": "serve-spec " + " ".join(_without_outputs(sys.argv[1:])),
        **({} if forced is None else {"synthetic_acceptance": forced}),
    }


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """An aligned text table; floats with two decimals."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(c), *(len(row[i]) for row in cells)) for i, c in enumerate(columns)]
    lines = [
        "  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True))
        for line in [list(columns), *cells]
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def show(tables: str, result: Mapping[str, Any]) -> None:
    """Prints the tables of a result, fresh or old; above them a banner where it was forced."""
    forced = forced_acceptance(result)
    if forced is not None:
        print(f"*** synthetic_acceptance={forced}: acceptance was forced, no text is real ***")
    print(tables)


def forced_acceptance(result: Mapping[str, Any]) -> object:
    """What acceptance was forced to; None where the target decided."""
    return result["environment"].get("synthetic_acceptance")


def forced_note(result: Mapping[str, Any]) -> str:
    """The end of a picture's title; empty where acceptance was real."""
    forced = forced_acceptance(result)
    return "" if forced is None else f"; acceptance forced to {forced} where drafts are made"


def emit(result: Mapping[str, Any], path: Path | None) -> None:
    """Prints the JSON line, the last of the output, and writes it to `path` if given."""
    save(result, path)
    print(json.dumps(result))


def save(result: Mapping[str, Any], path: Path | None) -> None:
    """Writes the JSON to `path`, if given; early, too, so that a run cut short keeps something."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


def write_row(path: Path | None, **row: object) -> None:
    """Print a row as one JSON line and add it to the file, so that a cut-off run keeps its rows."""
    print(json.dumps(row), flush=True)
    append_row(path, row)


def append_row(path: Path | None, row: Mapping[str, Any]) -> None:
    """Add a row to a file of JSON lines, if given."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def _without_outputs(argv: Sequence[str]) -> list[str]:
    """The arguments that decide a figure: all but where it is written."""
    kept = list(argv)
    for flag in ("--json", "--markdown", "--plot"):
        if flag in kept:
            at = kept.index(flag)
            del kept[at : at + 2]
    return kept


def _cell(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the source tree the package runs from, with `+` when it has changes.

    Where there is no repository (a container, a copy), SERVE_SPEC_COMMIT may say it.
    """
    root = Path(__file__).parents[2]
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("SERVE_SPEC_COMMIT")
    return run.stdout.strip()
