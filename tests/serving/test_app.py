"""`build_app` finds and judges the configuration wherever Serve happens to build the app."""

import subprocess
import sys

import pytest
import yaml

from serve_spec.config import ConfigError
from serve_spec.serving.app import build_app, load_config


@pytest.fixture
def config_file(tmp_path):
    (tmp_path / "model").mkdir()
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump({"model": {"path": "model"}}))
    return file


def test_leaf_keys_win_over_a_file_or_what_is_in_place_and_may_be_texts_as_of_serve_run(
    config_file,
):
    args = {"config": str(config_file), "num_replicas": "3", "request_timeout_s": 5.0}
    config = load_config(args)
    assert (config.replica.num_replicas, config.router.request_timeout_s) == (3, 5.0)
    in_place = load_config({"config": {"model": {"path": str(config.model.path)}}})
    assert in_place.model.served_model_name == "model"


def test_a_relative_file_is_found_here_first_and_then_in_the_checkout(
    config_file, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert load_config({"config": "mine.yaml"}).model.path == tmp_path / "model"
    monkeypatch.chdir("/")
    monkeypatch.setattr("serve_spec.serving.app._CHECKOUT", tmp_path)
    assert load_config({"config": "mine.yaml"}).model.path == tmp_path / "model"


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ({}, "config=configs/tiny.yaml"),
        ({"config": "nowhere.yaml"}, "looked for"),
        ({"config": "/nowhere.yaml"}, "/nowhere.yaml"),
        ({"config": "mine.yaml", "num_replica": 2}, "num_replicas"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(config_file, monkeypatch, args, named):
    monkeypatch.chdir(config_file.parent)
    with pytest.raises(ConfigError, match=named):
        build_app(args)


def test_where_nobody_may_be_anonymous_the_app_needs_keys(config_file, monkeypatch):
    args = {"config": str(config_file), "allow_anonymous": False}
    with pytest.raises(ConfigError, match=r"router\.allow_anonymous=false: router\.api_keys"):
        build_app(args)
    monkeypatch.setenv("SERVE_SPEC_ROUTER__API_KEYS", '["k1"]\n')
    assert load_config(args).router.api_keys == ("k1",)


def test_neither_the_app_nor_the_proxy_needs_torch_to_start(config_file):
    program = (
        "import sys, serve_spec.serving.proxy; from serve_spec.serving import build_app; "
        f"build_app({{'config': {str(config_file)!r}}}); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
