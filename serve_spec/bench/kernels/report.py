"""What `bench kernels` prints, from its JSON alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from serve_spec.bench.report import table

Result = Mapping[str, Any]


def tables(result: Result) -> str:
    """Every section: its rows, its figures, its aims; then what was left out or failed, and why."""
    parts = ["\n".join(_section(name, with_others(name, result))) for name in result["sections"]]
    for title in ("left_out", "failed"):
        lines = [f"  {name}: {why}" for name, why in result[title].items()]
        if lines:
            parts.append("\n".join([title.replace("_", " "), *lines]))
    return "\n\n".join(parts)


def with_others(name: str, result: Result) -> Result:
    """The section `name`; what else the run measured beside its rows, where they are compared.

    Plain steps get the floor, compiled rounds those of the default engine.
    """
    section: Result = result["sections"][name]
    if name == "plain":
        floor = {(row["rows"], 0): row["torch_ms"] for row in _rows(result, "floor")}
        return _beside(section, "floor", floor)
    if name == "compile":
        default = {
            (row["batch_size"], row.get("num_steps", 0)): row["ms"]
            for other in ("rounds", "plain")
            for row in _rows(result, other)
        }
        return _beside(section, "default", default)
    return section


def _beside(section: Result, name: str, others: Mapping[tuple[int, int], float]) -> Result:
    """others: milliseconds by batch size and number of drafts; without any, nothing is added."""
    if not others:
        return section
    rows = []
    for row in section["rows"]:
        other = others.get((row["batch_size"], row.get("num_steps", 0)))
        over = None if other is None else row["ms"] / other
        rows.append({**row, f"{name}_ms": other, f"over_{name}": over})
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
