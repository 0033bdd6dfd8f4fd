"""Write a small pair in the shape of a published model, as two small folders.

    python -m benchmarks.expand --target asset:tiny/target --draft asset:tiny/eagle3 \\
        --shape llama-3.1-8b --output-dir DIR
    PYTHONPATH=$PWD serve-spec bench offline --config DIR/expanded.yaml

DIR then holds target/ and eagle3/ (config, expansion, tokenizer; no weights) and expanded.yaml, a
configuration that runs them; `benchmarks` must be importable. The large weights are built at every
start, on their device. They compute what the small ones compute, at the cost of the large shape:
speeds are those of a real model of that shape, texts and accept lengths are the small pair's.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks import expansion
from benchmarks.expansion import Expansion
from serve_spec.config import ConfigError
from serve_spec.config.drafts import MTP_KEY
from serve_spec.core.errors import CheckpointError
from serve_spec.models.config import positive_integer, read_json
from serve_spec.models.drafts.base import DraftFile
from serve_spec.models.drafts.checkpoint import open_draft
from serve_spec.models.drafts.features import capture_layers
from serve_spec.models.family import read_shape
from serve_spec.models.loader import read_spec
from serve_spec.models.shape import NUM_IDS_KEY, DecoderShape

# Files of a target beside its config and weights.
_COMPANIONS = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("generation_config.json", "chat_template.jinja"),
)


# Sizes of published models, and the output rows of the EAGLE-3 heads made for them.
SHAPES = {
    "llama-3.1-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_layers": 32,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "draft_vocab_size": 32000,
    }
}


def sizes_of(name: str, base: DecoderShape) -> dict[str, int]:
    """Return sizes that give `base` the shape `name`, or raise CheckpointError."""
    wanted = SHAPES[name]
    hidden = wanted["hidden_size"] // base.hidden_size
    ffn = wanted["intermediate_size"] // base.intermediate_size
    reached = {
        "hidden_size": hidden * base.hidden_size,
        "num_heads": hidden * base.num_heads,
        "num_kv_heads": hidden * base.num_kv_heads,
        "head_dim": base.head_dim,
        "intermediate_size": ffn * base.intermediate_size,
    }
    for field, value in reached.items():
        if value != wanted[field]:
            raise CheckpointError(
                f"shape={name!r}: {field}={wanted[field]} is out of reach, copies of the "
                f"base give {value}; give factors instead of a shape, or another base"
            )
    kept = {key: wanted[key] for key in ("num_layers", "vocab_size", "draft_vocab_size")}
    return {"hidden_factor": hidden, "ffn_factor": ffn, **kept}


def expand_target(recipe: Expansion, directory: Path) -> None:
    """Write the expanded target: config, recipe, tokenizer. May raise CheckpointError."""
    source = expansion.find_base(recipe.base, Path.cwd())
    shape = read_shape(source)
    base = read_json(source / "config.json")
    for is_one, what in (
        (base.get("text_config"), "multimodal models"),
        (base.get(MTP_KEY), "models with drafts"),
        (read_spec(source).num_experts, "mixtures of experts"),
    ):
        if is_one:
            raise CheckpointError(f"{source}: {what} are not expanded; use another model")
    _check(recipe, shape.vocab_size)
    assert recipe.num_layers is not None, "a target has a number of layers"
    if recipe.num_layers < shape.num_layers:
        raise CheckpointError(
            f"num_layers={recipe.num_layers}: the base has {shape.num_layers}, and none can be "
            "left out; give at least as many"
        )
    config = _grown(base, recipe)
    config["num_hidden_layers"] = recipe.num_layers
    config["tie_word_embeddings"] = False
    if recipe.vocab_size > shape.vocab_size:
        config[NUM_IDS_KEY] = shape.num_ids or shape.vocab_size
    config |= _windows(shape, recipe.num_layers)
    _write(directory, config, replace(recipe, draft_vocab_size=None), source)
    for name in _COMPANIONS:
        if (source / name).exists():
            shutil.copyfile(source / name, directory / name)


def expand_draft(recipe: Expansion, target: DecoderShape, directory: Path) -> str:
    """Write the head `recipe.base`, made for a small `target`, expanded; return its family.

    Without `draft_vocab_size` an EAGLE-3 head gets as many more ids as the target.
    """
    source = expansion.find_base(recipe.base, Path.cwd())
    file = open_head(source)
    family = file.family
    for key, expected in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if positive_integer(file.config, key, target.vocab_size) != expected:
            why = f"{source}: {key}={file.config[key]}, but the target's is {expected}"
            raise CheckpointError(f"{why}; only heads as wide as their target can be expanded")
    rows = _draft_rows(file, target.vocab_size, recipe) if family == "EAGLE3" else None
    _check(recipe, target.vocab_size)
    assert recipe.num_layers is not None, "a target has a number of layers"
    config = _grown(file.config, recipe)
    config.pop("model", None)  # an early wrapping, already flat
    if family == "EAGLE3":
        config["draft_vocab_size"] = rows
        config["target_hidden_size"] = recipe.hidden_factor * target.hidden_size
        ids = file.setting("eagle_aux_hidden_state_layer_ids")
        # The first layer whose input is that of the small one's, as the output of the layer before:
        # this convention is the unambiguous one.
        config["eagle_aux_hidden_state_layer_ids"] = [
            -(-layer * recipe.num_layers // target.num_layers) - 1
            for layer in capture_layers(ids, target.num_layers)
        ]
    _write(directory, config, replace(recipe, num_layers=None, draft_vocab_size=rows), source)
    return family


def open_head(path: Path) -> DraftFile:
    """Open an EAGLE or EAGLE-3 head in the official layout, or raise CheckpointError."""
    file = open_draft(path)
    if file.family not in ("EAGLE", "EAGLE3"):
        why = f"of family {file.family} ({file.evidence})"
        raise file.refusal(why, "an EAGLE or EAGLE-3 head is needed here")
    if file.by_speculators:
        fix = "a head in the official layout is needed here"
        raise file.refusal("a speculators checkpoint", fix)
    return file


def _check(recipe: Expansion, vocab_size: int) -> None:
    expansion.check_noise(recipe.noise)
    for field in ("hidden_factor", "ffn_factor"):
        if getattr(recipe, field) < 1:
            number = getattr(recipe, field)
            raise CheckpointError(f"{field}={number}: give an integer from 1 on")
    if recipe.vocab_size < vocab_size:
        raise CheckpointError(
            f"vocab_size={recipe.vocab_size}: the base has {vocab_size} ids; give at least as many"
        )


def _draft_rows(file: DraftFile, vocab_size: int, size: Expansion) -> int:
    known = file.shapes["lm_head.weight"][0]
    most = known + size.vocab_size - vocab_size
    rows = most if size.draft_vocab_size is None else size.draft_vocab_size
    if not known <= rows <= most:
        raise CheckpointError(
            f"draft_vocab_size={rows}: the head has {known} ids, and {most} is "
            f"the most that vocab_size={size.vocab_size} has room for; give a number between"
        )
    return rows


def _grown(config: Mapping[str, Any], size: Expansion) -> dict[str, Any]:
    """Return `config` with larger sizes, those that targets and heads share."""
    factors = {
        "hidden_size": size.hidden_factor,
        "num_attention_heads": size.hidden_factor,
        "num_key_value_heads": size.hidden_factor,
        "intermediate_size": size.ffn_factor,
    }
    grown = {**config, "vocab_size": size.vocab_size}
    return grown | {key: config[key] * factor for key, factor in factors.items() if key in config}


def _windows(shape: DecoderShape, num_layers: int) -> dict[str, Any]:
    """Return the keys that give each of `num_layers` layers the window of the base's it copies."""
    if shape.sliding_window is None:
        return {"sliding_window": None, "use_sliding_window": False, "layer_types": None}
    windows = [
        shape.windows[place] for place, _ in expansion.added_layers(shape.num_layers, num_layers)
    ]
    return {
        "sliding_window": shape.sliding_window,
        "use_sliding_window": True,
        "layer_types": [f"{'sliding' if window else 'full'}_attention" for window in windows],
    }


def _write(directory: Path, config: Mapping[str, Any], recipe: Expansion, source: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    weights = [path.name for kind in ("*.safetensors", "*.bin") for path in directory.glob(kind)]
    if weights:
        raise CheckpointError(f"{directory} holds weights ({weights[0]}); give another folder")
    base = recipe.base if recipe.base.startswith("asset:") else str(source)
    written = asdict(replace(recipe, base=base))
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (directory / expansion.RECIPE_FILE).write_text(json.dumps(written, indent=1) + "\n")


_CONFIG_FILE = "expanded.yaml"

LOAD_FORMAT = f"{expansion.__name__}:{expansion.open_weights.__name__}"
"""Value of `model.load_format` with which serve_spec opens the folders."""


def main(argv: list[str]) -> int:
    """Write the folders and the configuration, and print their names; return the exit status."""
    args = _parser().parse_args(argv)
    try:
        print(write_pair(args))
    except (ConfigError, CheckpointError) as error:
        print(f"benchmarks.expand: {error}", file=sys.stderr)
        return 2
    return 0


def write_pair(args: argparse.Namespace) -> str:
    """Write the folders and the configuration; return their names and sizes.

    Raises ConfigError or CheckpointError: the arguments or the small pair do not allow it.
    """
    base = read_shape(expansion.find_base(args.target, Path.cwd()))
    sizes = _sizes(args, base)
    recipe = Expansion(args.target, noise=args.noise, seed=args.seed, **sizes)
    folder: Path = args.output_dir
    expand_target(recipe, folder / "target")
    drafts = {}
    for draft in args.draft:
        name = Path(draft.removeprefix("asset:")).name
        if name == "target" or name in drafts:
            raise ConfigError(f"draft={draft!r}: another folder is called {name!r}; rename one")
        drafts[name] = expand_draft(replace(recipe, base=draft), base, folder / name)
    config = folder / _CONFIG_FILE
    config.write_text(_config(args.shape or "expanded", drafts))
    shown = ", ".join(f"{key}={value}" for key, value in sizes.items())
    return f"{config}: {shown}; drafts: {', '.join(drafts) or 'none'}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.expand",
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


def _sizes(args: argparse.Namespace, base: DecoderShape) -> dict[str, Any]:
    """Return the sizes of the shape or of the factors; sizes not given stay as they are."""
    names = ("hidden_factor", "ffn_factor", "num_layers", "vocab_size", "draft_vocab_size")
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    if args.shape:
        if given:
            raise ConfigError(
                f"shape={args.shape!r} and {next(iter(given))}: give one or the other"
            )
        return sizes_of(args.shape, base)
    factor = given.get("hidden_factor", 1)
    return {
        "hidden_factor": factor,
        "ffn_factor": factor,
        "num_layers": base.num_layers,
        "vocab_size": base.vocab_size,
        "draft_vocab_size": None,
        **given,
    }


def _config(name: str, drafts: dict[str, str]) -> str:
    sections: dict[str, dict[str, Any]] = {
        "model": {"path": "target", "load_format": LOAD_FORMAT, "served_model_name": name}
    }
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
        "# Written by `python -m benchmarks.expand`: a small pair in a large shape. Texts and\n"
        "# accept lengths are the small pair's; the cost of a round is the large shape's.\n"
        + yaml.safe_dump(sections, sort_keys=False)
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
