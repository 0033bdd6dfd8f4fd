"""Checkpoints of floats, packed as exporters of quantized ones do."""

import json
import math
import shutil

import torch

from serve_spec.models.weights import open_checkpoint
from tests.helpers.checkpoints import write_checkpoint

E4M3 = torch.float8_e4m3fn
BLOCK = (128, 128)
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def blocks(tensor, block):
    """Return rows and columns of a scale of blocks, repeated for every number of `tensor`."""
    rows, columns = (torch.arange(n) // size for n, size in zip(tensor.shape, block, strict=True))
    return rows[:, None], columns[None]


def fp8_blocks(weight, block=BLOCK, dtype=torch.float32):
    """Return numbers, scales [⌈N / rows⌉, ⌈K / columns⌉] of `dtype`, and what they stand for."""
    shape = [math.ceil(n / size) for n, size in zip(weight.shape, block, strict=True)]
    at = blocks(weight, block)
    flat = (at[0] * shape[1] + at[1]).flatten()
    largest = torch.zeros(math.prod(shape)).scatter_reduce(
        0, flat, weight.abs().float().flatten(), "amax"
    )
    scale = largest.view(shape).clamp(min=1e-12) / torch.finfo(E4M3).max
    if dtype == torch.float8_e8m0fnu:
        scale = 2.0 ** scale.log2().ceil()
    scale = scale.to(dtype)
    wide = scale.float()[at]
    values = (weight.float() / wide).clamp(-448, 448).to(E4M3)
    return values, scale, values.float() * wide


def fp8_rows(weight, dtype=torch.float32):
    """Return numbers, scales [N, 1], and what they stand for."""
    return fp8_blocks(weight, (1, weight.shape[1]), dtype)


def fp8_matrix(weight, shape=()):
    """Return numbers, one scale, and what they stand for."""
    values, scale, exact = fp8_blocks(weight, tuple(weight.shape))
    return values, scale.reshape(shape), exact


def int8_rows(weight):
    """Return integers, scales [N, 1], and what they stand for."""
    scale = weight.float().abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 127
    values = (weight.float() / scale).round().to(torch.int8)
    return values, scale, values.float() * scale


def compressed(weights, form="float-quantized", inputs=None, **more):
    """Return a `quantization_config` of llm-compressor with one group."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        **more,
    }


_DYNAMIC = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
_STATIC = {"num_bits": 8, "type": "float", "dynamic": False, "strategy": "tensor"}
_FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}
_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [*BLOCK]}

# By name: `quantization_config`, how a matrix is packed, and the names of its scales.
FORMATS = {
    "fp8 blocks": (_BLOCKS, fp8_blocks, "weight_scale_inv", None),
    "fp8 blocks bfloat16": (
        _BLOCKS,
        lambda weight: fp8_blocks(weight, dtype=torch.bfloat16),
        "weight_scale_inv",
        None,
    ),
    "fp8 blocks ue8m0": (
        {**_BLOCKS, "scale_fmt": "ue8m0"},
        lambda weight: fp8_blocks(weight, dtype=torch.float8_e8m0fnu),
        "weight_scale_inv",
        None,
    ),
    "fp8 static": (
        {
            "quant_method": "fp8",
            "activation_scheme": "static",
            "weight_block_size": None,
            "modules_to_not_convert": ["model.vision_tower", "lm_head"],
        },
        fp8_matrix,
        "weight_scale_inv",
        ("activation_scale", ()),
    ),
    "fp8 AutoFP8": (
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        fp8_matrix,
        "weight_scale",
        ("input_scale", ()),
    ),
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]},
        fp8_matrix,
        "weight_scale",
        ("input_scale", ()),
    ),
    "compressed rows": (
        compressed({**_FLOAT, "strategy": "channel"}, inputs=_DYNAMIC),
        lambda weight: fp8_rows(weight, torch.bfloat16),
        "weight_scale",
        None,
    ),
    "compressed static": (
        compressed({**_FLOAT, "strategy": "tensor"}, "naive-quantized", _STATIC),
        lambda weight: fp8_matrix(weight, (1,)),
        "weight_scale",
        ("input_scale", (1,)),
    ),
    "compressed blocks": (
        compressed({**_FLOAT, "strategy": "block", "block_structure": [*BLOCK]}, inputs=_DYNAMIC),
        fp8_blocks,
        "weight_scale",
        None,
    ),
    "compressed int8": (
        compressed({"num_bits": 8, "type": "int", "strategy": "channel"}, "int-quantized"),
        int8_rows,
        "weight_scale",
        None,
    ),
}


def pack(tensors, name, skipped=(), heads=()):
    """Return `tensors` packed as `FORMATS[name]` says, and the floats that they stand for.

    skipped: modules that stay floats. heads: further ones that do not.
    """
    _, packed, scale_name, inputs = FORMATS[name]
    stored, exact = dict(tensors), dict(tensors)
    for matrix, weight in tensors.items():
        module = matrix.removesuffix(".weight")
        is_chosen = module.split(".")[-1] in _PROJECTIONS or module in heads
        if not is_chosen or module in skipped or module == matrix:
            continue
        stored[matrix], stored[f"{module}.{scale_name}"], exact[matrix] = packed(weight)
        if inputs is not None:
            stored[f"{module}.{inputs[0]}"] = torch.full(inputs[1], 0.5)
    return stored, exact


def repack(source, folder, name, skipped=(), heads=(), **settings):
    """Write a checkpoint packed as `name`, and the floats it stands for; returns both folders.

    skipped, heads: see `pack`. settings: replace keys of `quantization_config`.
    """
    config = json.loads((source / "config.json").read_text())
    files = open_checkpoint(source)
    stored, exact = pack({each: files.read(each) for each in files.shapes}, name, skipped, heads)
    quantization = {**FORMATS[name][0], **settings}
    packed = write_checkpoint(
        folder / "packed", {**config, "quantization_config": quantization}, stored
    )
    floats = write_checkpoint(folder / "floats", config, exact)
    for path in source.glob("tokenizer*"):
        for copy in (packed, floats):
            shutil.copy(path, copy)
    return packed, floats
