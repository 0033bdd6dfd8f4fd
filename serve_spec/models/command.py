"""`serve-spec expand`: a small pair made as large as a published model, in two small folders.

    serve-spec expand --target asset:tiny/target --draft asset:tiny/eagle3 \\
        --shape llama-3.1-8b --output-dir DIR

DIR then holds target/ and eagle3/ (config, recipe, tokenizer; no weights) and expanded.yaml, a
configuration that runs them. The large weights are built where they run, at every start. They
compute what the small ones compute, at the cost of the large shape: speeds are those of a real
model of that shape, texts and accept lengths are the small pair's.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import yaml

from serve_spec.config import ConfigError
from serve_spec.models.expand import SHAPES, Size, expand_draft, expand_target, size_of
from serve_spec.models.expansion import find_base
from serve_spec.models.shape import ModelShape

_CONFIG_FILE = "expanded.yaml"


def main(argv: list[str]) -> int:
    """Writes the folders and the configuration; prints what they are."""
    args = _parser().parse_args(argv)
    base = ModelShape.from_directory(find_base(args.target, Path.cwd()))
    size = _size(args, base)
    how: dict[str, Any] = {"noise": args.noise, "seed": args.seed}
    folder: Path = args.output_dir
    expand_target(args.target, size, folder / "target", **how)
    drafts = {}
    for draft in args.draft:
        name = Path(draft.removeprefix("asset:")).name
        if name == "target" or name in drafts:
            raise ConfigError(f"draft={draft!r}: another folder is called {name!r}; rename one")
        drafts[name] = expand_draft(draft, base, size, folder / name, **how)
    config = folder / _CONFIG_FILE
    config.write_text(_config(args.shape or "expanded", drafts))
    print(f"{config}: {size}; drafts: {', '.join(drafts) or 'none'}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="serve-spec expand",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--target", required=True, help="folder of the small target, or 'asset:'")
    parser.add_argument("--draft", nargs="+", default=[], help="folders of its EAGLE heads")
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--shape", choices=sorted(SHAPES), help="a published model's")
    parser.add_argument("--hidden-factor", type=int, help="copies of hidden vectors and heads")
    parser.add_argument("--ffn-factor", type=int, help="copies of neurons (default: as hidden)")
    parser.add_argument("--layers", dest="num_layers", type=int, help="layers of the large target")
    parser.add_argument("--vocab-size", type=int, help="ids of the large target")
    parser.add_argument("--draft-vocab-size", type=int, help="ids an EAGLE-3 head draws from")
    parser.add_argument(
        "--noise", type=float, default=1.0, help="0: weights repeat; 1: they look like any others"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the noise")
    return parser


def _size(args: argparse.Namespace, base: ModelShape) -> Size:
    """The size of the shape, or of the factors; what is not given stays as it is."""
    choices = {
        "hidden_factor": args.hidden_factor,
        "ffn_factor": args.ffn_factor,
        "num_layers": args.num_layers,
        "vocab_size": args.vocab_size,
        "draft_vocab_size": args.draft_vocab_size,
    }
    given = {name: value for name, value in choices.items() if value is not None}
    if args.shape:
        if given:
            raise ConfigError(
                f"shape={args.shape!r} and {next(iter(given))}: give one or the other"
            )
        return size_of(args.shape, base)
    factor = given.get("hidden_factor", 1)
    same: dict[str, int] = {
        "hidden_factor": factor,
        "ffn_factor": factor,
        "num_layers": base.num_layers,
        "vocab_size": base.vocab_size,
    }
    return Size(**{**same, **given})


def _config(name: str, drafts: dict[str, str]) -> str:
    sections: dict[str, dict[str, Any]] = {"model": {"path": "target", "served_model_name": name}}
    if drafts:
        folder, family = next(iter(drafts.items()))
        sections["speculative"] = {
            "speculative_algorithm": family,
            "speculative_draft_model_path": folder,
            "speculative_num_steps": 3,
            "speculative_adaptive": True,
            "speculative_adaptive_strategy": "goodput",
        }
    return (
        "# Written by `serve-spec expand`: a small pair in a large shape. Texts and accept\n"
        "# lengths are the small pair's; the cost of a round is the large shape's.\n"
        + yaml.safe_dump(sections, sort_keys=False)
    )
