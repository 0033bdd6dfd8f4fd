"""Rows of `bench drafters` to tables: what each drafter gives, and whether trees or chains win."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from serve_spec.bench.drafters.run import CHAIN, OFF, POLICY, TREE, Row
from serve_spec.bench.report import forced_acceptance, table

COLUMNS = [
    *("drafter", "drafts", "arm", "T", "batch", "accept", "tok/s", "from - to", "x off"),
    *("full x off", "equal text", "rounds"),
]
WINNERS = ["drafter", "T", "batch", "best chain", "x off", "best tree", "x off", "tree / chain"]


class Speed(NamedTuple):
    """One way to tell how fast an arm is: what it is of, and the keys of a row."""

    name: str
    tokens_per_second: str
    over_off: str

    def of(self, row: Row) -> float:
        """Tokens per second."""
        value: float = row[self.tokens_per_second]
        return value


TO_THE_END = Speed("whole runs", "tokens_per_second", "speedup")
FULL = Speed("full batches", "decode_tokens_per_second", "decode_speedup")


def tables(result: Mapping[str, Any]) -> str:
    """As text: every row, then trees against chains where both ran."""
    rows = result["rows"]
    parts = [table(COLUMNS, list(map(_shown, rows)))] if rows else []
    for speed, columns, found in _comparisons(rows):
        parts.append(f"Trees against chains, {speed.name}:\n{table(columns, found)}")
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
    if (forced := forced_acceptance(result)) is not None:
        facts["acceptance"] = f"**forced to {forced}: no text is real**"
    parts = [
        "# Drafters, in chains and in trees",
        "\n".join(f"- {name}: {value}" for name, value in facts.items()),
        _markdown_table(COLUMNS, list(map(_shown, rows))),
    ]
    for speed, columns, found in _comparisons(rows):
        parts += [f"## Trees against chains, {speed.name}", _markdown_table(columns, found)]
    parts += [f"Left out: {reason}" for reason in result["left_out"]]
    return "\n\n".join([*parts, _HOW_TO_READ]) + "\n"


_HOW_TO_READ = """## How to read the tables

- Every drafter has an engine of its own, one after the other; its arms take turns on the same
  prompts, repetition by repetition. tok/s is of the median repetition of whole runs, prompts
  included; beside it the slowest and the fastest.
- x off: over the same engine without drafts. Full x off: the same of full batches, that is of the
  rounds in which every request decodes: a batch that is refilled goes on like this, while a whole
  run also waits for its slowest text. Accept: tokens of a row and round, drafts kept plus
  one.
- K=n is a chain of n drafts, AxB a tree of A levels and B drafts.
- Equal text: whether all texts are those of off, token for token; else how many are.
- rounds: of a policy, the shares of the tiers it chose most."""


def winners(rows: Sequence[Row], speed: Speed = TO_THE_END) -> Iterator[Row]:
    """The fastest chain, the fastest tree and every policy, where a chain and a tree ran."""

    def setting(row: Row) -> tuple[str, float, int]:
        return row["drafter"], row["temperature"], row["batch_size"]

    for (drafter, temperature, batch_size), group in groupby(rows, setting):
        of_kind: dict[str, list[Row]] = {kind: [] for kind in (OFF, CHAIN, TREE, POLICY)}
        for row in group:
            of_kind[row["drafts"]].append(row)
        if not of_kind[CHAIN] or not of_kind[TREE]:
            continue
        chain, tree = (max(of_kind[kind], key=speed.of) for kind in (CHAIN, TREE))
        best = max(speed.of(row) for row in (*of_kind[OFF], chain, tree))
        yield {
            "drafter": drafter,
            "temperature": temperature,
            "batch_size": batch_size,
            "chain": chain,
            "tree": tree,
            "tree_over_chain": speed.of(tree) / speed.of(chain),
            "policies_over_best": {row["arm"]: speed.of(row) / best for row in of_kind[POLICY]},
        }


def _comparisons(rows: Sequence[Row]) -> Iterator[tuple[Speed, list[str], list[list[object]]]]:
    """A table by each speed that all rows know, where chains and trees ran."""
    policies = list(dict.fromkeys(row["arm"] for row in rows if row["drafts"] == POLICY))
    columns = [*WINNERS, *(f"{name} / best" for name in policies)]
    for speed in (TO_THE_END, FULL):
        if all(row.get(speed.tokens_per_second) for row in rows):
            found = [_winner_row(winner, speed, policies) for winner in winners(rows, speed)]
            if found:
                yield speed, columns, found


def _winner_row(winner: Row, speed: Speed, policies: Sequence[str]) -> list[object]:
    chain, tree = winner["chain"], winner["tree"]
    return [
        winner["drafter"],
        winner["temperature"],
        winner["batch_size"],
        chain["arm"],
        chain[speed.over_off],
        tree["arm"],
        tree[speed.over_off],
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
        f"{row['tokens_per_second']:.1f}",
        f"{slowest:.1f} - {fastest:.1f}",
        row["speedup"],
        "" if row.get("decode_speedup") is None else row["decode_speedup"],
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
