"""`build_app` finds and judges the configuration wherever Serve happens to build the app."""

import asyncio
import json
import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import ActorDiedError, TaskCancelledError

from serve_spec.config import ConfigError
from serve_spec.serving.app import FailedReads, build_app, load_config
from serve_spec.serving.autoscaling import NUM_REQUESTS, replicas_for_requests
from tests.serving.asgi import COMPLETIONS, Server


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
    assert load_config({"config": "mine.yaml"}).model.folder == tmp_path / "model"
    monkeypatch.chdir("/")
    monkeypatch.setattr("serve_spec.serving.app._CHECKOUT", tmp_path)
    assert load_config({"config": "mine.yaml"}).model.folder == tmp_path / "model"


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


BODY = json.dumps({"prompt": "hold on", "stream": True, "max_tokens": 9}).encode()


@pytest.mark.parametrize("error", [TaskCancelledError(), ActorDiedError()], ids=repr)
@pytest.mark.parametrize(
    ("message", "status"),
    [
        ({"type": "http.request", "body": BODY[:9], "more_body": True}, 499),
        ({"type": "http.request", "body": BODY}, 200),
    ],
    ids=["in its body", "in its stream"],
)
def test_a_read_that_ray_fails_is_a_client_that_left(
    config, caplog, monkeypatch, message, status, error
):
    monkeypatch.setattr(logging.getLogger("serve_spec"), "propagate", True)
    server = Server(config)
    app = FailedReads(server.app)
    inbox, sent = [message], []

    async def receive():
        if inbox:
            return inbox.pop()
        await asyncio.sleep(0.01)
        raise error

    async def send(message):
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    place = {"method": "POST", "path": COMPLETIONS, "query_string": b""}
    scope = {"type": "http", "headers": headers, **place}
    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == status
    assert not server.loop.streams
    assert caplog.text == ""


def wanted(metrics, target=48, now=2):
    """Replicas that the policy asks for, by what Serve tells it."""
    config = SimpleNamespace(get_target_ongoing_requests=lambda: target)
    context = SimpleNamespace(
        aggregated_metrics=metrics, config=config, target_num_replicas=now, total_num_requests=1.0
    )
    return replicas_for_requests(context)[0]


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=16), st.floats(1, 100))
def test_each_replica_gets_its_target_however_the_requests_lie(reported, target):
    by_replica = {f"r{i}": number for i, number in enumerate(reported)}
    assert wanted({NUM_REQUESTS: by_replica}, target) * target == pytest.approx(sum(reported))


@pytest.mark.parametrize("now", [1, 4])
def test_without_a_report_nothing_changes(now):
    assert wanted({}, now=now) == now
