"""Tiny random decoders of families that transformers computes."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

_LAYERS = ["sliding_attention", "sliding_attention", "full_attention"]
SLIDING = {"sliding_window": 8, "layer_types": _LAYERS}
CASES = {
    "apertus": {},
    "arcee": {},
    "cohere": {"logit_scale": 0.25},
    "cohere2": SLIDING,
    "cwm": {},
    "ernie4_5": {"head_dim": 16},
    "exaone4": SLIDING,
    "gemma": {"head_dim": 16},
    "gemma2": {
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 7.0,
        **SLIDING,
    },
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 24, **SLIDING},
    "gemma4_text": {},
    "glm": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "granite": {"attention_multiplier": 0.3, "embedding_multiplier": 12.0, "logits_scaling": 8.0},
    "helium": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hyperclovax": {},
    "jais2": {},
    "ministral": {"head_dim": 16, **SLIDING},
    "ministral3": {"head_dim": 16},
    "nanochat": {},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": SLIDING,
    "persimmon": {},
    "phi3": {"sliding_window": 9},
    "seed_oss": {"head_dim": 16},
    "smollm3": {"no_rope_layers": [1, 1, 0]},
    "starcoder2": {"sliding_window": 8},
    "vaultgemma": {"head_dim": 16, **SLIDING},
}


def make_model(family, hidden=64, layers=3, vocab=288, seed=0, layer_scale=1.0, **config):
    """Return transformers' model, in float32. layer_scale: see `checkpoints.make_target`."""
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": vocab,
        "max_position_embeddings": 512,
        "pad_token_id": None,
        "bos_token_id": 256,
        "eos_token_id": 257,
    }
    keys = {**sizes, **CASES[family], **config}
    if "layer_types" in keys:
        keys["layer_types"] = (_LAYERS * layers)[:layers]
    known = AutoConfig.for_model(family, **keys)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        known, attn_implementation="eager", dtype=torch.float32
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                scale = layer_scale if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                weight.normal_(0.0, scale * weight.shape[1] ** -0.5)
            else:
                weight.add_(0.2 * torch.randn_like(weight))
    return model.eval().requires_grad_(False)
