"""Settings that are left out come from the checkpoint's config.json."""

import json

import pytest

from serve_spec.config import ConfigError, ServeSpecConfig
from serve_spec.config.base import ASSETS
from serve_spec.config.drafts import METHODS, DraftMethod, register_draft
from serve_spec.core.errors import PluginError
from tests.helpers.hub import COMMIT, add_repository, use_cache

LLAMA = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32}
MIMO = {
    "architectures": ["MiMoForCausalLM"],
    "model_type": "mimo",
    "num_hidden_layers": 36,
    "num_nextn_predict_layers": 1,
}
TARGET = "asset:tiny/target"
VERIFIER = {"speculators_config": {"verifier": {"name_or_path": "ada/target"}}}


@pytest.fixture
def checkpoint(tmp_path):
    """Write a config.json; return its folder."""

    def write(config, name="draft"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return write


@pytest.mark.parametrize(
    ("config", "algorithm"),
    [
        ({"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]}, "EAGLE3"),
        ({"speculators_model_type": "eagle"}, "EAGLE"),
        ({**LLAMA, "architectures": ["LlamaForCausalLMEagle3"]}, "EAGLE3"),
        ({**LLAMA, "draft_vocab_size": 32000}, "EAGLE3"),
        ({**LLAMA, "num_hidden_layers": 1, "truncated_vocab_size": 32000}, "EAGLE3"),
        ({**LLAMA, "eagle_config": {"use_aux_hidden_state": True}}, "EAGLE3"),
        ({**LLAMA, "architectures": ["Qwen2ForCausalLMEagle"]}, "EAGLE"),
        ({**LLAMA, "num_hidden_layers": 1}, "EAGLE"),
        ({"model_type": "eagle", "model": LLAMA}, "EAGLE"),
        (MIMO, "MTP"),
        ({"medusa_num_heads": 2}, "MEDUSA"),
        ({"model_type": "medusa", "num_heads": 4}, "MEDUSA"),
        (LLAMA, "STANDALONE"),
    ],
)
def test_a_draft_tells_its_algorithm(checkpoint, config, algorithm):
    folder = str(checkpoint(config))
    found = ServeSpecConfig.load(TARGET, speculative_draft_model_path=folder).speculative
    assert (found.speculative_algorithm, found.enabled) == (algorithm, True)
    for given in ("NONE", "EAGLE3"):
        config = ServeSpecConfig.load(
            TARGET, speculative_draft_model_path=folder, speculative_algorithm=given
        )
        assert config.speculative.speculative_algorithm == given


@pytest.fixture
def toy():
    """Register a method as another package would."""
    method = DraftMethod(
        "TOY",
        "toy.drafts:Family",
        claims=lambda config: config.get("model_type") == "toy",
        allows_trees=False,
    )
    register_draft(method)
    yield method
    del METHODS["TOY"]


def test_a_registered_method_is_asked_before_those_that_take_its_config_too(toy, checkpoint):
    folder = str(checkpoint({**LLAMA, "model_type": "toy"}))
    found = ServeSpecConfig.load(TARGET, speculative_draft_model_path=folder).speculative
    assert found.speculative_algorithm == "TOY"


def test_a_name_that_two_packages_register_is_refused_with_both(toy):
    register_draft(toy)
    message = r"'TOY': registered by toy \(toy\.drafts:Family\) and by other \(other:Family\)"
    with pytest.raises(PluginError, match=message):
        register_draft(DraftMethod("TOY", "other:Family"))


def test_a_method_that_drafts_chains_alone_refuses_trees(toy):
    keys = {"speculative_algorithm": "TOY", "speculative_draft_model_path": TARGET}
    with pytest.raises(ConfigError, match=r"eagle_topk=2: TOY drafts chains alone"):
        ServeSpecConfig.load(TARGET, **keys, speculative_eagle_topk=2)


@pytest.mark.parametrize("name", ["eagle", "eagle3", "medusa", "standalone"])
def test_the_shipped_drafts_tell_their_algorithms(name):
    config = ServeSpecConfig.load(TARGET, speculative_draft_model_path=f"asset:tiny/{name}")
    assert config.speculative.speculative_algorithm == name.upper()


@pytest.mark.parametrize(
    ("config", "words"),
    [({"speculators_model_type": "dflash"}, "dflash"), ({"architectures": ["T5Model"]}, "T5Model")],
)
def test_a_draft_that_is_not_supported_is_refused_by_its_kind(checkpoint, config, words):
    folder = str(checkpoint(config))
    with pytest.raises(ConfigError, match=rf"speculative_draft_model_path=.*{words}.*another"):
        ServeSpecConfig.load(TARGET, speculative_draft_model_path=folder)


@pytest.mark.parametrize(
    ("own", "algorithm"),
    [
        ({"speculators_model_type": "eagle3", **VERIFIER}, "EAGLE3"),
        ({"medusa_num_heads": 4, "base_model_name_or_path": "ada/target"}, "MEDUSA"),
    ],
)
def test_a_draft_as_the_model_serves_the_target_that_it_names(checkpoint, own, algorithm):
    folder = str(checkpoint(own))
    config = ServeSpecConfig.load(folder)
    assert (config.model.path, config.model.served_model_name) == ("ada/target", "ada/target")
    assert config.speculative.speculative_draft_model_path == folder
    assert config.speculative.speculative_algorithm == algorithm
    plain = ServeSpecConfig.load(folder, speculative_algorithm="NONE")
    assert (plain.model.path, plain.speculative.enabled) == ("ada/target", False)


def test_a_draft_on_the_hub_starts_with_its_target_also_where_it_is_downloaded_later(
    checkpoint, tmp_path, monkeypatch
):
    use_cache(monkeypatch, tmp_path / "hub")
    later = ServeSpecConfig.load("ada/head")
    assert later.model.path == "ada/head"
    speculator = checkpoint({"speculators_model_type": "eagle3", **VERIFIER})
    add_repository(tmp_path / "hub", "ada/head", speculator)
    add_repository(tmp_path / "hub", "ada/target", ASSETS / "tiny/target")
    there = ServeSpecConfig.load("ada/head", revision="main")
    assert there.model.path == "ada/target"
    for config in (later.pinned(), there.pinned()):
        assert config.model.path == f"ada/target@{COMMIT}"
        assert config.speculative.speculative_draft_model_path == f"ada/head@{COMMIT}"
        assert config.speculative.speculative_algorithm == "EAGLE3"


def test_a_model_that_holds_its_own_draft_is_its_draft_unless_another_is_given(
    checkpoint, tmp_path, monkeypatch
):
    folder = str(checkpoint(MIMO))
    own = ("MTP", folder)
    for given, expected in (
        ({}, own),
        ({"speculative_algorithm": "MTP"}, own),
        ({"speculative_num_steps": 1}, own),
        ({"speculative_algorithm": "NONE"}, ("NONE", None)),
        ({"speculative_algorithm": "NGRAM"}, ("NGRAM", None)),
        ({"speculative_draft_model_path": TARGET}, ("STANDALONE", TARGET)),
    ):
        found = ServeSpecConfig.load(folder, **given).speculative
        assert (found.speculative_algorithm, found.speculative_draft_model_path) == expected
    with pytest.raises(ConfigError, match="MTP needs a draft checkpoint"):
        ServeSpecConfig.load(TARGET, speculative_algorithm="MTP")
    use_cache(monkeypatch, tmp_path / "hub")
    later = ServeSpecConfig.load("ada/mimo", revision="main")
    add_repository(tmp_path / "hub", "ada/mimo", folder)
    for config in (later, ServeSpecConfig.load("ada/mimo@main")):
        speculative = config.pinned().speculative
        assert speculative.speculative_draft_model_path == f"ada/mimo@{COMMIT}"
        assert speculative.speculative_algorithm == "MTP"


@pytest.mark.parametrize("given", [{"verifier": None}, {"verifier": ["ada"]}, "ada", None])
def test_a_draft_as_the_model_must_name_a_target(checkpoint, given):
    nameless = {"speculators_model_type": "eagle3", "speculators_config": given}
    with pytest.raises(ConfigError, match=r"model\.path=.*names no target; give the target"):
        ServeSpecConfig.load(str(checkpoint(nameless)))
