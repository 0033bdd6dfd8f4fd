"""Tiny mixtures of experts, by the names and keys of their published files."""

import torch

NUM_EXPERTS = 6
ARCHITECTURES = {
    "mixtral": ("MixtralForCausalLM", "mixtral"),
    "qwen2_moe": ("Qwen2MoeForCausalLM", "qwen2_moe"),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "glm4_moe": ("Glm4MoeForCausalLM", "glm4_moe"),
    "minimax_m2": ("MiniMaxM2ForCausalLM", "minimax_m2"),
    "gpt_oss": ("GptOssForCausalLM", "gpt_oss"),
}


def mixture_config(family, hidden):
    """Keys of `config.json` beside those of dense targets."""
    width = hidden // 2
    chosen = {"num_experts_per_tok": 2}
    return {
        "mixtral": {"num_local_experts": NUM_EXPERTS, "intermediate_size": width, **chosen},
        "qwen2_moe": {
            "num_experts": NUM_EXPERTS,
            "moe_intermediate_size": width,
            "shared_expert_intermediate_size": hidden,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": False,
            **chosen,
        },
        "qwen3_moe": {
            "num_experts": NUM_EXPERTS,
            "moe_intermediate_size": width,
            "head_dim": 32,
            "norm_topk_prob": True,
            **chosen,
        },
        "glm4_moe": {
            "n_routed_experts": NUM_EXPERTS,
            "n_shared_experts": 2,
            "moe_intermediate_size": width,
            "first_k_dense_replace": 1,
            "n_group": 3,
            "topk_group": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
            "partial_rotary_factor": 0.5,
            "attention_bias": True,
            "use_qk_norm": True,
            "num_nextn_predict_layers": 0,
            **chosen,
        },
        "minimax_m2": {
            "num_local_experts": NUM_EXPERTS,
            "intermediate_size": width,
            "head_dim": 32,
            "rotary_dim": 16,
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "scoring_func": "sigmoid",
            **chosen,
        },
        "gpt_oss": {
            "num_local_experts": NUM_EXPERTS,
            "intermediate_size": width,
            "head_dim": 16,
            "attention_bias": True,
            "sliding_window": 9,
            # Within reach, so that the clamp is at work.
            "swiglu_limit": 1.5,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "truncate": False,
                "original_max_position_embeddings": 128,
            },
            **chosen,
        },
    }[family]


def mixture_mlp(draw, config, index, scale):
    """Tensors of layer `index` in place of its dense MLP; None if it is dense. Names without the
    layer's."""
    family, hidden = config["model_type"], config["hidden_size"]
    if family == "glm4_moe" and index < config["first_k_dense_replace"]:
        return None
    if index in config.get("mlp_only_layers", ()):
        return None
    if (index + 1) % config.get("decoder_sparse_step", 1):
        return None
    if family == "gpt_oss":
        return _stacked(draw, hidden, config["intermediate_size"], scale)
    width = config.get("moe_intermediate_size", config["intermediate_size"])
    mlp, names = "mlp.", ("gate_proj", "up_proj", "down_proj")
    if family in ("mixtral", "minimax_m2"):
        mlp, names = "block_sparse_moe.", ("w1", "w3", "w2")
    tensors = {f"{mlp}gate.weight": draw.matrix(NUM_EXPERTS, hidden, 2.0)}
    for expert in range(NUM_EXPERTS):
        tensors |= _gated(draw, f"{mlp}experts.{expert}.", names, hidden, width, scale)
    if family == "qwen2_moe":
        size = config["shared_expert_intermediate_size"]
        tensors |= _gated(draw, "mlp.shared_expert.", names, hidden, size, scale)
        tensors["mlp.shared_expert_gate.weight"] = draw.matrix(1, hidden)
    if family == "glm4_moe":
        size = config["n_shared_experts"] * width
        tensors |= _gated(draw, "mlp.shared_experts.", names, hidden, size, scale)
        tensors["mlp.gate.e_score_correction_bias"] = 0.3 * draw.matrix(1, NUM_EXPERTS, 2.0)[0]
    if family == "minimax_m2":
        tensors[f"{mlp}e_score_correction_bias"] = 0.3 * draw.matrix(1, NUM_EXPERTS, 2.0)[0]
    return tensors


def _gated(draw, prefix, names, hidden, width, scale):
    gate, up, down = (f"{prefix}{name}.weight" for name in names)
    return {
        gate: draw.matrix(width, hidden),
        up: draw.matrix(width, hidden),
        down: draw.matrix(hidden, width, scale),
    }


def _stacked(draw, hidden, width, scale):
    def stack(rows, columns, scale=1.0):
        return torch.stack([draw.matrix(columns, rows, scale).T for _ in range(NUM_EXPERTS)])

    return {
        "mlp.router.weight": draw.matrix(NUM_EXPERTS, hidden, 2.0),
        "mlp.router.bias": draw.matrix(1, NUM_EXPERTS)[0],
        "mlp.experts.gate_up_proj": stack(hidden, 2 * width),
        "mlp.experts.gate_up_proj_bias": draw.matrix(NUM_EXPERTS, 2 * width, 2.0),
        "mlp.experts.down_proj": stack(width, hidden, scale),
        "mlp.experts.down_proj_bias": draw.matrix(NUM_EXPERTS, hidden, scale),
    }
