"""The targets compute what transformers computes, however the rows are cut and mixed."""

import json
import random

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from serve_spec.models.interfaces import FeatureCapture
from serve_spec.models.loader import load_target, target_dtype
from tests.helpers.checkpoints import make_target
from tests.helpers.paged import PagedSequences, run_text

TOLERANCE = 1e-4
# Past 64 positions, llama3's rope scaling is at work in all three of its bands.
LENGTHS = (90, 5, 21)
LIMIT = "original_max_position_embeddings"
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 2.0, 3.0, 8.0],
}
CASES = {
    "llama2": ("llama2", {}),
    "llama_attention_bias": ("llama3", {"attention_bias": True}),
    "llama_mlp_bias": ("llama2", {"mlp_bias": True}),
    "linear": ("llama2", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "dynamic": ("llama2", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}),
    "yarn": ("qwen3", {"rope_scaling": {"type": "yarn", "factor": 4.0, LIMIT: 32}}),
    "yarn_scaled": (
        "qwen2",
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 8.0,
                "mscale": 0.7,
                "mscale_all_dim": 1.3,
                "beta_fast": 4,
                "truncate": False,
                LIMIT: 32,
            }
        },
    ),
    "yarn_given": (
        "mistral",
        {"rope_scaling": {"type": "yarn", "factor": 16.0, "attention_factor": 0.5, LIMIT: 32}},
    ),
    # transformers chooses by the length of the text, and all are longer than 4.
    "longrope_long": ("mistral", {"rope_scaling": {**LONGROPE, LIMIT: 4}}),
    "longrope_short": ("mistral", {"rope_scaling": {**LONGROPE, LIMIT: 1000}}),
    "mistral_window": ("mistral", {"sliding_window": 7}),
    "qwen2": ("qwen2", {}),
    "qwen2_mixed_windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},
    ),
    "qwen3_mixed_windows": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3": ("qwen3", {}),
    "mixtral": ("mixtral", {}),
    "mixtral_window": ("mixtral", {"sliding_window": 7, "num_experts_per_tok": 3}),
    "qwen2_moe": ("qwen2_moe", {"mlp_only_layers": [1]}),
    "qwen2_moe_sparse_step": ("qwen2_moe", {"decoder_sparse_step": 2, "norm_topk_prob": True}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe_of_all": ("qwen3_moe", {"norm_topk_prob": False, "attention_bias": True}),
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe_plain": (
        "glm4_moe",
        {
            "first_k_dense_replace": 0,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "attention_bias": False,
            "use_qk_norm": False,
        },
    ),
    "minimax_m2": ("minimax_m2", {}),
    "gpt_oss": ("gpt_oss", {}),
}


class Pair:
    """One random model twice: transformers' and ours, and the former's answers."""

    def __init__(self, directory, name):
        family, config = CASES[name]
        make_target(directory / "made", family, layers=3, hidden=32, **config)
        self.reference, report = AutoModelForCausalLM.from_pretrained(
            directory / "made", attn_implementation="eager", output_loading_info=True
        )
        assert not any(report.values()), "the helper's names are not transformers'"
        self.reference.save_pretrained(directory / "saved")
        self.directory = directory
        self.ours = load_target(directory / "saved", torch.float32)
        generator = torch.Generator().manual_seed(1)
        self.tokens = [torch.randint(0, 288, (n,), generator=generator) for n in LENGTHS]
        self.logits = [self.reference(ids[None]).logits[0] for ids in self.tokens]


@pytest.fixture(scope="module")
def pair(request, tmp_path_factory):
    with torch.no_grad():
        return Pair(tmp_path_factory.mktemp(request.param), request.param)


every_family = pytest.mark.parametrize("pair", list(CASES), indirect=True, scope="module")


def run(model, tokens, rounds):
    """Logits [length, V] of every sequence, computed in these rounds of (sequence, rows)."""
    sequences = PagedSequences(model.spec.caches, len(tokens), max(LENGTHS))
    collected = [[] for _ in tokens]
    for chunks in rounds:
        starts = [sequences.lengths[index] for index, _ in chunks]
        ctx = sequences.extend(chunks)
        parts = [
            tokens[index][start : start + count]
            for (index, count), start in zip(chunks, starts, strict=True)
        ]
        logits = model.logits(model.forward(torch.cat(parts), ctx).hidden)
        counts = [count for _, count in chunks]
        for (index, _), rows in zip(chunks, logits.split(counts), strict=True):
            collected[index].append(rows)
    return [torch.cat(rows) for rows in collected]


def assert_same_logits(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == torch.float32
        assert (ours - theirs).abs().max() <= TOLERANCE


def ragged_rounds():
    """Return rounds of random sequences and random numbers of their tokens."""
    draw = random.Random(7)
    left = dict(enumerate(LENGTHS))
    rounds = []
    while left:
        chosen = draw.sample(sorted(left), draw.randint(1, len(left)))
        rounds.append([(index, draw.randint(1, min(left[index], 24))) for index in chosen])
        for index, count in rounds[-1]:
            left[index] -= count
        left = {index: count for index, count in left.items() if count}
    return rounds


ROUNDS = {
    "whole prompts": [[(index, length)] for index, length in enumerate(LENGTHS)],
    "token by token": [
        [(0, 60), (2, 9)],
        *[[(0, 1), (1, 1), (2, 1)]] * 5,
        *[[(0, 1), (2, 1)]] * 7,
        *[[(0, 1)]] * 18,
    ],
    "ragged": ragged_rounds(),
}


@every_family
@pytest.mark.parametrize("rounds", ROUNDS.values(), ids=ROUNDS)
def test_prompts_in_any_chunks_give_transformers_logits(pair, rounds):
    assert_same_logits(run(pair.ours, pair.tokens, rounds), pair.logits)


@every_family
def test_both_config_dialects_describe_the_same_model(pair):
    # "made" has rope_theta + rope_scaling, "saved" has transformers 5's rope_parameters.
    made = load_target(pair.directory / "made", torch.float32)
    assert made.shape == pair.ours.shape
    ids = pair.tokens[0]
    assert torch.equal(run_text(made, ids)[0], run_text(pair.ours, ids)[0])


@every_family
def test_captured_features_are_transformers_hidden_states(pair):
    ids = pair.tokens[2]
    states = pair.reference(ids[None], output_hidden_states=True).hidden_states
    num_layers = pair.ours.shape.num_layers
    capture = FeatureCapture((1, 0, num_layers - 1, 1, num_layers))
    features = run_text(pair.ours, ids, capture)[1]
    assert features.shape == (len(ids), capture.width(pair.ours.shape.hidden_size))
    before_norm = features.chunk(5, dim=1)
    for block, layer in zip(before_norm, (1, 0, num_layers - 1, 1), strict=False):
        assert (block - states[layer][0]).abs().max() <= TOLERANCE
    # transformers' last state is behind the final norm; ours (layer n) is before it.
    assert (pair.ours.norm(before_norm[4]) - states[num_layers][0]).abs().max() <= TOLERANCE
    final = run_text(pair.ours, ids, FeatureCapture(None))[1]
    assert (final - states[num_layers][0]).abs().max() <= TOLERANCE


def test_longrope_takes_its_long_factors_where_longer_texts_are_allowed(tmp_path):
    """And not where a text is longer: it would then depend on the others of its batch."""
    rope = {**LONGROPE, LIMIT: 40}
    folder = make_target(tmp_path, "mistral", layers=2, hidden=32, rope_scaling=rope)
    reference = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    for count, max_model_len in ((21, 40), (41, 41), (41, None)):
        ids = torch.arange(count)
        found, _ = run_text(load_target(folder, torch.float32, "cpu", max_model_len), ids)
        assert_same_logits([found], reference(ids[None]).logits)
    long, short = (load_target(folder, torch.float32, "cpu", limit) for limit in (41, 40))
    assert not torch.equal(*(run_text(model, ids[:21])[0] for model in (long, short)))


def test_a_window_that_holds_the_longest_text_is_left_out(tmp_path):
    folder = make_target(tmp_path, "mistral", layers=2, hidden=32, sliding_window=40)
    for longest, window in ((40, None), (41, 40), (None, 40)):
        model = load_target(folder, torch.float32, max_model_len=longest)
        assert model.shape.windows == (window,) * 2


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"torch_dtype": "float16"}, torch.float16),
        ({"dtype": "float16", "torch_dtype": None}, torch.float16),
        ({"text_config": {"dtype": "float16"}}, torch.float16),
        ({"torch_dtype": "float32"}, torch.bfloat16),
        ({}, torch.bfloat16),
    ],
)
def test_dtype_auto_is_the_checkpoints_on_a_gpu_if_it_has_16_bits(tmp_path, config, dtype):
    (tmp_path / "config.json").write_text(json.dumps(config))
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert target_dtype("auto", tmp_path, gpu) == dtype
    assert target_dtype("auto", tmp_path, cpu) == torch.float32
    assert target_dtype("bfloat16", tmp_path, gpu) == torch.bfloat16


def test_bfloat16_stays_close_to_float32(target, target_dir):
    found, expected = (
        run_text(model, torch.arange(40))[0]
        for model in (load_target(target_dir, torch.bfloat16), target)
    )
    assert found.dtype == torch.float32
    cosine = torch.cosine_similarity(found, expected, dim=1)
    assert cosine.min() > 0.995


TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 288,
    "max_position_embeddings": 512,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
QWEN_VISION = {**VISION, "depth": 1, "num_heads": 2, "out_hidden_size": 32}
# Three positions a token, which are equal for text.
MROPE = {"rope_type": "default", "rope_theta": 5e4, "mrope_section": [2, 1, 1]}
MULTIMODAL = {
    "qwen3_vl": (
        {"model_type": "qwen3_vl_text", "head_dim": 8, "rope_parameters": MROPE},
        {**QWEN_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
    "qwen2_5_vl": ({"model_type": "qwen2_5_vl_text", "rope_parameters": MROPE}, QWEN_VISION),
    "mistral3": (
        {"model_type": "mistral", "head_dim": 8, "sliding_window": None},
        {**VISION, "model_type": "pixtral", "head_dim": 8},
    ),
    "llava": (
        {"model_type": "llama"},
        {**VISION, "model_type": "clip_vision_model", "image_size": 28, "patch_size": 14},
    ),
}


@pytest.mark.parametrize("kind", MULTIMODAL)
def test_the_text_model_of_a_multimodal_checkpoint_is_served(kind, tmp_path):
    text, vision = MULTIMODAL[kind]
    config = AutoConfig.for_model(kind, text_config={**TEXT, **text}, vision_config=vision)
    reference = AutoModelForImageTextToText.from_config(config)
    generator = torch.Generator().manual_seed(0)
    for tensor in reference.parameters():
        tensor.normal_(0.0, 0.3, generator=generator)
    reference.save_pretrained(tmp_path)
    ours = load_target(tmp_path, torch.float32)
    ids = torch.randint(0, 288, (LENGTHS[0],), generator=generator)
    assert_same_logits([run_text(ours, ids)[0]], reference(ids[None]).logits)
