"""Tiny random checkpoints in the formats the world publishes. Seeded.

They are written directly (importing transformers costs seconds); `tests/unit/models` proves that
transformers reads the targets and gives the same logits.

`make_target(dir)` writes `config.json`, `model.safetensors` and a byte-level tokenizer.
`make_eagle3(dir, target_dir)` / `make_eagle(dir, target_dir)` write heads for that target. A random
head is hardly ever right: for tests that need drafts kept *sometimes*, give the target a small
`layer_scale` (it then nearly predicts from its last token alone) and the head `mimic=True` (it
predicts from the last token alone). Greedy drafts then agree about 70 % of the time at 0.1, 50 % at
0.2, 30 % at 0.3. Take an untied family for that (llama2, mistral, qwen3): with tied embeddings
(llama3) a shallow target only repeats its last token.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from serve_spec.engine.tokenizer import BYTE_CHARACTERS
from tests.helpers import mixtures, transformers_models

FAMILIES = ("llama2", "llama3", "mistral", "qwen2", "qwen3", *mixtures.ARCHITECTURES)
BOS_ID, EOS_ID, PAD_ID = 256, 257, 258
VOCAB = 288
_ARCHITECTURE = {
    "llama2": ("LlamaForCausalLM", "llama"),
    "llama3": ("LlamaForCausalLM", "llama"),
    "mistral": ("MistralForCausalLM", "mistral"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    **mixtures.ARCHITECTURES,
}
_CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_target(
    directory, family="llama3", hidden=64, layers=6, vocab=VOCAB, seed=0, layer_scale=1.0, **config
):
    """Writes a random float32 target of one of `FAMILIES`, or of one that transformers computes,
    and its tokenizer; returns the directory.

    `layer_scale` multiplies what every layer adds to the residual stream. Further keywords replace
    or add keys of `config.json` before the weights are drawn (`num_key_value_heads=4`,
    `sliding_window=8`, `tie_word_embeddings=False`, ...).
    """
    directory = Path(directory)
    if family in transformers_models.CASES:
        sizes = hidden, layers, vocab, seed, layer_scale
        transformers_models.make_model(family, *sizes, **config).save_pretrained(directory)
    else:
        settings = {**target_config(family, hidden, layers, vocab), **config}
        write_checkpoint(directory, settings, target_tensors(settings, seed, layer_scale))
    if vocab > PAD_ID:
        make_tokenizer(directory)
    return directory


def target_config(family, hidden, layers, vocab):
    """`config.json` of a tiny target, keyed as the family's published files are."""
    architecture, model_type = _ARCHITECTURE[family]
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4 if family == "llama2" else 2,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": BOS_ID if vocab > PAD_ID else None,
        "eos_token_id": EOS_ID if vocab > PAD_ID else None,
        "torch_dtype": "float32",
    }
    extra = {
        "llama2": {"rope_scaling": None},
        "llama3": {
            "tie_word_embeddings": True,
            "rope_theta": 500000.0,
            # A short original context, so that a 100-token test crosses all three bands.
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
        "mistral": {"sliding_window": None},
        "qwen2": {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": layers},
        "qwen3": {"head_dim": 32, "attention_bias": False, "use_sliding_window": False},
    }
    if family in mixtures.ARCHITECTURES:
        return {**config, **mixtures.mixture_config(family, hidden)}
    return {**config, **extra[family]}


def target_tensors(config, seed, layer_scale):
    """Random tensors of a target, by their published names."""
    draw = _Draw(seed)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    family = config["model_type"]
    tied = config["tie_word_embeddings"]
    embedding_scale = 2.0 if tied else hidden**0.5
    tensors = {"model.embed_tokens.weight": draw.matrix(vocab, hidden, embedding_scale)}
    for index in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{index}."
        tensors |= _layer(draw, config, prefix, hidden, layer_scale)
        if family in mixtures.ARCHITECTURES:
            _add_experts(tensors, draw, config, index, layer_scale)
        tensors[prefix + "input_layernorm.weight"] = draw.norm(hidden)
        if family in ("qwen2", "qwen2_moe") or config.get("attention_bias"):
            tensors |= _qkv_bias(draw, config, prefix)
        if config.get("attention_bias") and family != "glm4_moe":
            tensors[prefix + "self_attn.o_proj.bias"] = draw.matrix(1, hidden)[0]
        if config.get("mlp_bias"):
            for name, width in (("gate", 2 * hidden), ("up", 2 * hidden), ("down", hidden)):
                tensors[f"{prefix}mlp.{name}_proj.bias"] = draw.matrix(1, width)[0]
        if family == "gpt_oss":
            tensors[prefix + "self_attn.sinks"] = draw.matrix(1, config["num_attention_heads"])[0]
        if family in ("qwen3", "qwen3_moe") or config.get("use_qk_norm"):
            tensors |= _qk_norm(draw, config, prefix)
    # A plain final norm: a mimic head, which has no norm of its own to copy it to, can then agree.
    tensors["model.norm.weight"] = draw.norm(hidden) if layer_scale == 1.0 else torch.ones(hidden)
    if not tied:
        tensors["lm_head.weight"] = draw.matrix(vocab, hidden, 2.0)
    return tensors


def in_sixteen_bits(directory):
    """Rounds the weights of a checkpoint to bfloat16; returns the directory."""
    config, tensors = read_checkpoint(directory)
    rounded = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    return write_checkpoint(directory, config, rounded)


def make_eagle3(
    directory,
    target_dir,
    draft_vocab=None,
    seed=1,
    fc_bias=False,
    mimic=False,
    layer_prefix="midlayer.",
    num_layers=1,
    own_embedding=False,
    **config,
):
    """Writes an EAGLE-3 head for the target in `target_dir`; returns the directory.

    `draft_vocab` below the target's vocabulary adds `d2t` / `t2d`. Further keywords set keys of
    `config.json` (`norm_before_residual=True`, `eagle_aux_hidden_state_layer_ids=[...]`, ...).
    """
    if mimic:
        # One wide head: the more dimensions, the clearer each row stands out to itself.
        config = {"num_attention_heads": 1, "num_key_value_heads": 1, **config}
    settings, target = _head_settings(target_dir, "LlamaForCausalLMEagle3", config)
    settings.setdefault("draft_vocab_size", draft_vocab or settings["vocab_size"])
    draw = _Draw(seed)
    hidden, vocab = settings["hidden_size"], settings["vocab_size"]
    tensors = {
        "fc.weight": draw.matrix(hidden, 3 * settings["target_hidden_size"], 0.01 if mimic else 1.0)
    }
    if fc_bias:
        tensors["fc.bias"] = draw.matrix(1, hidden)[0]
    if own_embedding:
        tensors["embed_tokens.weight"] = draw.matrix(vocab, hidden, hidden**0.5)
    for index in range(num_layers):
        prefix = layer_prefix if index == 0 else f"layers.{index}."
        tensors |= _layer(draw, settings, prefix, 2 * hidden if index == 0 else hidden, 1.0)
        tensors[prefix + "input_layernorm.weight"] = draw.norm(hidden)
    tensors[layer_prefix + "hidden_norm.weight"] = draw.norm(hidden)
    tensors |= _eagle3_output(draw, settings, target, mimic)
    if mimic:
        _mimic_attention(tensors, layer_prefix, hidden)
    return write_checkpoint(directory, settings, tensors)


def _eagle3_output(draw, settings, target, mimic):
    """Final norm, lm_head, and the id maps of a reduced vocabulary."""
    hidden, vocab, rows = (settings[k] for k in ("hidden_size", "vocab_size", "draft_vocab_size"))
    ids = torch.randperm(vocab, generator=draw.generator)[:rows].sort().values
    head = target.get("lm_head.weight", target["model.embed_tokens.weight"])
    tensors = {
        "norm.weight": torch.ones(hidden) if mimic else draw.norm(hidden),
        "lm_head.weight": head[ids].clone() if mimic else draw.matrix(rows, hidden, 2.0),
    }
    if rows != vocab:
        tensors["d2t"] = ids - torch.arange(rows)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
    return tensors


def make_eagle(
    directory,
    target_dir,
    seed=1,
    fc_bias=True,
    mimic=False,
    num_layers=1,
    own_embedding=True,
    **config,
):
    """Writes an EAGLE-1 head (pickle, as published) for the target; returns the directory."""
    settings, target = _head_settings(target_dir, "LlamaForCausalLMEagle", config)
    draw = _Draw(seed)
    hidden = settings["hidden_size"]
    tensors = {"fc.weight": draw.matrix(hidden, 2 * hidden)}
    if mimic:
        tensors["fc.weight"] = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1)
    if fc_bias:
        tensors["fc.bias"] = draw.matrix(1, hidden)[0] * (0.0 if mimic else 1.0)
    if own_embedding:
        tensors["embed_tokens.weight"] = target["model.embed_tokens.weight"].clone()
    for index in range(num_layers):
        prefix = f"layers.{index}."
        tensors |= _layer(draw, settings, prefix, hidden, 0.01 if mimic else 1.0)
        if index > 0:
            tensors[prefix + "input_layernorm.weight"] = draw.norm(hidden)
    return write_checkpoint(directory, settings, tensors, pickle=True)


def make_mtp(directory, target_dir, seed=1, mimic=False, **config):
    """Writes the target with a head for one more token beside it, as MiMo is published.

    Further keywords replace keys of its `config.json`.
    """
    settings, tensors = read_checkpoint(target_dir)
    settings |= {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "mimo",
        "num_nextn_predict_layers": 1,
        **config,
    }
    draw, hidden, prefix = _Draw(seed), settings["hidden_size"], "model.mtp_layers.0."
    fused = draw.matrix(hidden, 2 * hidden)
    if mimic:
        fused = torch.cat([torch.zeros(hidden, hidden), torch.eye(hidden)], dim=1)
    tensors |= _layer(draw, settings, prefix, hidden, 0.01 if mimic else 1.0)
    tensors |= _qkv_bias(draw, settings, prefix)
    tensors[prefix + "input_proj.weight"] = fused
    for name in ("token", "hidden", "input", "final"):
        norm = torch.ones(hidden) if mimic else draw.norm(hidden)
        tensors[f"{prefix}{name}_layernorm.weight"] = norm
    make_tokenizer(directory)
    return write_checkpoint(directory, settings, tensors)


def write_checkpoint(directory, config, tensors, pickle=False):
    """Writes `config.json` and one weight file (`pickle`: `pytorch_model.bin`)."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    if pickle:
        torch.save(dict(tensors), directory / "pytorch_model.bin")
    else:
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def read_checkpoint(directory):
    """`config.json` and all tensors of a directory written by this module."""
    directory = Path(directory)
    config = json.loads((directory / "config.json").read_text())
    if (directory / "pytorch_model.bin").exists():
        return config, torch.load(directory / "pytorch_model.bin", weights_only=True)
    return config, load_file(directory / "model.safetensors")


def make_tokenizer(directory):
    """A byte-level tokenizer: token id = byte value, then `<bos>` 256, `<eos>` 257, `<pad>` 258."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE(vocab=BYTE_CHARACTERS, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>", "<pad>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "chat_template": _CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    return directory


class _Draw:
    """Random tensors from one seeded stream."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def matrix(self, rows, columns, scale=1.0):
        """[rows, columns] that maps a unit-variance vector to variance scale²."""
        return torch.randn(rows, columns, generator=self.generator) * (scale / columns**0.5)

    def norm(self, width):
        return 1.0 + 0.2 * torch.randn(width, generator=self.generator)


def _head_dim(config):
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _layer(draw, config, prefix, qkv_inputs, scale):
    """Attention, feed-forward and post-attention norm of one layer (no input norm)."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = _head_dim(config)
    query = config["num_attention_heads"] * head_dim
    key = config["num_key_value_heads"] * head_dim
    tensors = {
        # Larger than for unit scores, so that attention really selects and a wrong mask shows.
        "self_attn.q_proj.weight": draw.matrix(query, qkv_inputs, 1.5),
        "self_attn.k_proj.weight": draw.matrix(key, qkv_inputs, 1.5),
        "self_attn.v_proj.weight": draw.matrix(key, qkv_inputs),
        "self_attn.o_proj.weight": draw.matrix(hidden, query, scale),
        "mlp.gate_proj.weight": draw.matrix(inner, hidden),
        "mlp.up_proj.weight": draw.matrix(inner, hidden),
        "mlp.down_proj.weight": draw.matrix(hidden, inner, scale),
        "post_attention_layernorm.weight": draw.norm(hidden),
    }
    return {prefix + name: tensor for name, tensor in tensors.items()}


def _add_experts(tensors, draw, config, index, scale):
    """Replaces the MLP of a layer by experts, if it has some."""
    prefix = f"model.layers.{index}."
    experts = mixtures.mixture_mlp(draw, config, index, scale)
    if experts is not None:
        for name in ("gate", "up", "down"):
            del tensors[f"{prefix}mlp.{name}_proj.weight"]
        tensors |= {prefix + name: tensor for name, tensor in experts.items()}


def _qk_norm(draw, config, prefix):
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    if config["model_type"] != "minimax_m2":  # which normalises all heads together
        heads = dict.fromkeys(heads, 1)
    return {
        f"{prefix}self_attn.{name}_norm.weight": draw.norm(_head_dim(config) * count)
        for name, count in heads.items()
    }


def _qkv_bias(draw, config, prefix):
    head_dim = _head_dim(config)
    heads = {
        "q_proj": config["num_attention_heads"],
        "k_proj": config["num_key_value_heads"],
        "v_proj": config["num_key_value_heads"],
    }
    return {
        f"{prefix}self_attn.{name}.bias": 0.5 * draw.norm(count * head_dim)
        for name, count in heads.items()
    }


def _head_settings(target_dir, architecture, config):
    """A head's `config.json` as wide as the target, and the target's tensors."""
    target_config, target = read_checkpoint(target_dir)
    hidden = target_config["hidden_size"]
    settings = {
        "architectures": [architecture],
        "model_type": "llama",
        "hidden_size": hidden,
        "target_hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": target_config["vocab_size"],
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        # Shorter than any test's text: the draft must follow the target's positions regardless.
        "max_position_embeddings": 16,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    return {**settings, **config}, target


def _mimic_attention(tensors, prefix, hidden):
    """Makes an EAGLE-3 layer copy the embedding of its own token to the output.

    Equal query and key projections make every row attend to itself (a rotation by zero), values
    pass the embedding half through, and the feed-forward adds nothing. Needs heads · d = H and as
    many key heads as query heads.
    """
    select = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1)
    tensors[prefix + "self_attn.q_proj.weight"] = 2.0 * select
    tensors[prefix + "self_attn.k_proj.weight"] = 2.0 * select
    tensors[prefix + "self_attn.v_proj.weight"] = select
    tensors[prefix + "self_attn.o_proj.weight"] = torch.eye(hidden)
    tensors[prefix + "mlp.down_proj.weight"].zero_()
    tensors[prefix + "input_layernorm.weight"] = torch.ones(hidden)
