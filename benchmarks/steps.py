"""Time steps of full batches by depth, batch size and context, and the first token of a prompt.

    python benchmarks/steps.py --config 8b/expanded.yaml --acceptance 0.69 --json steps.jsonl
    python benchmarks/steps.py --config asset:smollm2 --replay --transformers --json steps.jsonl

Depths take turns within the same texts, and with --transformers its `generate` takes turns with
them. Every row is printed, and appended to the file of --json, as soon as it is measured. It uses
only public calls, so it also runs on other commits: PYTHONPATH=OTHER_CHECKOUT python
benchmarks/steps.py ...
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
import tempfile
import time
from itertools import cycle, pairwise, product
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from serve_spec import LLM, SamplingParams
from serve_spec.bench.report import environment
from serve_spec.core.sequence import Sequence

TRIAL_STEPS, NOT_COUNTED = 12, 4
"""Steps of a depth before the next takes over, and how many of them are not counted."""


def main() -> None:
    """Time all depths, batch sizes and contexts."""
    args = _arguments()
    contexts = [(context, args.batch_sizes) for context in args.contexts] + [
        (int(context), [int(size) for size in sizes.split(",")])
        for context, sizes in (item.split(":") for item in args.cells)
    ]
    new_tokens = args.turns * TRIAL_STEPS * (max(args.depths) + 1)
    cells = [(context, size) for context, sizes in contexts for size in sizes]
    settings: dict[str, Any] = {
        "max_num_seqs": max(size for _, size in cells),
        "num_pages": max(
            size * (-(-(context + new_tokens) // args.page_size) + 1) for context, size in cells
        ),
        "page_size": args.page_size,
        "max_model_len": max(args.first_token, *(context + new_tokens for context, _ in cells)) + 8,
        "prefix_caching": False,
    }
    with tempfile.TemporaryDirectory() as folder:
        if args.replay:
            settings |= replayed(args.config, settings, cells, new_tokens, Path(folder))
        else:
            settings["synthetic_acceptance"] = tuple(args.acceptance)
        settings |= {"speculative_adaptive": False, "speculative_num_steps": max(args.depths)}
        caches: list[dict[str, str]] = [{"kv_cache_dtype": name} for name in args.kv_cache_dtypes]
        llms = [(LLM(args.config, **settings, **cache), cache) for cache in caches or [{}]]
    llm = llms[0][0]
    _write(args.json, environment(llm.config) | {"command": shlex.join(sys.argv)})
    if args.first_token:
        _write(args.json, first_token(llm, args.first_token, args.turns))
    peer = Transformers(llm) if args.transformers else None
    for context, batch_size in cells:
        for row in steps(llms, args.depths, batch_size, context, args.turns, peer):
            _write(args.json, row)
    for llm, _ in llms:
        llm.shutdown()


def prompts(llm: LLM, context: int, batch_size: int) -> list[list[int]]:
    """Return random prompts, the same ones in every process."""
    rng = random.Random(batch_size)
    vocabulary = range(llm.engine.tokenizer.vocab_size)
    return [rng.choices(vocabulary, k=context) for _ in range(batch_size)]


def replayed(
    config: str, settings: dict[str, Any], cells: list[tuple[int, int]], num_tokens: int, to: Path
) -> dict[str, Any]:
    """Save the target's own answers in folder `to`; return the settings that draft them.

    Then a round costs what its verification costs, and all drafts are accepted.
    """
    none = {"speculative_algorithm": "NONE", "speculative_draft_model_path": None}
    llm = LLM(config, **settings, **none)
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    path = to / "answers.jsonl"
    with path.open("w") as file:
        for context, batch_size in cells:
            ids = prompts(llm, context, batch_size)
            for prompt, output in zip(ids, llm.generate(ids, params), strict=True):
                answer = {"prompt_token_ids": prompt, "token_ids": list(output.token_ids)}
                file.write(json.dumps(answer) + "\n")
    llm.shutdown()
    return none | {"speculative_algorithm": "REPLAY", "speculative_replay_answers": str(path)}


class Transformers:
    """transformers' model of the target's shape on a CPU, in float32, with random weights."""

    def __init__(self, llm: LLM) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(llm.config.model.folder)
        self.model = AutoModelForCausalLM.from_config(config).float().eval()

    @torch.inference_mode()
    def token_ms(self, prompts: list[list[int]]) -> list[float]:
        """Return the times of the tokens of `TRIAL_STEPS` steps that are counted."""
        stamps: list[float] = []

        def note(ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
            stamps.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool)

        ids = torch.tensor(prompts)
        self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=TRIAL_STEPS,
            min_new_tokens=TRIAL_STEPS,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=[note],
        )
        times = [(end - start) * 1e3 for start, end in pairwise(stamps)]
        return times[NOT_COUNTED:]


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
    llms: list[tuple[LLM, dict[str, str]]],
    depths: list[int],
    batch_size: int,
    context: int,
    turns: int,
    peer: Transformers | None = None,
) -> list[dict[str, Any]]:
    """Return a row for each engine and depth: median, 10th and 90th percentile of the step time.

    llms: engines that take turns, and what their rows say of them. peer: takes turns with them;
    its row has no depth, but a name.
    """
    ids = prompts(llms[0][0], context, batch_size)
    num_tokens = turns * TRIAL_STEPS * (max(depths) + 1)
    sequences = [_start(llm, ids, num_tokens) for llm, _ in llms]
    variants = list(product(range(len(llms)), depths))
    times: dict[tuple[int, int], list[float]] = {variant: [] for variant in variants}
    emitted = dict.fromkeys(variants, 0)
    peers: list[float] = []
    for turn, variant in zip(range(turns * len(llms)), cycle(variants), strict=False):
        (llm, _), depth = llms[variant[0]], variant[1]
        _choose(llm, depth)
        for number in range(TRIAL_STEPS):
            start = time.perf_counter()
            deltas = llm.engine.step()
            if turn >= len(variants) and number >= NOT_COUNTED:
                times[variant].append((time.perf_counter() - start) * 1e3)
                emitted[variant] += sum(len(delta.token_ids) for delta in deltas)
        if peer is not None and variant == variants[-1]:
            peers += peer.token_ms(ids)
    for (llm, _), started in zip(llms, sequences, strict=True):
        for sequence in started:
            llm.engine.abort(sequence.request_id)
        while llm.engine.has_work:
            llm.engine.step()
    at = {"context": context, "batch_size": batch_size}
    rows = []
    for (index, depth), found in times.items():
        accept_length = emitted[index, depth] / len(found) / batch_size
        row = at | llms[index][1] | {"depth": depth, "accept_length": accept_length}
        rows.append(row | _spread(found))
    return rows + ([at | {"peer": "transformers"} | _spread(peers)] if peers else [])


def _start(llm: LLM, ids: list[list[int]], num_tokens: int) -> list[Sequence]:
    """Return requests with these prompts, once all decode; they end after `num_tokens`."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    sequences = []
    for index, prompt in enumerate(ids):
        sequences.append(llm.engine.new_sequence(f"{len(prompt)}-{index}", prompt, params))
        llm.engine.add(sequences[-1])
    _choose(llm, 0)
    while not all(sequence.is_decoding for sequence in sequences):
        llm.engine.step()
    return sequences


def _spread(times: list[float]) -> dict[str, float]:
    tenths = quantiles(times, n=10)
    return {
        "steps": len(times),
        "ms": median(times),
        "p10_ms": tenths[0],
        "p90_ms": tenths[-1],
    }


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
    parser.add_argument("--config", default="configs/tiny.yaml", help="configuration or model")
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
    kinds = "engines that take turns, each with another kv_cache_dtype, e.g. auto fp8"
    parser.add_argument("--kv-cache-dtypes", nargs="*", default=[], help=kinds)
    replay = "draft the target's own answers, saved before: no draft model, and all are accepted"
    parser.add_argument("--replay", action="store_true", help=replay)
    parser.add_argument(
        "--transformers", action="store_true", help="also time transformers' generate, on a CPU"
    )
    parser.add_argument("--page-size", type=int, default=16, help="tokens per page")
    parser.add_argument("--json", type=Path, help="file to append every row to (JSON lines)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
