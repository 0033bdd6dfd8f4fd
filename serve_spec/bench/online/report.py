"""What `bench online` prints, from its JSON alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from serve_spec.bench.report import table

Result = Mapping[str, Any]

_SPEED = [
    *("load", "side", "requests", "errors", "tok/s", "goodput", "goodput tok/s"),
    *("tok/chunk", "accept", "K", "decoding", "batch", "same texts", "client CPU"),
]
_LATENCIES = {
    "ttft_ms": ("p50", "p90", "p99"),
    "tpot_ms": ("p50", "p90", "p99"),
    "e2e_ms": ("p50", "p90", "p99"),
    "chunk_gap_ms": ("p50", "p99"),
    "sent_late_ms": ("p99",),
}
_SPLIT = ["load", "side", "client", "door", "engine", "client - engine"]
_ARMS = ["load", "arm", "replicas", "tok/s", "x first", "x first per stream"]
_SHORT = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2e_ms": "e2e", "chunk_gap_ms": "gap"}


def tables(result: Result) -> str:
    """Speeds, latencies and, where there is an offline side, both sides compared."""
    cells = result["cells"]
    shown = [
        f"Goodput: {_objective(result['objective'])}.\n"
        "Decoding: streams between first and last token, on average; batch: as replicas report it, "
        "now and then.\nClient CPU: near 100% the client is the limit; give more --clients.",
        table(_SPEED, [_speed_row(cell) for cell in cells]),
        "Milliseconds. Open loops count from the scheduled time, sent or not; closed loops from "
        "sending.\nTPOT is per token after the first, gap per chunk.",
        table(["load", "side", *_latency_columns()], [_latency_row(cell) for cell in cells]),
    ]
    split = [cell for cell in cells if cell.get("first_token_ms")]
    if split:
        shown.append("Time to first token, mean ms, from arrival at each place.")
        shown.append(table(_SPLIT, [_split_row(cell) for cell in split]))
    if result["against_offline"]:
        columns = ["load", "side", "tok/s of offline", "added TTFT p50", "added TPOT p50"]
        shown.append(table(columns, [_against_row(row) for row in result["against_offline"]]))
    if result.get("against_first_arm"):
        shown.append("x first: under the same load; per stream: at as many streams per replica.")
        shown.append(table(_ARMS, [_arm_row(row) for row in result["against_first_arm"]]))
    return "\n\n".join(shown)


def _objective(objective: Mapping[str, float | None]) -> str:
    named = {"TTFT": objective["ttft_ms"], "TPOT": objective["tpot_ms"]}
    limits = [f"{name} <= {limit:g} ms" for name, limit in named.items() if limit is not None]
    return " and ".join(limits) or "no limit was set, every whole answer counts"


def _speed_row(cell: Mapping[str, Any]) -> list[object]:
    share = cell["client_cpu_share"]
    return [
        cell["load"],
        cell["side"],
        cell["num_requests"],
        " ".join(f"{count}x {what}" for what, count in cell["errors"].items()) or 0,
        cell["tokens_per_second"],
        f"{cell['goodput_share']:.1%}",
        cell["goodput_tokens_per_second"],
        *(_known(cell[key]) for key in ("tokens_per_chunk", "accept_length", "num_steps")),
        cell["decoding_streams"],
        _known(cell["batch_size"]),
        f"{cell['same_texts']}/{cell['num_texts']}",
        "" if share is None else f"{share:.0%}",
    ]


def _latency_columns() -> list[str]:
    return [
        f"{_SHORT.get(key, 'sent late')} {name}"
        for key, names in _LATENCIES.items()
        for name in names
    ]


def _latency_row(cell: Mapping[str, Any]) -> list[object]:
    return [
        cell["load"],
        cell["side"],
        *(
            "" if cell[key] is None else float(cell[key][name])
            for key, names in _LATENCIES.items()
            for name in names
        ),
    ]


def _split_row(cell: Mapping[str, Any]) -> list[object]:
    client, places = cell["ttft_ms"]["mean"], cell["first_token_ms"]
    door, engine = places["door"], places["engine"]
    return [cell["load"], cell["side"], client, door, engine, client - engine]


def _arm_row(row: Mapping[str, Any]) -> list[object]:
    return [
        *(row[key] for key in ("load", "arm", "num_replicas", "tokens_per_second")),
        *(_known(row[key]) for key in ("over_first", "over_first_per_stream")),
    ]


def _against_row(row: Mapping[str, Any]) -> Sequence[object]:
    return [
        row["load"],
        row["side"],
        f"{row['tokens_per_second_over_offline']:.1%}",
        _known(row["added_ttft_ms_p50"]),
        _known(row["added_tpot_ms_p50"]),
    ]


def _known(value: float | None) -> object:
    return "" if value is None else value
