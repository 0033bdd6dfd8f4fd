"""Records of a run as JSON lines, with the environment of the measurement, and text tables.

A file may hold several runs. Each starts with a record of section `run`. Every measurement is
appended immediately, so an interrupted run keeps its results.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from serve_spec.config import ConfigError, ServeSpecConfig

Record: TypeAlias = Mapping[str, Any]

OUTPUTS = ("json", "plot", "from_json")
"""Arguments without effect on the figures."""
_OLD_KEYS = {"arm": "variant", "arms": "variants", "turn": "trial"}
_OLD_SECTIONS = {"turn": "trial"}


def environment(config: ServeSpecConfig | None = None) -> dict[str, Any]:
    """Return hardware, versions, commit, command, and `config`'s synthetic acceptance."""
    # `--help` and `breakeven` do not need torch.
    import torch

    from serve_spec.core.machine import cpu_model

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


def run_record(
    bench: str, args: argparse.Namespace, config: ServeSpecConfig | None, **fields: object
) -> dict[str, Any]:
    """Return the first record of a run."""
    arguments = {key: value for key, value in vars(args).items() if key not in OUTPUTS}
    where = {"environment": environment(config), "arguments": arguments}
    return {"section": "run", "bench": bench, **where, **fields}


def append_record(path: Path | None, record: Record) -> None:
    """Append a record to a file of JSON lines, if there is one."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(record, default=str) + "\n")


def print_record(path: Path | None, **record: object) -> None:
    """Print a record as a JSON line and append it to the file, if there is one."""
    print(json.dumps(record), flush=True)
    append_record(path, record)


def read_records(path: Path, bench: str) -> list[dict[str, Any]]:
    """Return the records of the last run in a file, including files of older versions.

    Raises:
        ConfigError: the file cannot be read, or has no records of this benchmark.
    """
    try:
        found = _records(path.read_text())
        first = max(at for at, record in enumerate(found) if record["section"] == "run")
    except (OSError, ValueError, TypeError, KeyError) as error:
        fix = "give a file that --json wrote"
        raise ConfigError(f"from_json={str(path)!r}: {error!r}; {fix}") from error
    if found[first].get("bench", bench) != bench:
        fix = f"is of bench {found[first]['bench']}; give one of bench {bench}"
        raise ConfigError(f"from_json={str(path)!r}: {fix}")
    return [_in_new_words(record) for record in found[first:]]


def _records(text: str) -> list[dict[str, Any]]:
    try:
        whole = json.loads(text)
    except ValueError:
        return [json.loads(line) for line in text.splitlines()]
    if "cells" not in whole:
        return [whole]
    cells = whole.pop("cells")  # older files hold one object
    return [{"section": "run", **whole}, *({"section": "measurement"} | cell for cell in cells)]


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return an aligned text table: floats with two decimals, None as an empty cell."""
    cells = [list(map(_cell, row)) for row in rows]
    widths = [max(len(c), *(len(row[i]) for row in cells)) for i, c in enumerate(columns)]
    lines = [
        "  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True))
        for line in [list(columns), *cells]
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def show(tables: str, run: Record) -> None:
    """Print the tables of a run, below a banner if its acceptance was forced."""
    forced = forced_acceptance(run)
    if forced is not None:
        print(f"*** synthetic_acceptance={forced}: the texts are not the model's ***")
    print(tables)


def forced_acceptance(run: Record) -> object:
    """Return the run's synthetic acceptance, or None."""
    return run["environment"].get("synthetic_acceptance")


def plot_title(run: Record) -> str:
    """Return the hardware and the synthetic acceptance, if any."""
    forced = forced_acceptance(run)
    note = "" if forced is None else f"; acceptance forced to {forced} where drafts are made"
    return f"{run['environment']['gpu'] or run['environment']['cpu']}{note}"


def _in_new_words(record: Record) -> dict[str, Any]:
    renamed = {_OLD_KEYS.get(key, key): value for key, value in record.items()}
    return renamed | {"section": _OLD_SECTIONS.get(record["section"], record["section"])}


def _without_outputs(argv: Sequence[str]) -> list[str]:
    kept = list(argv)
    for flag in ("--json", "--plot"):
        if flag in kept:
            at = kept.index(flag)
            del kept[at : at + 2]
    return kept


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the commit of the source tree, with `+` if it has changes.

    Without a repository (a container, a copy), it is SERVE_SPEC_COMMIT.
    """
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("SERVE_SPEC_COMMIT")
    return run.stdout.strip()
