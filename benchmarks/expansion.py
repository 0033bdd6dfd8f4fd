"""Synthetic up-scaling: a small checkpoint, widened and deepened while it is loaded.

A folder with `expansion.json` holds no weights. It names a base checkpoint and how to enlarge it;
every tensor is built on its device, so nothing large is stored. The large model computes what the
base computes (Net2Net, arXiv 1511.05641). serve_spec opens such folders, and stored checkpoints
beside them, with `model.load_format: benchmarks.expansion:open_weights`.

Width: every hidden vector is k copies of the small one's, [h, h, ..., h]. Heads and neurons are
repeated, and a matrix W becomes k column blocks whose sum is W, so that W_wide [h, ..., h] = W h.
Equal blocks W/k would make weights repeat, which changes the power draw and speed of tensor cores.
So pairs of blocks hold W/k + n and W/k - n with random n. All blocks are multiples, at most 256, of
a power of two, hence exact in bfloat16, and a bfloat16 W is their exact sum for every k.

Depth: added layers have the weights of their neighbours, and output projections that cancel. Ids
past the base's vocabulary have rows of their own and are never sampled (`serve_spec_num_ids`).

In float32 the texts are equal. In bfloat16 every copy of a hidden vector is rounded by itself.
Of 768 tokens of the shipped target, those with the argmax of float32: bfloat16 alone 98.3 %; eight
times as wide, 98.3 % without noise and 98.4 % with it (the default of `benchmarks.expand`).
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from serve_spec.config.base import ConfigError, Refusal, locate
from serve_spec.config.hub import checkpoint_folder
from serve_spec.core.errors import CheckpointError
from serve_spec.models.config import positive_integer, read_json
from serve_spec.models.gguf import open_gguf
from serve_spec.models.weights import BuiltFile, Checkpoint, open_checkpoint

# All integers up to this magnitude are exact in bfloat16.
_LARGEST = 256


@dataclass(frozen=True)
class Widening:
    """Growth of one tensor. The default changes nothing.

    A vector counts as a matrix of one row. `num_rows`: rows are added up to this many (the rows of
    a vocabulary). `row_factor`: then all rows are repeated. The columns consist of `num_blocks`
    equal parts (concatenated inputs), each repeated `column_factor` times: as blocks that sum to
    the original if `is_product`, else as plain copies.
    """

    num_rows: int | None = None
    row_factor: int = 1
    num_blocks: int = 1
    column_factor: int = 1
    is_product: bool = False

    def shape(self, small: tuple[int, ...]) -> tuple[int, ...]:
        """Return the wide shape of a tensor of shape `small`, [n] or [o, i]."""
        columns = small[-1] * self.column_factor
        rows = small[0] if self.num_rows is None else self.num_rows
        return (columns,) if len(small) == 1 else (rows * self.row_factor, columns)


def widen(
    small: Tensor,
    wide: Tensor,
    how: Widening,
    *,
    noise: float = 0.0,
    generator: torch.Generator | None = None,
    silent: bool = False,
) -> None:
    """Fill `wide` (contiguous, of `how.shape(small.shape)`) from `small`, in wide's dtype.

    noise: from 0 (equal blocks) to 1 (as much as fits), see `block_noise`; drawn from generator, on
    wide's device. silent: the blocks sum to zero instead of to `small`, and copies are zero.
    """
    matrix = small.to(device=wide.device, dtype=wide.dtype).reshape(-1, small.shape[-1])
    if how.num_rows is not None:
        # Rows after the first ones are as large as real rows, and independent of them.
        num_pages = -(-how.num_rows // matrix.shape[0])
        matrix = torch.cat([matrix.roll(page, dims=1) for page in range(num_pages)])[: how.num_rows]
    width = matrix.shape[1] // how.num_blocks
    parts = matrix.view(matrix.shape[0], how.num_blocks, width)
    copies = wide.view(how.row_factor, *parts.shape[:2], how.column_factor, width)
    if not how.is_product or how.column_factor == 1:
        copies.copy_(parts.unsqueeze(2).mul(not silent))
    elif not noise:
        copies.copy_(parts.unsqueeze(2).mul(0.0 if silent else 1.0 / how.column_factor))
    else:
        _fill_blocks(copies, parts, noise, generator, silent)


def block_noise(num_blocks: int, noise: float) -> tuple[int, int]:
    """Return (fineness, amplitude) of the noise in blocks that sum to a weight w.

    Blocks are multiples of u = 2^-fineness units in the last place of w (as a bfloat16), and the
    noise is uniform over the multiples in [-amplitude, amplitude]. At noise 1 the largest block
    just reaches 256 u. For 8 blocks its standard deviation is 0.07 to 0.14 of |w|, about as much as
    the equal parts w/8; the rounding errors this adds in bfloat16 are negligible.
    """
    fineness = num_blocks.bit_length() - 2
    part = _LARGEST * 2**fineness / num_blocks
    room = _LARGEST - part - num_blocks / 2
    return fineness, int(noise * room)


def _fill_blocks(
    copies: Tensor, parts: Tensor, noise: float, generator: torch.Generator | None, silent: bool
) -> None:
    """Fill blocks [r, o, n, k, i] that sum over k to `parts` [o, n, i], or to zero if silent."""
    num_blocks = copies.shape[3]
    fineness, amplitude = block_noise(num_blocks, noise)
    wide_type = torch.promote_types(copies.dtype, torch.float32)
    total = parts.to(wide_type)
    unit = _last_place(total) * 2.0**-fineness
    part = (total / (unit * num_blocks)).round() * unit
    if silent:
        part, total = torch.zeros_like(part), torch.zeros_like(total)
    drawn = torch.zeros((), dtype=wide_type, device=copies.device)
    for block in range(num_blocks):
        is_last = block == num_blocks - 1
        plain = total - part * (num_blocks - 1) if is_last else part
        if block % 2:
            drawn = -drawn
        elif is_last:
            drawn = torch.zeros_like(drawn)
        else:
            drawn = torch.randint(
                -amplitude, amplitude + 1, copies[:, :, :, 0].shape,
                generator=generator, dtype=wide_type, device=copies.device,
            ).mul_(unit)  # fmt: skip
        copies[:, :, :, block] = plain + drawn


def _last_place(values: Tensor) -> Tensor:
    """Return units in the last place of `values` as bfloat16, at least 2^-100.

    Taken from the bits: powers of two from a device's `pow` need not be exact.
    """
    exponents = values.float().view(torch.int32).bitwise_and(0x7F800000).view(torch.float32)
    return (exponents * 2.0**-7).clamp_min(2.0**-100).to(values.dtype)


RECIPE_FILE = "expansion.json"

_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
# The outputs of an added layer, which cancel.
_SILENCED = re.compile(r"(o_proj|down_proj)\.(weight|bias)$")


@dataclass(frozen=True)
class Expansion:
    """Growth of a base checkpoint; the content of `expansion.json`.

    `base`: a folder, absolute, relative to the recipe's own, or `asset:` package data.
    `hidden_factor`: copies of every hidden vector, and of all heads. `ffn_factor`: copies of every
    feed-forward neuron. `num_layers`: layers of a target; None for a draft head, which keeps its
    own. `vocab_size`: rows of the target's embedding and head. `draft_vocab_size`: rows of a draft
    head's own lm_head, if any. `noise`, from 0 to 1, and `seed`: see `widen`.
    """

    base: str
    hidden_factor: int
    ffn_factor: int
    num_layers: int | None
    vocab_size: int
    draft_vocab_size: int | None
    noise: float
    seed: int

    @staticmethod
    def read(directory: Path) -> Expansion:
        """Return the recipe in `directory`; raise CheckpointError for a wrong key or value."""
        path = directory / RECIPE_FILE
        content = read_json(path)
        names = {field.name for field in fields(Expansion)}
        if set(content) != names:
            wrong = sorted(set(content) ^ names)
            raise CheckpointError(f"{path}: keys {wrong} are unknown or missing; write it again")
        optional = {"num_layers", "draft_vocab_size"}
        for name in names - {"base", "noise", "seed"}:
            if name not in optional or content[name] is not None:
                positive_integer(content, name)
        check_noise(content["noise"])
        if not isinstance(content["base"], str) or type(content["seed"]) is not int:
            raise CheckpointError(
                f"{path}: base must be a string and seed an integer; write it again"
            )
        return Expansion(**content)


def check_noise(noise: Any) -> None:
    """Raise CheckpointError unless `noise` is a number from 0 to 1."""
    if isinstance(noise, bool) or not isinstance(noise, int | float) or not 0 <= noise <= 1:
        raise CheckpointError(f"noise={noise!r}: give a number from 0 (equal blocks) to 1")


def open_weights(directory: Path) -> Checkpoint:
    """Open stored weights or an expansion; read no weight. Raise CheckpointError if that fails."""
    if not (directory / RECIPE_FILE).exists():
        return open_checkpoint(directory)
    return Checkpoint([_ExpandedFile(directory, Expansion.read(directory))], directory)


def find_base(base: str, folder: Path) -> Path:
    """Return the folder of `base`, relative to `folder`; CheckpointError if it is not one."""
    try:
        found = checkpoint_folder("base", str(locate("base", base, folder)))
    except (Refusal, ConfigError) as error:
        raise CheckpointError(str(error)) from error
    if (found / RECIPE_FILE).exists():
        raise CheckpointError(
            f"base={base!r}: is an expansion itself; expand the checkpoint that it names"
        )
    return found


def added_layers(num_layers: int, wanted: int) -> list[tuple[int, bool]]:
    """Return (layer of the base, whether it was added) for each of `wanted` layers.

    Added layers are spread evenly, and each is a copy of the one before. 2 to 5: 0, 0 added,
    0 added, 1, 1 added.
    """
    places = [index * num_layers // wanted for index in range(wanted)]
    return [(place, index > 0 and places[index - 1] == place) for index, place in enumerate(places)]


class _ExpandedFile(BuiltFile):
    """The tensors of an expansion, each built on demand."""

    def __init__(self, directory: Path, recipe: Expansion) -> None:
        self.path = directory / RECIPE_FILE
        self._recipe = recipe
        folder = find_base(recipe.base, directory)
        self._config = read_json(folder / "config.json")
        self._base = open_gguf(folder) or open_checkpoint(folder)
        is_draft = recipe.num_layers is None
        self._silent: set[str] = set()  # outputs of added layers
        kept = {name: name for name in self._base.shapes if name not in ("d2t", "t2d")}
        self._sources = kept if is_draft else self._target_sources()
        self._maps = self._id_maps() if is_draft else {}
        width = positive_integer(self._config, "hidden_size")
        self._how: dict[str, Widening] = {}
        self.shapes = {name: tuple(ids.shape) for name, ids in self._maps.items()}
        for name, source in self._sources.items():
            small = self._base.shapes[source]
            self._how[name] = how = _widening(name, small, recipe, width)
            self.shapes[name] = how.shape(small)

    def read(self, name: str) -> Tensor:
        if name in self._maps:
            return self._maps[name]
        dtype = self._base.read(self._sources[name]).dtype
        tensor = torch.empty(self.shapes[name], dtype=dtype)
        self.copy_into(name, tensor)
        return tensor

    def copy_into(self, name: str, destination: Tensor) -> None:
        seed = self._recipe.seed + zlib.crc32(name.encode())
        source = self._sources[name]
        small = destination.new_empty(self._base.shapes[source])
        self._base.copy_into(source, small)
        widen(
            small,
            destination,
            self._how[name],
            noise=self._recipe.noise,
            generator=torch.Generator(destination.device).manual_seed(seed),
            silent=name in self._silent,
        )

    def _target_sources(self) -> dict[str, str]:
        assert self._recipe.num_layers is not None, "a target's expansion has a number of layers"
        names = self._base.shapes
        layers = added_layers(
            positive_integer(self._config, "num_hidden_layers"), self._recipe.num_layers
        )
        sources = {name: name for name in names if not _LAYER.match(name)}
        # The scales of embedding and head differ, so they cannot stay tied.
        sources.setdefault("lm_head.weight", "model.embed_tokens.weight")
        for index, (base_layer, is_added) in enumerate(layers):
            prefix = f"model.layers.{base_layer}."
            for name in names:
                if name.startswith(prefix):
                    wide_name = f"model.layers.{index}.{name.removeprefix(prefix)}"
                    sources[wide_name] = name
                    if is_added and _SILENCED.search(name):
                        self._silent.add(wide_name)
        return sources

    def _id_maps(self) -> dict[str, Tensor]:
        """Return `d2t` and `t2d` of a draft head with a smaller vocabulary than the target's.

        Added draft ids map to the first added target ids; neither is ever sampled.
        """
        vocab, rows = self._recipe.vocab_size, self._recipe.draft_vocab_size
        head = self._base.shapes.get("lm_head.weight")
        if rows is None or head is None:
            return {}
        known, first_added = head[0], positive_integer(self._config, "vocab_size")
        if rows - known > vocab - first_added:
            raise CheckpointError(
                f"draft_vocab_size={rows} adds {rows - known} draft ids, but vocab_size={vocab} "
                f"adds only {vocab - first_added} ids that they could stand for; lower it"
            )
        if rows == vocab:
            return {}
        offsets = torch.full((rows,), first_added - known)
        offsets[:known] = self._base.read("d2t") if "d2t" in self._base else 0
        reached = torch.zeros(vocab, dtype=torch.bool)
        reached[torch.arange(rows) + offsets] = True
        return {"d2t": offsets, "t2d": reached}


def _widening(name: str, small: tuple[int, ...], recipe: Expansion, width: int) -> Widening:
    """Return the growth of the tensor called `name`; `width` is the base's hidden size."""
    hidden, ffn = recipe.hidden_factor, recipe.ffn_factor
    if name.endswith("embed_tokens.weight"):
        return Widening(num_rows=recipe.vocab_size, column_factor=hidden)
    if name.endswith("lm_head.weight"):
        rows = recipe.draft_vocab_size or recipe.vocab_size
        return Widening(num_rows=rows, column_factor=hidden, is_product=True)
    if name.endswith(("q_norm.weight", "k_norm.weight", "rotary_emb.inv_freq")):
        return Widening()
    if re.search(r"norm[\w.]*\.weight$", name):
        return Widening(num_blocks=small[0] // width, column_factor=hidden)
    if bias := re.search(r"([qkvo]|gate|up|down|)(_proj|fc)\.bias$", name):
        return Widening(column_factor=ffn if bias[1] in ("gate", "up") else hidden)
    if name.endswith("o_proj.weight"):
        return Widening(row_factor=hidden, column_factor=hidden, is_product=True)
    if name.endswith("down_proj.weight"):
        return Widening(row_factor=hidden, column_factor=ffn, is_product=True)
    if name.endswith(("gate_proj.weight", "up_proj.weight")):
        return Widening(row_factor=ffn, column_factor=hidden, is_product=True)
    if re.search(r"([qkv]_proj|fc)\.weight$", name):
        blocks = small[1] // width
        return Widening(row_factor=hidden, num_blocks=blocks, column_factor=hidden, is_product=True)
    raise CheckpointError(f"tensor {name}: has no rule of expansion; use a base with known tensors")
