"""Rows of `bench drafters` to tables: what each drafter gives, and whether trees or chains win."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from serve_spec.bench.drafters.run import CHAIN, OFF, POLICY, TREE, Row
from serve_spec.bench.report import table

COLUMNS = ["drafter", "drafts", "arm", "T", "batch", "accept", "tok/s", "from - to", "x off"]
WINNERS = ["drafter", "T", "batch", "best chain", "x off", "best tree", "x off", "tree / chain"]


def tables(result: Mapping[str, Any]) -> str:
    """As text: every row, then trees against chains where both ran."""
    rows = result["rows"]
    parts = [table([*COLUMNS, "equal text", "rounds"], list(map(_shown, rows)))] if rows else []
    if found := list(winners(rows)):
        policies = _policies(rows)
        columns = [*WINNERS, *(f"{name} / best" for name in policies)]
        parts.append(table(columns, [_winner_row(winner, policies) for winner in found]))
    parts += [f"left out: {reason}" for reason in result["left_out"]]
    return "\n\n".join(parts)


def markdown(result: Mapping[str, Any]) -> str:
    """The same for a page, with what the figures are worthless without."""
    rows, environment = result["rows"], result["environment"]
    facts = {
        "hardware": environment["gpu"] or environment["cpu"],
        "commit": environment["commit"],
        "command": f"`{environment['command']}`",
    }
    parts = [
        "# Drafters, in chains and in trees",
        "\n".join(f"- {name}: {value}" for name, value in facts.items()),
        _markdown_table([*COLUMNS, "equal text", "rounds"], list(map(_shown, rows))),
    ]
    if found := list(winners(rows)):
        policies = _policies(rows)
        columns = [*WINNERS, *(f"{name} / best" for name in policies)]
        parts += ["## Trees against chains"]
        parts += [_markdown_table(columns, [_winner_row(winner, policies) for winner in found])]
    parts += [f"Left out: {reason}" for reason in result["left_out"]]
    return "\n\n".join([*parts, _HOW_TO_READ]) + "\n"


_HOW_TO_READ = """## How to read the tables

- Every drafter has an engine of its own, one after the other; its arms take turns on the same
  prompts, repetition by repetition. tok/s is of the median repetition of whole runs, prompts
  included; beside it the slowest and the fastest.
- x off: over the same engine without drafts. Accept: tokens of a row and round, drafts kept plus
  one.
- K=n is a chain of n drafts, AxB a tree of A levels and B drafts.
- Equal text: whether all texts are those of off, token for token; else how many are.
- rounds: of a policy, the shares of the tiers it chose most."""


def winners(rows: Sequence[Row]) -> Iterator[Row]:
    """The fastest chain, the fastest tree and every policy, where a chain and a tree ran."""

    def setting(row: Row) -> tuple[str, float, int]:
        return row["drafter"], row["temperature"], row["batch_size"]

    for (drafter, temperature, batch_size), group in groupby(rows, setting):
        of_kind: dict[str, list[Row]] = {kind: [] for kind in (OFF, CHAIN, TREE, POLICY)}
        for row in group:
            of_kind[row["drafts"]].append(row)
        if not of_kind[CHAIN] or not of_kind[TREE]:
            continue
        chain, tree = (max(of_kind[kind], key=speed) for kind in (CHAIN, TREE))
        best = max(speed(row) for row in (*of_kind[OFF], chain, tree))
        yield {
            "drafter": drafter,
            "temperature": temperature,
            "batch_size": batch_size,
            "chain": chain,
            "tree": tree,
            "tree_over_chain": speed(tree) / speed(chain),
            "policies_over_best": {row["arm"]: speed(row) / best for row in of_kind[POLICY]},
        }


def speed(row: Row) -> float:
    """Tokens per second."""
    value: float = row["tokens_per_second"]
    return value


def _policies(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["arm"] for row in rows if row["drafts"] == POLICY))


def _winner_row(winner: Row, policies: Sequence[str]) -> list[object]:
    chain, tree = winner["chain"], winner["tree"]
    return [
        winner["drafter"],
        winner["temperature"],
        winner["batch_size"],
        chain["arm"],
        chain["speedup"],
        tree["arm"],
        tree["speedup"],
        winner["tree_over_chain"],
        *(winner["policies_over_best"].get(name, "") for name in policies),
    ]


def _shown(row: Row) -> list[object]:
    slowest, fastest = row["tokens_per_second_range"]
    is_equal = row["same_texts"] == row["num_texts"]
    return [
        row["drafter"],
        row["drafts"],
        row["arm"],
        row["temperature"],
        row["batch_size"],
        row["accept_length"],
        f"{speed(row):.1f}",
        f"{slowest:.1f} - {fastest:.1f}",
        row["speedup"],
        "yes" if is_equal else f"{row['same_texts']}/{row['num_texts']}",
        _shares(row["rounds_by_tier"]) if row["drafts"] == POLICY else "",
    ]


def _shares(rounds: Mapping[str, int]) -> str:
    total = sum(rounds.values())
    often = sorted(rounds, key=lambda tier: -rounds[tier])[:3]
    return " ".join(f"{tier}:{rounds[tier] / total:.0%}" for tier in often)


def _markdown_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    def cell(value: object) -> str:
        return f"{value:.2f}" if isinstance(value, float) else str(value)

    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in lines)
