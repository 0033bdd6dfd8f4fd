"""`build_app` finds and checks the configuration wherever Serve happens to build the app."""

import asyncio
import json
import logging
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import ActorDiedError, TaskCancelledError
from ray.serve._private.build_app import build_app as ray_build_app
from ray.serve._private.config import DeploymentConfig
from ray.serve._private.deploy_utils import get_deploy_args

from serve_spec.config import ConfigError
from serve_spec.config.base import ASSETS
from serve_spec.serving.autoscaling import NUM_REQUESTS, replicas_for_requests
from serve_spec.serving.deployment import versions
from serve_spec.serving.deployment.app import (
    FailedReads,
    build_app,
    build_openai_app,
    load_config,
    openai_config,
)
from serve_spec.serving.deployment.plan import read_deployment, read_plan
from tests.helpers.hub import COMMIT, add_repository, use_cache
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
    monkeypatch.setattr("serve_spec.serving.deployment.app._CHECKOUT", tmp_path)
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


def test_a_model_may_be_given_without_a_file(config_file, tmp_path, monkeypatch):
    shipped = load_config({"model": "asset:tiny", "num_pages": "77"})
    assert shipped.model.names == ("tiny",)
    assert shipped.speculative.enabled
    assert shipped.cache.num_pages == 77
    both = load_config({"config": str(config_file), "model": "asset:tiny/target"})
    assert both.model.path == "asset:tiny/target"
    monkeypatch.chdir(tmp_path)
    assert load_config({"model": "model"}).model.folder == tmp_path / "model"


def test_an_application_loads_the_commit_that_the_hub_had_when_it_was_built(tmp_path, monkeypatch):
    use_cache(monkeypatch, tmp_path)
    add_repository(tmp_path, "ada/tiny", ASSETS / "tiny/target")
    app = build_app({"model": "ada/tiny"})
    config = app._bound_deployment.init_args[1]
    assert config.model.path == f"ada/tiny@{COMMIT}"
    assert config.replica.num_gpus == 0


def deployed(app, environment="{}"):
    """What Serve's controller gets for both deployments: version, arguments, number of replicas."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(versions, "_runtime_env", lambda: environment)
        context = SimpleNamespace(get_job_id=lambda: "01")
        patch.setattr("ray.get_runtime_context", lambda: context)
        built = ray_build_app(app(), name="app", make_deployment_handle=lambda *of: "a handle")
        sent = [
            get_deploy_args(
                deployment.name,
                deployment._replica_config,
                deployment_config=deployment._deployment_config,
                version="a hash of all arguments",
            )
            for deployment in built.deployments
        ]
    found = {}
    for deployment, arguments in zip(built.deployments, sent, strict=True):
        config = DeploymentConfig.from_proto_bytes(arguments["deployment_config_proto_bytes"])
        init = deployment.init_args
        found[deployment.name] = (config.version, init, config.num_replicas)
    return found


def test_what_scales_is_neither_in_the_version_nor_in_the_arguments_of_a_deployment(config_file):
    """Serve restarts what has another version."""
    build = partial(partial, build_app)
    one = deployed(build({"config": str(config_file)}))
    assert {name: number for name, (_, _, number) in one.items()} == {
        "EngineReplica": 1,
        "Router": 1,
    }
    three = deployed(build({"config": str(config_file), "num_replicas": 3}))
    assert [number for _, _, number in three.values()] == [3, 1]
    assert [rest for *rest, _ in one.values()] == [rest for *rest, _ in three.values()]
    others = [
        deployed(build({"config": str(config_file), **change}))
        for change in (
            {"max_num_seqs": 7},
            {"api_keys": ["k"]},
            {"engine_loop": "tests.serving.fake_engine:PacedLoop"},
        )
    ]
    others.append(deployed(build({"config": str(config_file)}), environment='{"pip": ["a"]}'))
    for name in one:
        assert len({found[name][0] for found in (one, *others)}) == 5, "these restart it"


def test_bounds_of_autoscaling_and_the_number_of_routers_restart_nothing():
    def build(most, num_routers):
        scaling = {"autoscaling_config": {"min_replicas": 1, "max_replicas": most}}
        model = {**LLM_CONFIG, "deployment_config": scaling}
        options = {"num_replicas": num_routers}
        return build_openai_app({"llm_configs": [model], "ingress_deployment_config": options})

    small, large = (deployed(partial(build, *sizes)) for sizes in ((2, 1), (5, 3)))
    assert [rest for *rest, _ in small.values()] == [rest for *rest, _ in large.values()]
    assert (small["Router"][2], large["Router"][2]) == (1, 3)


@pytest.mark.parametrize(
    ("found", "options", "num_gpus", "num_routers"),
    [
        (0, {}, 0, 1),
        (4, {}, 1, 2),
        (4, {"tensor_parallel_size": 2}, 2, 2),
        (4, {"device": "cpu"}, 0, 1),
        (4, {"num_gpus": 0}, 0, 1),
        (0, {"device": "cuda"}, 1, 2),  # the cluster may still grow
    ],
)
def test_a_replica_gets_the_gpus_that_there_are(
    config_file, monkeypatch, found, options, num_gpus, num_routers
):
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr(versions, "_runtime_env", lambda: "{}")
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 4.0, "GPU": float(found)})
    router = build_app({"config": str(config_file), **options})._bound_deployment
    assert router.num_replicas == num_routers
    (bundle, *others) = router.init_args[
        0
    ]._bound_deployment._replica_config.placement_group_bundles
    assert sum(each.get("GPU", 0) for each in (bundle, *others)) == num_gpus


LLM_CONFIG = {
    "model_loading_config": {"model_id": "mine", "model_source": "asset:tiny/target"},
    "engine_kwargs": {
        "max_model_len": "1k",
        "gpu_memory_utilization": 0.5,
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "trust_remote_code": True,
        "speculative_config": {"method": "eagle3", "model": "asset:tiny/eagle3"},
        "min_dwell_rounds": 3,
    },
    "deployment_config": {
        "autoscaling_config": {"min_replicas": 1, "max_replicas": 3},
        "max_ongoing_requests": 32,
    },
    "accelerator_type": "H100",
    "log_engine_metrics": True,
}


def test_the_arguments_of_ray_s_own_builder_are_understood():
    routers = {"ingress_deployment_config": {"num_replicas": 3}}
    config, engines, router = openai_config({"llm_configs": [LLM_CONFIG], **routers})
    assert (config.model.names, config.model.path) == (("mine",), "asset:tiny/target")
    assert (config.model.max_model_len, config.model.cuda_graphs) == (1000, False)
    assert (config.cache.memory_fraction, config.cache.prefix_caching) == (0.5, False)
    assert config.speculative.speculative_algorithm == "EAGLE3"
    assert config.speculative.min_dwell_rounds == 3
    assert (config.replica.num_replicas, config.replica.max_ongoing_requests) == (3, 32)
    assert engines["num_replicas"] == "auto"
    assert engines["autoscaling_config"]["target_ongoing_requests"] == 48
    assert router == {"num_replicas": 3}
    app = build_openai_app({"llm_configs": [LLM_CONFIG]})
    engines = app._bound_deployment.init_args[0]._bound_deployment
    (bundle,) = engines._replica_config.placement_group_bundles
    assert bundle == {"CPU": 1.0, "GPU": 1.0, "accelerator_type:H100": 0.001}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"engine_kwarg": {}}, r"llm_configs\.0\.engine_kwarg: unknown key; did you mean"),
        ({"lora_config": {}}, r"llm_configs\.0\.lora_config: unknown key"),
        ({"engine_kwargs": {"pipeline_parallel_size": 2}}, "pipeline_parallel_size=2: not supp"),
        ({"engine_kwargs": {"dtype": "float8"}}, r"model\.dtype='float8'"),
        ({"engine_kwargs": {"speculative_config": {"x": 1}}}, "speculative_config x: not"),
        ({"deployment_config": {"ray_actor_options": {}}}, "ray_actor_options: unknown key"),
        ({"model_loading_config": {}}, "model_id=None: give"),
        ({"model_loading_config": {"model_id": "m", "model_source": {}}}, "mirrors"),
        ({"log_engine_metrics": False}, "log_engine_metrics=False"),
    ],
)
def test_an_argument_of_ray_s_builder_without_a_counterpart_is_refused_by_name(changed, named):
    with pytest.raises(ConfigError, match=named):
        build_openai_app({"llm_configs": [LLM_CONFIG | changed]})
    for models in ([], [LLM_CONFIG] * 2, "x"):
        with pytest.raises(ConfigError, match="give a list of one LLMConfig"):
            build_openai_app({"llm_configs": models})


def test_serve_build_accepts_the_application_of_the_environment(tmp_path):
    file = tmp_path / "built.yaml"
    program = Path(sys.executable).with_name("serve")
    command = [program, "build", "serve_spec.serving:application", "-o", file]
    environment = os.environ | {"SERVE_SPEC_REPLICA__NUM_REPLICAS": "2"}
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    (app,) = read_deployment(file)["applications"]
    assert {d["name"]: d["num_replicas"] for d in app["deployments"]} == {
        "Router": 1,
        "EngineReplica": 2,
    }
    assert read_plan(file).configs[0].model.names == ("tiny",)


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
    """Replicas that the policy asks for, by what Serve reports."""
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
