"""What `bench kernels` prints, from its JSON alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from serve_spec.bench.report import table

Result = Mapping[str, Any]


def tables(result: Result) -> str:
    """Every section: its rows, its figures, its aims; then what was left out or failed, and why."""
    parts = ["\n".join(_section(name, with_floor(name, result))) for name in result["sections"]]
    for title in ("left_out", "failed"):
        lines = [f"  {name}: {why}" for name, why in result[title].items()]
        if lines:
            parts.append("\n".join([title.replace("_", " "), *lines]))
    return "\n\n".join(parts)


def with_floor(name: str, result: Result) -> Result:
    """The section `name`; plain steps get the floor of the same run beside them, if it was run."""
    section: Result = result["sections"][name]
    products = {row["rows"]: row["torch_ms"] for row in _rows(result, "floor")}
    if name != "plain" or not products:
        return section
    rows = []
    for row in section["rows"]:
        floor = products.get(row["batch_size"])
        over = None if floor is None else row["ms"] / floor
        rows.append({**row, "floor_ms": floor, "over_floor": over})
    return {**section, "rows": rows}


def _rows(result: Result, name: str) -> Sequence[Result]:
    rows: Sequence[Result] = result["sections"].get(name, {}).get("rows", ())
    return rows


def _section(name: str, section: Result) -> Iterator[str]:
    yield f"== {name}"
    rows = section["rows"]
    if rows:
        yield table(list(rows[0]), [[_shown(value) for value in row.values()] for row in rows])
    for fact, value in section["facts"].items():
        yield f"{fact}: {_shown(value)}"
    if section["aims"]:
        yield table(["figure", "value", "aim", "miss %"], [_aim(aim) for aim in section["aims"]])
    for what in section["left_out"]:
        yield f"left out: {what}"


def _aim(aim: Result) -> list[object]:
    sign = "<=" if aim["at_most"] else ">="
    miss = aim["miss_percent"]
    value, bound = _shown(aim["value"]), _shown(aim["aim"])
    return [aim["figure"], value, f"{sign} {bound}", f"{miss:.1f}" if miss else "reached"]


def _shown(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, Mapping):  # shares
        return " ".join(f"{key}:{share:.0%}" for key, share in value.items())
    return str(value)
