"""Tiny GGUF files of the checkpoints that `tests/helpers/checkpoints.py` writes."""

import json
import zlib

import gguf
import numpy as np
import torch
from safetensors.numpy import load_file

from tests.helpers.checkpoints import BOS_ID, EOS_ID

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
NORMAL, CONTROL, UNUSED = 1, 3, 5


def write_gguf(path, folder, kind="F32", shards=1, leave_out=(), rope_factors=None, **metadata):
    """Write a checkpoint's folder as GGUF, as llama.cpp converts it; returns the first file.

    kind: type of the matrices, or a function from a name in the file to it; vectors are F32. Of
    types that the package cannot write blocks are random. leave_out: tensors, by their names there.
    metadata: values by key, with `__` for dots; None leaves one out.
    """
    config = json.loads((folder / "config.json").read_text())
    arch = {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    tensors = {
        _stored(name): _interleaved(name, tensor, config) if arch == "llama" else tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    if rope_factors is not None:
        tensors["rope_freqs.weight"] = np.array(rope_factors, dtype=np.float32)
    values = _metadata(config, arch) | tokenizer_metadata(folder)
    changes = {key.replace("__", "."): value for key, value in metadata.items()}
    parts = np.array_split([name for name in tensors if name not in leave_out], shards)
    paths = [path] if shards == 1 else [_shard(path, i, shards) for i in range(shards)]
    for index, (file, names) in enumerate(zip(paths, parts, strict=True)):
        own = values | changes if index == 0 else {"split.no": index}
        _write(file, arch, own, {str(name): tensors[name] for name in names}, kind)
    return paths[0]


def tokenizer_metadata(folder):
    """Return the metadata of a folder's byte-level tokenizer and chat template."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    added = {each["content"]: each["id"] for each in tokenizer["added_tokens"]}
    ids = {**tokenizer["model"]["vocab"], **added}
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    tokens = sorted(ids, key=ids.get)
    kinds = [CONTROL if each in added else NORMAL for each in tokens]
    # The helper's vocabulary has no merges, which every file has.
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*tokens, "th", "[PAD260]"],
        "tokenizer.ggml.token_type": [*kinds, NORMAL, UNUSED],
        "tokenizer.ggml.merges": ["t h"],
        "tokenizer.ggml.bos_token_id": BOS_ID,
        "tokenizer.ggml.eos_token_id": EOS_ID,
        "tokenizer.chat_template": settings["chat_template"],
    }


def _metadata(config, arch):
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    own = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
        "rope.freq_base": config["rope_theta"],
        "vocab_size": config["vocab_size"],
    }
    return {f"{arch}.{key}": value for key, value in own.items()}


def _stored(name):
    stem, _, end = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{_NAMES[stem]}.{end}"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_NAMES[part]}.{end}"


def _interleaved(name, tensor, config):
    """Return the rows of q and k in the order in which neighbours rotate."""
    heads = {
        "q_proj": config["num_attention_heads"],
        "k_proj": config["num_key_value_heads"],
    }.get(name.split(".")[-2])
    if heads is None:
        return tensor
    halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(tensor.shape)


# Where types that the package cannot write have factors in float16, and which they are.
_FACTORS = {"Q4_K": ((0, 2.0**-11), (2, 2.0**-9)), "Q6_K": ((208, 2.0**-13),)}


def blocks_of(tensor, kind):
    """Return a matrix as bytes [N, bytes] of a type, or random ones of about its size."""
    if kind.name not in _FACTORS:
        return gguf.quantize(tensor, kind)
    columns, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    shape = tensor.shape[0], tensor.shape[1] // columns, num_bytes
    random = np.random.default_rng(zlib.crc32(tensor.tobytes()))
    blocks = random.integers(0, 256, shape, dtype=np.uint8)
    for place, factor in _FACTORS[kind.name]:
        factors = factor * tensor.std() * random.uniform(0.5, 2.0, shape[:2])
        blocks[..., place : place + 2] = factors.astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(shape[0], -1)


def pack_gguf(weight, kind):
    """Return a matrix as blocks [N, K / columns, bytes] of a type, and what they stand for."""
    kind = gguf.GGMLQuantizationType[kind]
    rows = blocks_of(weight.numpy(), kind)
    blocks = torch.from_numpy(rows).unflatten(1, (-1, gguf.GGML_QUANT_SIZES[kind][1]))
    return {"weight": blocks}, torch.from_numpy(gguf.dequantize(rows, kind))


def _shard(path, index, count):
    return path.with_name(f"{path.stem}-{index + 1:05}-of-{count:05}.gguf")


def _write(path, arch, values, tensors, kind):
    # A value of None is left out; general.architecture is written by the constructor.
    arch = values.pop("general.architecture", arch)
    writer = gguf.GGUFWriter(path, arch)
    for key, value in values.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    for name, tensor in tensors.items():
        if tensor.ndim == 1:
            writer.add_tensor(name, tensor)
        else:
            quantized = gguf.GGMLQuantizationType[kind(name) if callable(kind) else kind]
            writer.add_tensor(name, blocks_of(tensor, quantized), raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
