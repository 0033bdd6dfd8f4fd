"""`serve-spec generate`: complete prompts on the command line."""

from __future__ import annotations

import argparse
import sys

from serve_spec.core.request import SamplingParams
from serve_spec.engine.llm import LLM


def main(argv: list[str]) -> int:
    """Complete each prompt; print its text and speculation counts."""
    parser = argparse.ArgumentParser(prog="serve-spec generate", description=__doc__)
    parser.add_argument("prompts", nargs="+", help="one or more prompts")
    parser.add_argument("--config", default="configs/tiny.yaml", help="configuration file")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    llm = LLM(args.config)
    forced = llm.config.speculative.synthetic_acceptance
    if forced is not None:
        print(f"synthetic_acceptance={forced}: forced, the texts are not real", file=sys.stderr)
    params = SamplingParams(
        max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed
    )
    for prompt, output in zip(args.prompts, llm.generate(args.prompts, params), strict=True):
        print(prompt + output.text)
        stats = output.speculation
        print(
            f"[{len(output.token_ids)} tokens in {stats.num_rounds} rounds, "
            f"accept length {stats.accept_length:.2f}{' (forced)' if forced else ''}]\n"
        )
    return 0
