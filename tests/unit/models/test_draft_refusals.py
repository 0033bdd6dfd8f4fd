"""Every way a draft checkpoint can be wrong is refused with names, values and a way out."""

import json

import pytest
import torch

from serve_spec.config.drafts import METHODS, DraftMethod
from serve_spec.core.errors import CheckpointError, PluginError
from serve_spec.models.drafts.base import DraftFamily, DraftOptions
from serve_spec.models.drafts.loader import load_draft
from serve_spec.models.interfaces import FeatureCapture
from serve_spec.models.loader import load_target
from tests.helpers.checkpoints import (
    make_eagle,
    make_eagle3,
    make_target,
    read_checkpoint,
    write_checkpoint,
)


def add(name, *shape):
    """Add a tensor of ones."""
    return lambda tensors: tensors.update({name: torch.ones(shape)})


MAKERS = {"EAGLE3": make_eagle3, "EAGLE": make_eagle}


class Head:
    """A folder for a head, and the target that it is loaded for."""

    def __init__(self, folder, target_dir, target):
        self.folder, self.target_dir, self.target = folder, target_dir, target

    def make(self, family="EAGLE3", change=None, config=None, target_dir=None, **made):
        """Write a head, then change its tensors and its config."""
        MAKERS[family](self.folder, target_dir or self.target_dir, **made)
        written, tensors = read_checkpoint(self.folder)
        if change is not None:
            change(tensors)
        is_pickle = (self.folder / "pytorch_model.bin").exists()
        write_checkpoint(self.folder, {**written, **(config or {})}, tensors, pickle=is_pickle)

    def load(self, family="EAGLE3", options=None):
        return load_draft(self.folder, self.target, family, options)

    def is_refused(self, *words, family="EAGLE3", options=None):
        """Check that loading it fails with a message that has these words."""
        with pytest.raises(CheckpointError) as error:
            self.load(family, options)
        assert [word for word in words if word not in str(error.value)] == [], error.value


@pytest.fixture
def head(tmp_path, target_dir, target):
    return Head(tmp_path / "head", target_dir, target)


@pytest.mark.parametrize(("held", "asked"), [("EAGLE3", "EAGLE"), ("EAGLE", "EAGLE3")])
def test_the_other_eagle_is_refused(head, held, asked):
    # The names in its config mean nothing: official EAGLE-3 heads call themselves LlamaForCausalLM.
    head.make(held, architectures=["LlamaForCausalLM"])
    words = f"is of family {held} by its tensors", f"{asked!r}", f"set it to {held!r}"
    head.is_refused(*words, family=asked)


@pytest.mark.parametrize("key", ["intermediate_size", "num_attention_heads", "head_dim"])
@pytest.mark.parametrize("family", ["EAGLE3", "EAGLE", "STANDALONE"])
def test_absurd_sizes_of_a_config_are_refused_by_key_before_memory_is_taken(head, family, key):
    head.make(family) if family in MAKERS else make_target(head.folder)
    file = head.folder / "config.json"
    config = json.loads(file.read_text())
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    config |= {"head_dim": head_dim, key: 10**9 * (2 if key == "num_attention_heads" else 1)}
    file.write_text(json.dumps(config))
    head.is_refused(f"{file}: ", key, "correct config.json", family=family)


@pytest.mark.parametrize("algorithm", ["NGRAM", "NONE", "EAGLE9"])
def test_algorithms_without_a_head_are_refused(head, algorithm):
    with pytest.raises(ValueError, match=f"speculative_algorithm='{algorithm}'.*EAGLE3"):
        head.load(algorithm)


class HalfFamily(DraftFamily):
    """A family that another package has not finished."""

    def detect(self, config, shapes):
        return None


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("absent_package.drafts:Family", "does not import"),
        (f"{__name__}:Head", "is no draft family; derive a class from"),
        (f"{__name__}:HalfFamily", "lacks build, facts; define"),
    ],
)
def test_a_registered_family_that_lacks_something_is_refused_in_one_line(
    head, monkeypatch, path, problem
):
    monkeypatch.setitem(METHODS, "HALF", DraftMethod("HALF", path))
    head.make()
    with pytest.raises(PluginError) as error:
        head.load("HALF")
    (line,) = str(error.value).splitlines()
    assert all(word in line for word in ("draft method 'HALF'", path.split(":")[0], problem)), line


def test_a_folder_of_no_known_family_is_refused_with_the_names_it_holds(head):
    head.is_refused("config.json does not exist")
    make_target(head.folder, "llama2", hidden=32, layers=2)
    head.is_refused("STANDALONE", "model.embed_tokens.weight", "'EAGLE3'")
    (head.folder / "model.safetensors").unlink()
    write_checkpoint(head.folder, {}, {"adapter.weight": torch.ones(2)})
    head.is_refused(str(head.folder), "neither", "fc.weight", "adapter.weight")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("fc.weight"), ["missing fc.weight"]),
        (lambda t: t.pop("lm_head.weight"), ["missing lm_head.weight"]),
        (lambda t: t.pop("midlayer.mlp.up_proj.weight"), ["missing layers.0.mlp.up_proj.weight"]),
        (add("adapter.weight", 2), ["surplus adapter.weight"]),
        (add("norm.weight", 31), ["norm.weight", "[31]", "expected [32]"]),
        (
            add("layers.0.hidden_norm.weight", 32),
            ["layers.0.hidden_norm.weight", "midlayer.hidden_norm.weight", "keep one"],
        ),
        (add("layers.2.input_layernorm.weight", 32), ["missing layers.1"]),
        (add("input_norm.weight", 32), ["input_norm.weight", "[32]", "expected [96]"]),
        (
            lambda t: (
                [add("input_norm.weight", 96)(t)]
                + [add(f"fc_norm.{index}.weight", 32)(t) for index in range(3)]
            ),
            ["input_norm", "fc_norm", "one of them"],
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(head, change, words):
    head.make(change=change)
    head.is_refused(*words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: [t.pop(n) for n in list(t) if "layers" in n], ["missing layers.0"]),
        (add("norm.weight", 32), ["surplus norm.weight"]),
        (add("fc.bias", 3), ["fc.bias", "[3]", "expected [32]"]),
        (lambda t: t.update({"eagle_linear.weight": t.pop("fc.weight")}), ["Mistral's own names"]),
        (add("embed_tokens.weight", 99, 32), ["embed_tokens.weight", "[99, 32]", "[288, 32]"]),
    ],
)
def test_tensors_of_an_eagle_head_that_do_not_fit_are_named(head, change, words):
    head.make("EAGLE", change=change)
    head.is_refused(*words, family="EAGLE")


@pytest.mark.parametrize("family", MAKERS)
@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"hidden": 32, "vocab": 400}, ["vocab_size=400", "288"]),
        ({"hidden": 64}, ["hidden_size=64", "32"]),
    ],
    ids=["vocabulary", "width"],
)
def test_a_head_for_another_target_is_refused(head, tmp_path, family, other, words):
    head.make(family, target_dir=make_target(tmp_path / "other", "llama2", layers=8, **other))
    head.is_refused(*words, "trained for this target", family=family)


def test_a_thin_head_without_an_embedding_of_its_own_is_refused(head):
    head.make(hidden_size=16, head_dim=8)
    head.is_refused("embed_tokens.weight is missing", "hidden_size=16", "32")


KEY = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize("ids", ["1,4,5", [1.0, 4.0, 5.0], [True, 4, 5], {"low": 1}, 0])
def test_layer_ids_that_are_none_are_refused(head, ids):
    head.make(**{KEY: ids})
    head.is_refused(f"{KEY}={ids!r}", "list of integers")
    # A configured key replaces that of the checkpoint.
    options = DraftOptions(aux_layer_ids=(2, 4, 5))
    assert head.load(options=options).capture == FeatureCapture((2, 4, 5))


def test_configured_layers_outside_the_target_are_refused_by_key(head):
    head.make()
    options = DraftOptions(aux_layer_ids=(2, 4, 9))
    head.is_refused("speculative_draft_aux_layer_ids=[2, 4, 9]", "0 .. 8", options=options)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("d2t"), ["d2t is missing", "100 of 288"]),
        # Ids themselves, as FR-Spec's token maps hold them.
        (lambda t: t.update(d2t=t["d2t"] + torch.arange(100)), ["d2t", "offsets"]),
        (lambda t: t.update(d2t=t["d2t"] + 1), ["d2t", "offsets"]),
        (lambda t: t.update(d2t=t["d2t"].float()), ["d2t", "float32", "[100] integers"]),
        (lambda t: t.update(d2t=t["d2t"][:50]), ["d2t", "[50]", "[100]"]),
        (lambda t: t["t2d"].logical_not_(), ["t2d", "d2t", "offsets"]),
        (lambda t: t.update(t2d=t["t2d"][:200]), ["t2d", "[200]", "[288]"]),
    ],
)
def test_id_maps_that_contradict_each_other_are_refused(head, change, words):
    head.make(change=change, draft_vocab=100)
    head.is_refused(*words)


def test_draft_ids_whose_padding_is_not_last_are_refused(tmp_path):
    padded = make_target(tmp_path / "t", "llama2", hidden=32, layers=8, serve_spec_num_ids=280)
    head = Head(tmp_path / "head", padded, load_target(padded, torch.float32))
    ids = torch.arange(88, 288).flip(0) - torch.arange(200)
    head.make(change=lambda t: [t.update(d2t=ids), t.pop("t2d")], draft_vocab=200)
    head.is_refused("num_ids=280", "padding has to come last")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"sliding_window": 2048}, ["sliding_window=2048", "layer_types"]),
        ({"target_hidden_size": 48}, ["target_hidden_size=48", "32"]),
        ({"eagle_config": {"use_aux_hidden_state": False}}, ["use_aux_hidden_state"]),
        ({"eagle_config": {"use_mtp_layernorm": True}}, ["use_mtp_layernorm=true"]),
        ({"eagle_config": {"parallel_draft_step": 4}}, ["parallel_draft_step=4"]),
        ({"num_aux_hidden_states": 5}, ["num_aux_hidden_states=5", "[2, 4, 5]"]),
        ({"num_attention_heads": 8}, ["k_proj.weight", "expected"]),
        ({"norm_before_fc": True}, ["missing input_norm.weight"]),
        ({KEY: [4, 5, 11]}, [KEY, "[4, 5, 11]", "0 .. 8", "draft_aux"]),
        ({KEY: [-3, 4, 5]}, [KEY, "[-3, 4, 5]", "0 .. 8", "draft_aux"]),
        # SGLang reads the nested ones, vLLM those at the top: one of them reads the wrong layers.
        (
            {KEY: [2, 4, 5], "eagle_config": {KEY: [1, 3, 4]}},
            ["[2, 4, 5] at the top", "[1, 3, 4] in eagle_config", "remove one"],
        ),
        ({KEY: [1, 4]}, ["fc.weight", "width 96", "2 x 32 = 64"]),
        ({"draft_vocab_size": 64}, ["draft_vocab_size=64", "288 rows"]),
    ],
)
def test_configs_that_are_not_computed_are_refused(head, config, words):
    head.make(config=config)
    head.is_refused(*words)


@pytest.mark.parametrize(
    ("change", "config", "words"),
    [
        (None, {"target_hidden_size": 48}, ["target_hidden_size=48", "hidden size is 32"]),
        (
            lambda t: t.update({"fc.weight": torch.ones(32, 144)}),
            {},
            ["features of width 144", "hidden size 32"],
        ),
    ],
)
def test_a_draft_of_another_model_is_refused_by_width_before_layer_ids(head, change, config, words):
    head.make(change=change, config={KEY: [2, 40, 77], **config})
    head.is_refused(*words)
