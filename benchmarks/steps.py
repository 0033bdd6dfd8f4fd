"""Time steps of full batches by depth, batch size and context, and the first token of a prompt.

    python benchmarks/steps.py --config 8b/expanded.yaml --acceptance 0.69 --json steps.jsonl

Depths take turns within the same texts. Every row is printed, and appended to the file of --json,
as soon as it is measured. It uses only public calls, so it also runs on other commits:
PYTHONPATH=OTHER_CHECKOUT python benchmarks/steps.py ...
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
import time
from itertools import cycle
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from serve_spec import LLM, SamplingParams
from serve_spec.bench.report import environment

TRIAL_STEPS, NOT_COUNTED = 12, 4
"""Steps of a depth before the next takes over, and how many of them are not counted."""


def main() -> None:
    """Time all depths, batch sizes and contexts."""
    args = _arguments()
    contexts = [(context, args.batch_sizes) for context in args.contexts] + [
        (int(context), [int(size) for size in sizes.split(",")])
        for context, sizes in (item.split(":") for item in args.cells)
    ]
    longest = args.turns * TRIAL_STEPS * (max(args.depths) + 1)
    tokens = [(context + longest, max(sizes)) for context, sizes in contexts]
    llm = LLM(
        args.config,
        max_num_seqs=max(size for _, size in tokens),
        num_pages=max(size * (-(-length // args.page_size) + 1) for length, size in tokens),
        page_size=args.page_size,
        max_model_len=max(args.first_token, *(length for length, _ in tokens)) + 8,
        prefix_caching=False,
        speculative_adaptive=False,
        speculative_num_steps=max(args.depths),
        synthetic_acceptance=tuple(args.acceptance),
    )
    _write(args.json, environment(llm.config) | {"command": shlex.join(sys.argv)})
    if args.first_token:
        _write(args.json, first_token(llm, args.first_token, args.turns))
    for context, sizes in contexts:
        for batch_size in sizes:
            for row in steps(llm, args.depths, batch_size, context, args.turns):
                _write(args.json, row)
    llm.shutdown()


def first_token(llm: LLM, num_tokens: int, repeats: int) -> dict[str, Any]:
    """Return the time to the first token of a prompt on an idle engine."""
    times = []
    for seed in range(repeats + 2):
        prompt = random.Random(seed).choices(range(llm.engine.tokenizer.vocab_size), k=num_tokens)
        start = time.perf_counter()
        llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
        times.append((time.perf_counter() - start) * 1e3)
    return {"prompt_tokens": num_tokens, "first_token_ms": median(times[2:])}


def steps(
    llm: LLM, depths: list[int], batch_size: int, context: int, turns: int
) -> list[dict[str, Any]]:
    """Return a row for each depth: median, 10th and 90th percentile of the step time."""
    engine, rng = llm.engine, random.Random(batch_size)
    num_tokens = turns * TRIAL_STEPS * (max(depths) + 1)
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    sequences = []
    for index in range(batch_size):
        prompt = rng.choices(range(engine.tokenizer.vocab_size), k=context)
        sequences.append(engine.new_sequence(f"{context}-{index}", prompt, params))
        engine.add(sequences[-1])
    _choose(llm, 0)
    while not all(sequence.is_decoding for sequence in sequences):
        engine.step()
    times: dict[int, list[float]] = {depth: [] for depth in depths}
    for turn, depth in zip(range(turns), cycle(depths), strict=False):
        _choose(llm, depth)
        for number in range(TRIAL_STEPS):
            start = time.perf_counter()
            engine.step()
            if turn >= len(depths) and number >= NOT_COUNTED:
                times[depth].append((time.perf_counter() - start) * 1e3)
    for sequence in sequences:
        engine.abort(sequence.request_id)
    while engine.has_work:
        engine.step()
    rows = []
    for depth, found in times.items():
        tenths = quantiles(found, n=10)
        row = {"context": context, "batch_size": batch_size, "depth": depth, "steps": len(found)}
        rows.append(row | {"ms": median(found), "p10_ms": tenths[0], "p90_ms": tenths[-1]})
    return rows


def _choose(llm: LLM, depth: int) -> None:
    llm.engine.reconfigure({"speculative_num_steps": depth})


def _write(path: Path | None, row: dict[str, Any]) -> None:
    line = json.dumps(row)
    print(line, flush=True)
    if path is not None:
        with path.open("a") as file:
            file.write(line + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    several = {"type": int, "nargs": "+"}
    parser.add_argument("--config", default="configs/tiny.yaml", help="configuration (YAML)")
    parser.add_argument("--depths", **several, default=[0, 3], help="draft steps; 0: off")
    sizes = [1, 8, 32, 64, 128]
    parser.add_argument("--batch-sizes", **several, default=sizes, help="requests")
    parser.add_argument("--contexts", **several, default=[256], help="context tokens")
    cells = "more contexts, each with its batch sizes, e.g. 15000:1,4,8"
    parser.add_argument("--cells", nargs="*", default=[], help=cells)
    parser.add_argument("--turns", type=int, default=12, help="turns of 12 steps")
    parser.add_argument("--first-token", type=int, default=0, help="tokens of a prompt to time")
    parser.add_argument(
        "--acceptance", type=float, nargs="+", default=[0.69], help="forced probabilities"
    )
    parser.add_argument("--page-size", type=int, default=16, help="tokens per page")
    parser.add_argument("--json", type=Path, help="file to append every row to (JSON lines)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
