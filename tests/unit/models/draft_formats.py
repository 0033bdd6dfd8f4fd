"""Draft checkpoints in the layouts the world publishes, made from the official one; a comparison.

`make_eagle` and `make_eagle3` write the official layout. What others write is the same tensors
under other names and the same keys in other places, so each layout is a rewriting of such a folder,
and the plain recomputation (`PlainHead`) reads the official one.
"""

import torch

from tests.helpers.checkpoints import read_checkpoint, write_checkpoint
from tests.helpers.paged import PagedSequences

TOLERANCE = 2e-5
_LAYER_KEYS = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "rms_norm_eps", "rope_theta", "hidden_act",
    "max_position_embeddings", "sliding_window", "layer_types",
)  # fmt: skip


def as_speculators(source, directory, kind="eagle3", layers=None, **top):
    """Writes the head in `source` as the library `speculators` does.

    layers: further keys of `transformer_layer_config`, None removes one. top: of the config itself.
    """
    config, tensors = read_checkpoint(source)
    nested = {key: config[key] for key in _LAYER_KEYS if key in config} | dict(layers or {})
    written = {
        "architectures": ["Eagle3Speculator" if kind == "eagle3" else "EagleSpeculator"],
        "speculators_model_type": kind,
        "speculators_version": "0.3.0",
        "draft_vocab_size": config.get("draft_vocab_size"),
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": {k: v for k, v in nested.items() if v is not None},
        "speculators_config": {"algorithm": kind, "verifier": {"name_or_path": "target"}},
    }
    if kind == "eagle":
        tensors.pop("embed_tokens.weight", None)
        tensors = {_speculators_eagle_name(name): tensor for name, tensor in tensors.items()}
        written = {**written, "fusion_bias": "fusion_fc.bias" in tensors, "layernorms": False}
    return write_checkpoint(directory, {**written, **top}, tensors)


def as_wrapped(source, directory):
    """Writes the EAGLE head in `source` as early conversions for vLLM did: its config wrapped."""
    config, tensors = read_checkpoint(source)
    wrapped = {
        "architectures": ["EAGLEModel"],
        "model_type": "eagle",
        "model": {**config, "eagle_fc_bias": "fc.bias" in tensors},
    }
    prefixed = {f"model.{name}": tensor for name, tensor in tensors.items()}
    return write_checkpoint(directory, wrapped, prefixed)


def medusa_tensors(hidden, num_heads, num_blocks=1, rows=None, *, shared=False, bias=True):
    """Random Medusa heads under vLLM's names; rows: of the output matrices, None: none stored."""
    generator = torch.Generator().manual_seed(4)

    def draw(*shape):
        return torch.randn(shape, generator=generator) / hidden**0.5

    tensors = {}
    for head in range(num_heads):
        for block in range(num_blocks):
            tensors[f"blocks.{head}.layers.{block}.weight"] = draw(hidden, hidden)
            if bias:
                tensors[f"blocks.{head}.layers.{block}.bias"] = draw(hidden)
        if rows is not None and not shared:
            tensors[f"lm_heads.{head}.weight"] = draw(rows, hidden)
    if rows is not None and shared:
        tensors["lm_head.weight"] = draw(rows, hidden)
    return tensors


def official_medusa_names(tensors, prefix=""):
    """The same heads as Medusa's authors save them: `{head}.{block}.linear`, `{head}.{last}`."""
    num_blocks = 1 + max(int(name.split(".")[3]) for name in tensors if "blocks." in name)
    renamed = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        if parts[0] == "blocks":
            renamed[f"{prefix}{parts[1]}.{parts[3]}.linear.{parts[4]}"] = tensor
        else:
            renamed[f"{prefix}{parts[1]}.{num_blocks}.weight"] = tensor
    return renamed


def assert_computes(head, plain, num_entries=9, drafted=4):
    """`head` gives the states and logits of `plain`, over a target's features and then its own."""
    generator = torch.Generator().manual_seed(3)
    vocab = len(plain.embedding)
    ids = torch.randint(0, vocab, (num_entries + drafted,), generator=generator)
    features = torch.randn(num_entries, head.feature_dim, generator=generator)
    sequences = PagedSequences(head.caches, 1, len(ids))
    ctx = sequences.extend([(0, num_entries)])
    hidden = head.forward(ids[:num_entries], head.encode(features), ctx)
    for token in ids[num_entries:].split(1):
        out = head.forward(token, hidden[-1:], sequences.extend([(0, 1)]))
        hidden = torch.cat((hidden, out))
    expected_hidden, expected_logits = plain.unroll(ids, features)
    assert_close(hidden, expected_hidden)
    assert_close(head.logits(hidden), expected_logits)


def assert_close(found, expected):
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= TOLERANCE * max(1.0, float(expected.abs().max()))


def _speculators_eagle_name(name):
    for old, new in (("fc.", "fusion_fc."), ("layers.0.", "transformer.")):
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name
