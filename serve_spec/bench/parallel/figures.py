"""What `bench parallel` makes of rounds and texts: figures by size, and how far they scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, TypeAlias

from serve_spec.bench.kernels.aims import Aim, at_least
from serve_spec.bench.kernels.setting import Row, Section
from serve_spec.bench.waves import figures
from serve_spec.core.request import RequestOutput
from serve_spec.metrics import StepStats

Rounds: TypeAlias = Mapping[tuple[int, int, int], Sequence[StepStats]]
"""By batch size, number of drafts and tensor-parallel size."""
Texts: TypeAlias = Mapping[tuple[int, int], Sequence[RequestOutput]]
"""By tensor-parallel size and number of drafts; the first are what the others should be."""

SCALING_AIM = 0.75
AIM_AT = (32, 0)
"""The batch size and number of drafts that it is for."""

_NO_BASE = "scaling: it is over one GPU; name 1 among the sizes"
_DRAFT = (
    "its layers are whole on every rank, so draft_ms does not scale; embeddings it has from the "
    "target are one more sum a step. verify_ms is what ranks share"
)


def rounds_section(measured: Rounds, *, on_gpus: bool) -> Section:
    """Rounds of every size; `scaling` is speed over one rank's, per rank.

    `verify_scaling` is the same of verification alone. Only on GPUs does either have an aim: ranks
    on CPUs share the cores that one had.
    """
    found = {key: figures(rounds) for key, rounds in sorted(measured.items()) if rounds}
    rows: list[Row] = []
    aims: list[Aim] = []
    for (batch_size, num_steps, size), mine in found.items():
        base = found.get((batch_size, num_steps, 1))
        row: Row = {
            "batch_size": batch_size,
            "num_steps": num_steps,
            "tensor_parallel_size": size,
            **mine,
            "over_one": None,
            "scaling": None,
            "verify_scaling": None,
        }
        if base is not None:
            row["over_one"] = mine["tokens_per_second"] / base["tokens_per_second"]
            row["scaling"] = row["over_one"] / size
            row["verify_scaling"] = base["verify_ms"] / mine["verify_ms"] / size
        rows.append(row)
        if on_gpus and base is not None and size > 1 and (batch_size, num_steps) == AIM_AT:
            what = f"scaling of plain steps, batch {batch_size}, {size} GPUs"
            aims.append(at_least(what, row["scaling"], SCALING_AIM))
    has_base = any(size == 1 for _, _, size in found)
    return Section(rows, {"draft": _DRAFT}, aims, [] if has_base or not rows else [_NO_BASE])


def texts_section(texts: Texts) -> Section:
    """How many texts of every size and depth are those of the first, which does not draft."""
    expected = [output.token_ids for output in next(iter(texts.values()), ())]
    rows: list[Row] = []
    for (size, num_steps), outputs in texts.items():
        pairs = zip((output.token_ids for output in outputs), expected, strict=True)
        rows.append(
            {
                "tensor_parallel_size": size,
                "num_steps": num_steps,
                "same_texts": sum(mine == theirs for mine, theirs in pairs),
                "num_texts": len(expected),
                "num_tokens": sum(len(output.token_ids) for output in outputs),
                "accept_length": fmean(output.speculation.accept_length for output in outputs),
            }
        )
    return Section(rows, {"dtype": "float32"})


def texts_differ(section: Mapping[str, Any]) -> bool:
    """Whether any size or depth says something else than the first; of `texts_section`'s JSON."""
    return any(row["same_texts"] < row["num_texts"] for row in section["rows"])


def with_all_columns(rows: Sequence[Row]) -> list[Row]:
    """The rows, with None for what only others know."""
    columns = dict.fromkeys(column for row in rows for column in row)
    return [{column: row.get(column) for column in columns} for row in rows]
