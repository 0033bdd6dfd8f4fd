"""Who may say what, who wins, and what a refusal looks like."""

import pickle

import pytest
import yaml
from pydantic import ValidationError

from serve_spec.config import ConfigError, ServeSpecConfig, base
from serve_spec.config.base import dotted_keys
from serve_spec.config.root import leaf_sections, parse_override

LEAVES = [key for key in dotted_keys(ServeSpecConfig) if "." in key]


def problems(source, **overrides):
    with pytest.raises(ConfigError) as caught:
        ServeSpecConfig.load(source, **overrides)
    return str(caught.value)


def write(path, content):
    path.write_text(yaml.safe_dump(content))
    return path


def test_no_key_is_in_two_sections_and_no_default_outside_its_own_bounds(minimal):
    assert len(leaf_sections()) == len(LEAVES)
    config = ServeSpecConfig.load(minimal)
    assert ServeSpecConfig.load(config.model_dump()) == config


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ({"speculative": {"speculative_num_step": 3}}, "speculative.speculative_num_steps"),
        ({"speculative": {"max_num_seqs": 3}}, "scheduler.max_num_seqs"),
        ({"max_num_seqs": 3}, "scheduler.max_num_seqs"),
        ({"schedular": {"max_num_seqs": 3}}, "scheduler"),
        ({"cache": {"memory_fracton": 0.5}}, "cache.memory_fraction"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(minimal, given, nearest):
    assert f"unknown key; did you mean {nearest}?" in problems(minimal | given)
    message = problems(minimal, speculative_num_step=3)
    assert message == "speculative_num_step: unknown key; did you mean speculative_num_steps?"


@pytest.mark.parametrize(
    ("given", "known"),
    [
        ({"cache": {"zebra": 1}}, "cache.zebra: unknown key; the keys here are page_size,"),
        ({"zebra": {}}, "zebra: unknown key; the keys here are model, speculative,"),
        ({"speculative": {"zebra": 1}}, "all keys are in docs/configuration.md"),
    ],
)
def test_a_key_that_resembles_none_is_refused_with_those_that_there_are(minimal, given, known):
    message = problems(minimal | given)
    assert known in message
    assert "did you mean" not in message


def test_all_problems_are_reported_with_field_value_and_way_out(minimal):
    with pytest.raises(ConfigError) as caught:
        ServeSpecConfig.load(minimal, port=0, num_replicas=-1, dtype="float8")
    dtype, port, replicas = caught.value.problems
    assert dtype.startswith("model.dtype=")
    assert port.startswith("router.port=0: input should be greater than or equal to 1")
    assert "TCP port" in port
    assert replicas.startswith("replica.num_replicas=")


@pytest.mark.parametrize(
    ("key", "wrong"),
    [
        *(("speculative_num_steps", wrong) for wrong in ("3", 3.0, True, None)),
        *(("batch_wait_ms", wrong) for wrong in ("3", float("nan"), float("inf"))),
    ],
)
def test_nothing_is_coerced_into_a_number_and_every_number_is_finite(minimal, key, wrong):
    assert f"{key}={wrong!r}" in problems(minimal, **{key: wrong})
    assert ServeSpecConfig.load(minimal, **{key: 3}), "an integer is a real number"


def test_api_keys_are_stripped_and_appear_neither_in_errors_nor_in_the_printed_object(minimal):
    for wrong in ("hunter2", ["ok", {"key": "hunter2"}]):
        assert "hunter2" not in problems(minimal, api_keys=wrong)
    assert "hunter2" not in problems(minimal, api_key="hunter2")
    for empty in ("", " \n"):
        refusal = problems(minimal, api_keys=["hunter2", empty])
        assert "router.api_keys='': a key is empty" in refusal
        assert "hunter2" not in refusal
    config = ServeSpecConfig.load(minimal, api_keys=["hunter2\n", " k2 ", "k2"])
    assert config.router.api_keys == ("hunter2", "k2", "k2")
    assert "hunter2" not in repr(config)


def test_a_configuration_never_changes(minimal):
    config = ServeSpecConfig.load(minimal)
    with pytest.raises(ValidationError, match="frozen"):
        config.cache.page_size = 32
    with pytest.raises(ValidationError, match="frozen"):
        config.cache = config.cache


def test_file_environment_and_keywords_win_in_this_order(checkpoints, monkeypatch):
    cache = {"page_size": 1, "num_pages": 1, "cpu_cache_gb": 1.5}
    file = write(checkpoints / "c.yaml", {"model": {"path": "target"}, "cache": cache})
    monkeypatch.setenv("SERVE_SPEC_CACHE__NUM_PAGES", "2")
    monkeypatch.setenv("SERVE_SPEC_CACHE__CPU_CACHE_GB", "2.5")
    cache = ServeSpecConfig.load(file, cpu_cache_gb=3.5).cache
    assert (cache.page_size, cache.num_pages, cache.cpu_cache_gb) == (1, 2, 3.5)


@pytest.mark.parametrize("dotted", LEAVES)
def test_every_leaf_key_can_be_set_in_the_environment(minimal, monkeypatch, dotted):
    # A list of maps is a value no key takes: the refusal shows that the key was reached.
    monkeypatch.setenv("SERVE_SPEC_" + dotted.replace(".", "__").upper(), "[{reached: yes}]")
    assert problems(minimal).startswith(dotted)


@pytest.mark.parametrize(
    ("keys", "is_ahead"),
    [
        ({"execution": "lanes"}, True),
        ({"execution": "eager"}, False),
        ({"execution": "auto"}, None),
        ({"execution": "lanes", "async_scheduling": False}, False),
        ({"execution": "eager", "async_scheduling": True}, True),
    ],
)
def test_keys_of_old_files_load_and_new_names_win(minimal, keys, is_ahead):
    assert ServeSpecConfig.load(minimal, **keys).model.async_scheduling is is_ahead


def test_an_unknown_variable_is_refused_with_the_nearest_known_one(minimal, monkeypatch):
    monkeypatch.setenv("SERVE_SPEC_CACHE__PAGESIZE", "2")
    assert problems(minimal).endswith("did you mean SERVE_SPEC_CACHE__PAGE_SIZE?")


def test_a_loaded_configuration_no_longer_listens_to_the_environment(minimal, monkeypatch):
    """Nor does any to variables without a section."""
    monkeypatch.setenv("SERVE_SPEC_LOG_LEVEL", "INFO")
    config = ServeSpecConfig.load(minimal, page_size=4)
    monkeypatch.setenv("SERVE_SPEC_CACHE__PAGE_SIZE", "8")
    assert ServeSpecConfig.load(config) == config


def test_overriding_a_configuration_makes_a_new_one_and_derives_anew(drafting, checkpoints):
    plain = ServeSpecConfig.load(drafting, speculative_algorithm="NONE")
    assert not plain.speculative.speculative_adaptive
    again = ServeSpecConfig.load(
        plain, speculative_algorithm="EAGLE3", path=str(checkpoints / "draft")
    )
    assert again.speculative.speculative_adaptive
    assert (plain.model.served_model_name, again.model.served_model_name) == ("target", "draft")


def test_a_configuration_and_a_refusal_survive_pickling_with_explicit_fields(drafting):
    config = ServeSpecConfig.load(drafting, speculative_algorithm="NONE")
    copy = pickle.loads(pickle.dumps(config))
    assert copy == config
    assert copy.explicit_fields() == config.explicit_fields()
    with pytest.raises(ConfigError) as caught:
        ServeSpecConfig.load(drafting, port=0, page_size=0)
    assert pickle.loads(pickle.dumps(caught.value)).problems == caught.value.problems


@pytest.mark.parametrize("empty", ["", "cache:\n", "# nothing\n"])
def test_an_empty_section_means_its_defaults(checkpoints, empty):
    file = checkpoints / "c.yaml"
    file.write_text(empty + f"\nmodel:\n  path: {checkpoints / 'target'}\n")
    assert ServeSpecConfig.load(file).cache.page_size == 16


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (None, "c.yaml"),
        ("", "model.path: field required"),
        ("model: [", "not valid YAML"),
        ("- a\n- b\n", "give a mapping of sections"),
        ("model: 3\n", "model=3: input should be a valid dictionary"),
        ("cache: {page_size: 1, page_size: 2}\n", "'page_size' is given twice"),
    ],
)
def test_a_malformed_file_is_refused_with_what_is_wrong(tmp_path, text, complaint):
    file = tmp_path / "c.yaml"
    if text is not None:
        file.write_text(text)
    assert complaint in problems(file)


def test_exponents_without_a_point_are_numbers(minimal, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(minimal) + "router: {request_timeout_s: 6e2}\n")
    assert ServeSpecConfig.load(file).router.request_timeout_s == 600.0


def test_paths_start_at_the_folder_of_their_file_and_others_at_the_current_directory(
    checkpoints, monkeypatch, tmp_path_factory
):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "target").mkdir()
    file = write(elsewhere / "c.yaml", {"model": {"path": f"../{elsewhere.name}/target"}})
    monkeypatch.chdir(checkpoints)
    assert ServeSpecConfig.load(file).model.folder == elsewhere / "target"
    expected = checkpoints / "target"
    assert ServeSpecConfig.load({"model": {"path": "target"}}).model.folder == expected
    assert ServeSpecConfig.load(file, path="target").model.folder == expected
    monkeypatch.setenv("SERVE_SPEC_MODEL__PATH", "target")
    assert ServeSpecConfig.load(file).model.folder == expected


def test_an_asset_is_found_in_the_package_whoever_names_it(checkpoints, monkeypatch):
    monkeypatch.setattr(base, "ASSETS", checkpoints)
    monkeypatch.chdir("/")
    for config in (
        ServeSpecConfig.load({"model": {"path": "asset:target"}}),
        ServeSpecConfig.load({"model": {}}, path="asset:target"),
    ):
        assert config.model.folder == checkpoints / "target"


def test_a_path_that_does_not_exist_is_refused_with_what_was_tried(checkpoints):
    file = write(checkpoints / "c.yaml", {"model": {"path": "nope"}})
    message = problems(file)
    assert message.startswith("model.path='nope': ")
    assert str(checkpoints / "nope") in message


def test_command_line_overrides_are_read_as_yaml():
    assert parse_override("api_keys=[a, 12]") == ("api_keys", ["a", 12])
    with pytest.raises(ConfigError, match="key=value"):
        parse_override("num_pages")
