"""GGUF files as folders of checkpoints in the Hugging Face format.

The metadata of a file becomes `config.json`, `tokenizer.json` and so on in a folder of the cache,
which links to the file. `gguf.json` lists its tensors, for `models/gguf.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from serve_spec.config import gguf_tokenizer
from serve_spec.config.cache import cache_folder

SUFFIX = ".gguf"
INDEX = "gguf.json"
"""File of a folder that `gguf_folder` made: `architecture`, and `tensors` by name."""

ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
"""Architecture and model type in `config.json` by general.architecture."""

_SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
}
# Keys of what no supported architecture computes, unless they have this value.
_NEUTRAL = {
    "expert_count": 0,
    "rope.scale_linear": 1.0,
    "attention.scale": 0.0,
    "attention.sliding_window": 0,
    "logit_scale": 1.0,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
}
_ROPE_FACTORS = "rope_freqs.weight"
_EMBEDDING = "token_embd.weight"
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_AGAIN = "fetch it again"


class GGUFError(ValueError):
    """Why a GGUF file cannot be served, and what to do."""


@dataclass(frozen=True)
class _Content:
    """Metadata of the first file of a model, and the tensors of all of them."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, dict[str, Any]]
    rope_factors: list[float] | None


def find_gguf(path: Path) -> list[Path]:
    """Return the files of the GGUF model in `path`, a file or folder; none without one.

    A folder with other weights is no GGUF model, whatever else it holds.
    Raises GGUFError: several models, or shards are missing.
    """
    if path.is_file():
        return _with_shards(path)
    others = ("*.safetensors", "*.bin", "*.index.json", INDEX)
    files = sorted(path.glob(f"*{SUFFIX}"))
    if not files or any(any(path.glob(pattern)) for pattern in others):
        return []
    return _with_shards(path / only_model(file.name for file in files))


def only_model(names: Iterable[str]) -> str:
    """Return the name of the model, or of its first shard; raise GGUFError if there are several."""
    # Files that extend a model to images lie beside it.
    models = [name for name in sorted(names) if not name.rpartition("/")[2].startswith("mmproj")]
    firsts = [
        name for name in models if not (shard := _SHARD.fullmatch(name)) or int(shard[2]) == 1
    ]
    if len(firsts) == 1:
        return firsts[0]
    if not firsts:
        raise GGUFError(f"no GGUF file of a whole model or a first shard; {_AGAIN}")
    raise GGUFError(f"several GGUF files ({', '.join(firsts)}); name one (hub: ORG/NAME:FILE)")


def named_models(names: Sequence[str], variant: str) -> list[str]:
    """Return the models that `variant` may mean: a file, or the end of its name, such as Q4_K_M."""
    end = re.compile(rf"(.*[-._/])?{re.escape(variant)}", re.IGNORECASE)
    found = []
    for name in names:
        shard = _SHARD.fullmatch(name)
        stem = name.removesuffix(SUFFIX) if shard is None else shard[1]
        if variant == name or end.fullmatch(stem):
            found.append(name)
    if not found:
        raise GGUFError(f"no GGUF file {variant!r}; there are {', '.join(sorted(names)) or 'none'}")
    return found


def shard_names(name: str) -> list[str]:
    """Return the names of all shards of the model of which `name` is one; itself if it has none."""
    shard = _SHARD.fullmatch(name)
    if shard is None:
        return [name]
    count = int(shard[3])
    return [f"{shard[1]}-{each:05}-of-{count:05}{SUFFIX}" for each in range(1, count + 1)]


def _with_shards(file: Path) -> list[Path]:
    files = [file.with_name(name) for name in shard_names(file.name)]
    absent = [each.name for each in files if not each.is_file()]
    if absent:
        shown = ", ".join(absent[:3]) + (", ..." if absent[3:] else "")
        raise GGUFError(f"{file.parent} lacks {len(absent)} of {len(files)} shards ({shown})")
    return files


def gguf_folder(files: Sequence[Path]) -> Path:
    """Return the folder of a model in the cache, which is made if the cache lacks it.

    files: of one model, the first one with the metadata.
    Raises GGUFError: the model cannot be served, or the cache cannot be written.
    """
    if find_spec("gguf") is None:  # it reads the matrices, too
        raise GGUFError("reading GGUF needs a package; run `pip install gguf`")
    name = files[0].name.removesuffix(SUFFIX)
    folder = cache_folder() / "gguf" / f"{name}-{_key(files)}"
    if (folder / INDEX).is_file():
        return folder
    contents = _folder_contents(files)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=folder.parent))
        for name, content in contents.items():
            (made / name).write_text(json.dumps(content), encoding="utf-8")
        for file in files:
            (made / file.name).symlink_to(file.resolve())
        try:
            made.rename(folder)
        except OSError:
            shutil.rmtree(made)
            if not (folder / INDEX).is_file():  # else another process was faster
                raise
    except OSError as error:
        raise GGUFError(f"no folder for its metadata: {error}; set SERVE_SPEC_CACHE") from error
    return folder


def _key(files: Sequence[Path]) -> str:
    """Return a hash of files, by place, size and time, and of the code that reads them."""
    parts = [Path(__file__).read_bytes(), Path(gguf_tokenizer.__file__).read_bytes()]
    for file in files:
        stat = os.stat(file)
        parts.append(f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode())
    return hashlib.sha256(b"\n".join(parts)).hexdigest()[:12]


def _folder_contents(files: Sequence[Path]) -> dict[str, Any]:
    content = _read(files)
    config = _config(content)
    try:
        tokenizer, settings = gguf_tokenizer.tokenizer_files(content.metadata)
    except gguf_tokenizer.UnsupportedTokenizer as error:
        raise GGUFError(str(error)) from None
    return {
        "config.json": config,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": settings,
        INDEX: {
            "architecture": content.metadata["general.architecture"],
            "tensors": content.tensors,
        },
    }


def _read(files: Sequence[Path]) -> _Content:
    """Return metadata and tensors, without the contents of matrices; raise GGUFError."""
    import gguf

    metadata: dict[str, Any] = {}
    tensors: dict[str, dict[str, Any]] = {}
    rope_factors = None
    for file in files:
        try:
            reader = gguf.GGUFReader(file)
            if not metadata:
                metadata = {name: field.contents() for name, field in reader.fields.items()}
        # The reader checks no bounds.
        except (ValueError, LookupError, OverflowError, OSError, TypeError) as error:
            if "GGMLQuantizationType" in str(error):
                fix = "upgrade it (`pip install -U gguf`), or use another quantization"
                why = f"{file.name}: package gguf does not know a type of its tensors ({error})"
                raise GGUFError(f"{why}; {fix}") from error
            what = f"{file.name} is damaged or cut short ({error})"
            raise GGUFError(f"{what}; {_AGAIN}") from error
        for tensor in reader.tensors:
            if tensor.name in tensors:
                raise GGUFError(f"tensor {tensor.name} is in two shards; remove the stale file")
            if tensor.name == _ROPE_FACTORS:
                rope_factors = [float(value) for value in tensor.data.ravel()]
                continue
            kind = tensor.tensor_type
            if not _is_dequantized(kind):
                what = f"tensor {tensor.name} is of type {kind.name}, which is not supported"
                raise GGUFError(f"{what}; use another quantization")
            tensors[tensor.name] = {
                "file": file.name,
                "type": kind.name,
                "shape": [int(size) for size in reversed(tensor.shape)],
                "offset": int(tensor.data_offset),
                "bytes": int(tensor.n_bytes),
            }
    return _Content(metadata, tensors, rope_factors)


def _is_dequantized(kind: Any) -> bool:
    """Return whether the package can make floats of numbers of this type."""
    import gguf
    import numpy as np

    block = np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    try:
        gguf.dequantize(block, kind)
    except NotImplementedError:
        return False
    return True


def _config(content: _Content) -> dict[str, Any]:
    """Return a model's `config.json`; raise GGUFError for what is not computed."""
    metadata, tensors = content.metadata, content.tensors
    name = metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        why = f"general.architecture={name!r}: not supported"
        raise GGUFError(f"{why}; the supported architectures are {known}")
    if not tensors:
        raise GGUFError("it holds a vocabulary and no weights; give the file of the model")
    own = {
        key.removeprefix(f"{name}."): value
        for key, value in metadata.items()
        if key.startswith(f"{name}.")
    }
    for key, neutral in _NEUTRAL.items():
        if own.get(key, neutral) != neutral:
            raise GGUFError(f"{name}.{key}={own[key]!r}: not supported; use another model")
    if missing := [f"{name}.{key}" for key in _SIZES.values() if key not in own]:
        raise GGUFError(f"its metadata lacks {', '.join(missing)}; {_AGAIN}")
    if _EMBEDDING not in tensors:
        raise GGUFError(f"tensor {_EMBEDDING} is missing; {_AGAIN}")
    architecture, model_type = ARCHITECTURES[name]
    sizes = {key: own[stored] for key, stored in _SIZES.items()}
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_act": "silu",
        **sizes,
        "num_key_value_heads": own.get("attention.head_count_kv", sizes["num_attention_heads"]),
        "head_dim": _head_dim(name, own, sizes),
        "vocab_size": tensors[_EMBEDDING]["shape"][0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "rope_theta": own.get("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(name, own, content.rope_factors),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": gguf_tokenizer.stop_tokens(metadata),
    }


def _head_dim(name: str, own: Mapping[str, Any], sizes: Mapping[str, Any]) -> int:
    try:
        implied = sizes["hidden_size"] // sizes["num_attention_heads"]
    except (TypeError, ZeroDivisionError):
        heads = sizes["num_attention_heads"]
        raise GGUFError(f"{name}.attention.head_count={heads!r}: not supported") from None
    head_dim: int = own.get("attention.key_length", implied)
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.get(key, head_dim) != head_dim:
            why = f"{name}.{key}={own[key]!r} for heads of {head_dim}: not supported"
            raise GGUFError(f"{why}; use another model")
    return head_dim


def _rope_scaling(
    name: str, own: Mapping[str, Any], factors: list[float] | None
) -> dict[str, Any] | None:
    """Return how positions are scaled; `factors` divide the frequencies, as in Llama 3.1."""
    kind = own.get("rope.scaling.type", "none")
    factor = own.get("rope.scaling.factor", 1.0)
    original = own.get("rope.scaling.original_context_length") or own["context_length"]
    if kind not in ("none", "linear", "yarn") or (kind != "none" and factors):
        why = f"{name}.rope.scaling.type={kind!r}" + (f" and {_ROPE_FACTORS}" if factors else "")
        raise GGUFError(f"{why}: not supported; use another model")
    if factors:
        return {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": original,
        }
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": factor}
    return scaling | ({"original_max_position_embeddings": original} if kind == "yarn" else {})
