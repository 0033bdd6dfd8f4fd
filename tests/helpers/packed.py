"""Checkpoints of floats, packed in four bits as exporters of each kind do."""

import json
from shutil import copy

import torch

from serve_spec.models.weights import open_checkpoint
from tests.helpers.checkpoints import write_checkpoint

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words(codes, order=range(8)):
    """Return [A, B] of 0 to 15 as int32 [A, B / 8]: bits 4·i of a word hold column `order[i]`."""
    eights = codes.long().unflatten(1, (-1, 8))
    total = sum(eights[:, :, column] << 4 * place for place, column in enumerate(order))
    return torch.where(total < 2**31, total, total - 2**32).int()


def quantize(weight, size, symmetric, seed):
    """Return codes [N, K], scale [N, G], zeros [N, G] and g_idx [K] of random order if `seed`."""
    columns = weight.shape[1]
    size = columns if size == -1 else size
    group = torch.arange(columns) // size
    if seed is not None:
        group = group[torch.randperm(columns, generator=torch.Generator().manual_seed(seed))]
    order = group.argsort(stable=True)
    groups = weight.float()[:, order].unflatten(1, (-1, size))
    if symmetric:
        scale = groups.abs().amax(dim=2) / 7
        zeros = torch.full_like(scale, 8)
    else:
        low, high = groups.amin(dim=2).clamp(max=0), groups.amax(dim=2).clamp(min=0)
        scale = (high - low) / 15
        zeros = (-low / scale.clamp(min=1e-8)).round().clamp(1, 15)
    scale = scale.clamp(min=1e-4).half().float()
    codes = (weight.float() / scale[:, group] + zeros[:, group]).round().clamp(0, 15)
    exact = (codes - zeros[:, group]) * scale[:, group]
    return codes, scale, zeros, group.int(), exact


def pack_awq(weight, size=32, seed=None):
    codes, scale, zeros, _, exact = quantize(weight, size, False, seed)
    return {
        "qweight": words(codes.T, _AWQ_ORDER),
        "qzeros": words(zeros.T, _AWQ_ORDER),
        "scales": scale.T.half(),
    }, exact


def pack_gptq(weight, size=32, symmetric=True, offset=1, seed=None):
    codes, scale, zeros, group, exact = quantize(weight, size, symmetric, seed)
    return {
        "qweight": words(codes).T,
        "qzeros": words(zeros.T - offset),
        "scales": scale.T.half(),
        "g_idx": group,
    }, exact


def pack_compressed(weight, size=32, symmetric=True, seed=None):
    codes, scale, zeros, group, exact = quantize(weight, size, symmetric, seed)
    stored = {
        "weight_packed": words(codes),
        "weight_scale": scale.half(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        stored["weight_zero_point"] = words(zeros.T).T
    if seed is not None:
        stored["weight_g_idx"] = group
    return stored, exact


def awq(size=32, **more):
    return {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True,
            "version": "gemm", **more}  # fmt: skip


def gptq(size=32, **more):
    return {"quant_method": "gptq", "bits": 4, "group_size": size, "sym": True,
            "desc_act": False, **more}  # fmt: skip


def compressed(size=32, **weights):
    args = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": size, **weights}
    if size == -1:
        args |= {"strategy": "channel", "group_size": None}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": args}}}  # fmt: skip


# By name: how a matrix is packed, its keywords, and `quantization_config`.
FORMATS = {
    "awq": (pack_awq, {}, awq()),
    "awq 64": (pack_awq, {"size": 64}, awq(64)),
    "awq rows": (pack_awq, {"size": -1}, awq(-1)),
    "gptq": (pack_gptq, {}, gptq()),
    "gptq v2": (
        pack_gptq,
        {"symmetric": False, "offset": 0},
        gptq(checkpoint_format="gptq_v2", sym=False),
    ),
    "gptq asymmetric": (pack_gptq, {"symmetric": False}, gptq(sym=False)),
    "gptq rows": (pack_gptq, {"size": -1}, gptq(-1)),
    "gptq ordered": (pack_gptq, {"seed": 0}, gptq(desc_act=True)),
    "compressed": (pack_compressed, {}, compressed()),
    "compressed rows": (pack_compressed, {"size": -1}, compressed(-1)),
    "compressed asymmetric": (
        pack_compressed,
        {"symmetric": False, "size": 64},
        compressed(64, symmetric=False),
    ),
    "compressed ordered": (
        pack_compressed,
        {"symmetric": False, "seed": 0},
        compressed(symmetric=False, actorder="group"),
    ),
}
ORDERED = [name for name in FORMATS if "ordered" in name]


def pack(tensors, name, skipped=()):
    """Return tensors packed as `FORMATS[name]` says, and the floats that they stand for.

    skipped: names of matrices that stay floats, beside those that are no projection.
    """
    packed, keywords, _ = FORMATS[name]
    stored, exact = dict(tensors), dict(tensors)
    for matrix, weight in tensors.items():
        module = matrix.removesuffix(".weight")
        last = module.split(".")[-1]
        if module == matrix or last not in PROJECTIONS or last in skipped:
            continue
        del stored[matrix]
        own, exact[matrix] = packed(weight, **keywords)
        stored |= {f"{module}.{key}": tensor for key, tensor in own.items()}
    return stored, exact


def repack(source, folder, name, skipped=(), **settings):
    """Write a checkpoint packed as `name`, and the floats it stands for; returns both folders.

    settings: replace keys of `quantization_config`.
    """
    config, file = json.loads((source / "config.json").read_text()), open_checkpoint(source)
    tensors = {name: file.read(name) for name in file.shapes}
    stored, exact = pack(tensors, name, skipped)
    quantization = {**FORMATS[name][2], **settings}
    settings = {**config, "quantization_config": quantization}
    folders = (
        write_checkpoint(folder / "packed", settings, stored),
        write_checkpoint(folder / "floats", config, exact),
    )
    for tokenizer in source.glob("tokenizer*"):
        for each in folders:
            copy(tokenizer, each)
    return folders
