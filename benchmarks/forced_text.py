"""Time JSON answers of a fixed schema with and without drafts of the text that it forces.

    PYTHONPATH=. python benchmarks/forced_text.py [--config asset:smollm2] [--batch-sizes 1 32] \\
        [--set speculative_algorithm=NONE ...] [--json FILE]

An object of 20 keys with short values. Both variants answer the same prompts in turns, in the same
process, and must give the same texts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from serve_spec.bench.report import environment, print_record
from serve_spec.config.root import parse_override
from serve_spec.core.draft import GrammarLimits
from serve_spec.core.grammar import Grammar
from serve_spec.core.request import RequestOutput, SamplingParams
from serve_spec.engine.llm import LLM

NAMES = (
    "order_id", "customer_name", "email", "phone_number", "street", "city", "postal_code",
    "country", "currency", "total_amount", "tax_amount", "discount", "num_items", "is_paid",
    "is_shipped", "carrier", "tracking_code", "created_at", "updated_at", "comment",
)  # fmt: skip
TEXT, NUMBER, FLAG = (
    {"type": "string", "maxLength": 8},
    {"type": "integer", "minimum": 0, "maximum": 999},
    {"type": "boolean"},
)
KINDS = {name: FLAG if name.startswith("is_") else TEXT for name in NAMES} | dict.fromkeys(
    ("order_id", "total_amount", "tax_amount", "discount", "num_items"), NUMBER
)
SCHEMA = {
    "type": "object",
    "properties": KINDS,
    "required": list(NAMES),
    "additionalProperties": False,
}
EXAMPLE = {
    name: 40 + number if kind is NUMBER else kind is FLAG or f"{name[:5]}{number}"
    for number, (name, kind) in enumerate(KINDS.items())
}
MAX_TOKENS = 480


def main(argv: list[str] | None = None) -> int:
    """Time both variants at every batch size; return 1 if a text differs."""
    args = _arguments(argv)
    settings = dict(map(parse_override, args.set))
    llm = LLM(args.config, **settings)
    differs = False
    try:
        for batch_size in args.batch_sizes:
            found = compared(llm, batch_size, args.turns)
            differs |= found["num_same_texts"] < batch_size
            record = environment(llm.config) | {"settings": settings} | found
            print_record(args.json, bench="forced_text", **record)
    finally:
        llm.shutdown()
    return int(differs)


def compared(llm: LLM, batch_size: int, turns: int) -> dict[str, Any]:
    """Return tokens per second of both variants, and what the drafts did."""
    known: dict[str, dict[str, Any]] = {}
    speeds: dict[str, list[float]] = {"off": [], "on": []}
    texts: dict[str, list[str]] = {}
    answers: list[RequestOutput] = []
    for turn in range(turns + 1):
        for variant in ("on", "off") if turn % 2 else ("off", "on"):
            controller = llm.engine.controller
            if known.get(variant):  # each variant plans by its own rounds
                controller.restore(known[variant])
            with grammar_drafts(llm, is_on=variant == "on"):
                speed, answers_now = timed(llm, batch_size)
            known[variant] = controller.state()
            if turn:  # the first one compiles the grammar
                speeds[variant].append(speed)
            texts[variant] = [answer.text for answer in answers_now]
            answers = answers_now if variant == "on" else answers
    same = [one == other for one, other in zip(texts["on"], texts["off"], strict=True)]
    medians = {variant: median(found) for variant, found in speeds.items()}
    tokens = sum(len(answer.token_ids) for answer in answers)
    of_grammar = sum(answer.speculation.num_grammar_tokens for answer in answers)
    return {
        "batch_size": batch_size,
        "turns": turns,
        "tokens": tokens,
        "grammar_share": round(of_grammar / tokens, 4),
        "tokens_per_second": {name: round(speed, 1) for name, speed in medians.items()},
        "speedup": round(medians["on"] / medians["off"], 3),
        "num_same_texts": sum(same),
    }


@contextmanager
def grammar_drafts(llm: LLM, *, is_on: bool) -> Iterator[None]:
    """Leave grammar drafts out, unless they are on."""
    grammars, scheduler = llm.engine.worker.grammars, llm.engine.scheduler
    most, drafts = grammars.most_drafts, scheduler.drafts
    if not is_on:
        grammars.most_drafts = 0
        scheduler.drafts = replace(drafts, grammar_limits=GrammarLimits())
    try:
        yield
    finally:
        grammars.most_drafts, scheduler.drafts = most, drafts


def timed(llm: LLM, batch_size: int) -> tuple[float, list[RequestOutput]]:
    """Return the tokens per second of one batch, and its answers."""
    grammar = Grammar.json_schema(SCHEMA)
    shown = json.dumps(EXAMPLE)
    prompts = [f"Order {number} as JSON:\n{shown}\nAgain:\n" for number in range(batch_size)]
    params = [
        SamplingParams(max_tokens=MAX_TOKENS, temperature=0.3, seed=number, grammar=grammar)
        for number in range(batch_size)
    ]
    start = time.perf_counter()
    answers = llm.generate(prompts, params)
    seconds = time.perf_counter() - start
    return sum(len(answer.token_ids) for answer in answers) / seconds, answers


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="asset:tiny", help="configuration, model or asset")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--turns", type=int, default=5, help="counted batches of each variant")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path, help="file to append records to")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
