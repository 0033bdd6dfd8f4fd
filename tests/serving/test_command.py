"""`serve-spec serve` reports what is wrong before it starts anything."""

import json
import os
import re
import shlex
import shutil
import socket
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import yaml

from serve_spec import cli
from serve_spec.config import ConfigError, RouterConfig
from serve_spec.config.base import ASSETS
from serve_spec.serving.deployment import command
from serve_spec.serving.deployment.app import load_config
from serve_spec.serving.deployment.engine_actor import why_unplaced
from serve_spec.serving.deployment.plan import check_deployment, read_deployment, read_plan
from serve_spec.serving.proxy import callback
from serve_spec.serving.proxy.settings import CALLBACK, CALLBACK_VARIABLE, own_settings
from tests.serving.cluster import free_port


@pytest.fixture
def config_file(tmp_path):
    (tmp_path / "model").symlink_to(ASSETS / "tiny/target")
    file = tmp_path / "mine.yaml"
    model = {"path": "model", "served_model_name": "Ada's"}
    file.write_text(yaml.safe_dump({"model": model, "router": {"port": 8123}}))
    return file


@pytest.fixture
def deploy_file(config_file):
    file = config_file.with_name("deploy.yaml")
    app = {
        "name": "a",
        "import_path": "serve_spec.serving:build_app",
        "args": {"config": str(config_file), "num_replicas": 3, "num_cpus": 40},
    }
    file.write_text(yaml.safe_dump({"applications": [app], "http_options": {"port": 8124}}))
    return file


def test_the_address_comes_from_the_option_then_the_deployment_then_the_configuration(
    config_file, deploy_file
):
    assert read_plan(config_file).url == "http://127.0.0.1:8123"
    assert read_plan(deploy_file).url == "http://127.0.0.1:8124"
    plan = read_plan(deploy_file, {"host": "0.0.0.0", "port": 8125})
    assert plan.deployment["http_options"] == {"host": "0.0.0.0", "port": 8125}
    assert plan.url == "http://127.0.0.1:8125", "0.0.0.0 is no address to call"
    assert plan.num_cpus >= 120, "for every replica"
    text = deploy_file.read_text().replace("name: a", "name: a\n  route_prefix: /llm")
    deploy_file.write_text(text)
    assert read_plan(deploy_file).url == "http://127.0.0.1:8124/llm"
    (app,) = read_deployment(config_file)["applications"]
    assert app["args"] == {"config": str(config_file)}


def test_a_serve_file_is_judged_and_resolved_without_starting_anything(deploy_file, capsys):
    assert cli.main(["check-config", str(deploy_file)]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["replica"]["num_replicas"] == 3
    assert shown["model"]["served_model_name"] == "Ada's"
    assert cli.main(["check-config", str(deploy_file), "num_replicas=2"]) != 0
    assert "args" in capsys.readouterr().err
    deploy_file.write_text(deploy_file.read_text().replace("http_options", "http_option"))
    assert cli.main(["check-config", str(deploy_file)]) != 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "http_option: unknown key; did you mean http_options?" in printed.err


@pytest.mark.parametrize(
    ("host", "keys", "is_open"),
    [("0.0.0.0", "[]", True), ("0.0.0.0", "[k]", False), ("127.0.0.1", "[]", False)],
)
def test_a_server_that_anyone_can_use_is_known(config_file, host, keys, is_open):
    config_file.write_text(config_file.read_text() + f"  api_keys: {keys}\n")
    assert read_plan(config_file, {"host": host}).is_open_to_all == is_open


def test_the_proxy_is_told_the_limit_of_the_configuration(config_file, monkeypatch):
    config_file.write_text(config_file.read_text() + "  header_timeout_s: 7.5\n")
    monkeypatch.setattr("os.environ", {"RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "9"})
    command.prepare_environment(read_plan(config_file))
    assert os.environ[CALLBACK_VARIABLE] == CALLBACK
    assert callback.header_timeout_s() == 7.5
    assert "timeout http-request 8s" in os.environ["RAY_SERVE_HAPROXY_BALANCE_ALGORITHM"]
    assert os.environ["RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S"] == "9", (
        "the operator's own value wins"
    )


def test_a_second_server_on_a_machine_has_ports_of_its_own():
    first = own_settings(RouterConfig())
    name = "RAY_SERVE_HAPROXY_STATS_PORT"
    with socket.create_server(("", int(first[name]))):
        second = own_settings(RouterConfig())
    assert second[name] != first[name]
    for socket_name in ("SOCKET_PATH", "METRICS_SOCKET_PATH"):
        path, of_node = first[f"RAY_SERVE_HAPROXY_{socket_name}"], "/" + 56 * "0"
        assert len(path + of_node) <= 97, "HAProxy takes no longer ones"
    (low, high, *fallbacks), others = map(router_ports, (first, second))
    assert high - low > 100, "routers that end keep their ports for minutes"
    assert not any(low <= port <= high or port in fallbacks for port in others)
    assert not any(low <= port <= high for port in fallbacks)


def router_ports(settings):
    """Return the bounds of routers' ports, and the ports of Serve's own proxy."""
    bounds = [
        int(settings[f"RAY_SERVE_DIRECT_INGRESS_{bound}_HTTP_PORT"]) for bound in ("MIN", "MAX")
    ]
    protocols = ("HTTP", "GRPC")
    return *bounds, *(int(settings[f"RAY_SERVE_FALLBACK_PROXY_{name}_PORT"]) for name in protocols)


@pytest.mark.parametrize(
    ("template", "path", "asked"),
    [(None, "completions", "prompt"), ("{{ messages }}", "chat/completions", "messages")],
)
def test_the_announced_curl_line_is_a_valid_request(config_file, template, path, asked):
    overrides = {}
    if template is not None:
        overrides["chat_template"] = str(config_file.with_name("chat.jinja"))
        config_file.with_name("chat.jinja").write_text(template)
    line = next(
        text
        for text in command.announcement(read_plan(config_file, overrides)).splitlines()
        if text.startswith("curl")
    )
    words = shlex.split(line)
    assert f"http://127.0.0.1:8123/v1/{path}" in words
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == "Ada's"
    assert asked in body


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("model: {path: nowhere}", "nowhere"),
        ("model: {path: model, dtyp: auto}", "dtyp"),
        ("applications: [{name: a, import_path: 'x:y', arg: {}}]", "args"),
        (
            "applications: [{name: a, import_path: 'serve_spec.serving:build_app'}]",
            "config=configs/tiny.yaml",
        ),
    ],
)
def test_bad_input_is_refused_by_name_before_ray_starts(config_file, capsys, text, named):
    config_file.write_text(text)
    assert command.main([str(config_file)]) == 2
    assert named in capsys.readouterr().err
    assert command.main(["no/such.yaml"]) == 2
    assert "no/such.yaml" in capsys.readouterr().err


EAGLE = ["asset:tiny", "--speculative-algorithm", "EAGLE"]


@pytest.mark.parametrize(("where", "calls"), [("own", ["init", "shutdown"]), ("others", [])])
def test_a_checkpoint_that_cannot_be_used_ends_the_command_with_one_line(
    where, calls, config_file, tmp_path, capsys, monkeypatch
):
    """And the Ray that the command started meanwhile; a cluster of others is not even reached."""
    called = []
    for name in ("init", "shutdown"):
        monkeypatch.setattr(ray, name, lambda *args, name=name, **options: called.append(name))
    broken = tmp_path / "broken"
    shutil.copytree(ASSETS / "tiny/target", broken)
    (broken / "model-00003-of-00005.safetensors").unlink()
    for arguments, named in (
        ([str(broken)], "model-00003-of-00005.safetensors"),
        ([str(config_file), "--max-model-len", "100k"], "max-model-len=100000 is more"),
        ([str(config_file), "--tp", "3"], "tensor_parallel_size"),
        ([*EAGLE, "--speculative-draft-model-path", "asset:tiny/eagle3"], "set it to 'EAGLE3'"),
    ):
        place = ["--address", "10.0.0.1:6379"] if where == "others" else []
        called.clear()
        assert command.main([*arguments, *place, "--port", str(free_port())]) == 1
        assert called == calls
        error = capsys.readouterr().err
        assert named in error
        assert len(error.splitlines()) == 1


def test_a_model_and_flags_become_an_application_that_any_node_can_build(tmp_path, monkeypatch):
    (tmp_path / "draft").symlink_to(ASSETS / "tiny/eagle3")
    (tmp_path / "target").symlink_to(ASSETS / "tiny/target")
    monkeypatch.chdir(tmp_path)
    overrides = {
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": "draft",
        "port": 8200,
    }
    plan = read_plan("target", overrides)
    (app,) = plan.deployment["applications"]
    assert app["args"] == overrides | {
        "model": str(tmp_path / "target"),
        "speculative_draft_model_path": str(tmp_path / "draft"),
    }
    monkeypatch.chdir("/")
    assert load_config(app["args"]) == plan.configs[0]
    assert plan.url == "http://127.0.0.1:8200"


def test_flags_win_over_the_arguments_of_a_serve_file(deploy_file):
    plan = read_plan(deploy_file, {"num_replicas": 1, "port": 8200})
    assert (plan.configs[0].replica.num_replicas, plan.port) == (1, 8200)
    content = yaml.safe_load(deploy_file.read_text())
    content["applications"][0]["import_path"] = "serve_spec.serving:application"
    deploy_file.write_text(yaml.safe_dump(content))
    assert read_plan(deploy_file, {"port": 8200}).port == 8200
    with pytest.raises(ConfigError, match=r"num_replicas=1: .* set it in the Serve file"):
        read_plan(deploy_file, {"num_replicas": 1})


def test_a_port_that_is_taken_is_refused_before_ray_starts(config_file, capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert command.main([str(config_file), "--port", str(port)]) == 2
    error = capsys.readouterr().err
    assert f"port={port}: Address already in use by process {os.getpid()} (" in error
    assert "--port" in error


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_without_a_ray_is_refused_before_anything_starts(config_file, capsys, scheme):
    address = f"{scheme}127.0.0.1:{free_port()}"
    assert command.main([str(config_file), "--address", address]) == 2
    error = capsys.readouterr().err
    assert f"address={address!r}: nothing answers there" in error
    assert "ray start --head" in error


@pytest.mark.parametrize(
    ("address", "bound"), [("127.0.0.1:1", "_JOIN_S"), ("ray://127.0.0.1:1", "_JOIN_AS_CLIENT_S")]
)
def test_a_listener_that_is_no_ray_ends_the_wait_of_the_command(monkeypatch, address, bound):
    ended, told = threading.Event(), []
    monkeypatch.setattr(command, bound, 0.0)
    monkeypatch.setattr(command, "exit_now", lambda *words: (told.append(words), ended.set()))
    with command._joining(address):
        assert ended.wait(60)
    ((status, why),) = told
    assert status == 1
    assert why.startswith(f"address={address!r}: ")


@pytest.mark.parametrize(
    ("keys", "available", "named"),
    [
        ({"device": "cuda"}, 0, "device='cuda': .* use device='cpu' or 'auto'"),
        ({"device": "cuda", "tensor_parallel_size": 2}, 1, "2 GPU.* lower tensor_parallel_size"),
        ({"num_gpus": 0.5}, 0, "num_gpus=0.5: .* lower it"),
        ({"device": "cuda", "num_replicas": 3}, 2, "num_replicas=3: .* need 3 GPU.* lower it"),
        ({"num_gpus": 0.5, "num_replicas": 2}, 1, None),
        ({"device": "cuda"}, 1, None),
        ({"device": "auto"}, 0, None),
        ({"device": "cuda", "num_gpus": 0}, 0, None),
    ],
)
def test_replicas_that_gpus_cannot_hold_are_refused_by_name(config_file, keys, available, named):
    plan = read_plan(config_file, keys)
    refused = nullcontext() if named is None else pytest.raises(ConfigError, match=named)
    with refused:
        command.check_gpus(plan, available)


TWO_SMALL = [{"CPU": 4, "GPU": 1}, {"CPU": 4, "GPU": 1}]


@pytest.mark.parametrize(
    ("keys", "nodes", "told"),
    [
        ({"num_gpus": 2}, TWO_SMALL, "a replica needs a node with CPU 1, GPU 2"),
        ({"num_gpus": 2, "tensor_parallel_size": 2}, TWO_SMALL, "set placement_group_strategy="),
        (
            {"num_gpus": 2, "tensor_parallel_size": 2, "placement_group_strategy": "PACK"},
            TWO_SMALL,
            None,
        ),
        (
            {"num_gpus": 2, "tensor_parallel_size": 2, "placement_group_strategy": "SPREAD"},
            [{"CPU": 4}],
            "one of 2 ranks needs a node with CPU 0.5, GPU 1",
        ),
        ({"num_gpus": 1, "accelerator_type": "H100"}, TWO_SMALL, "accelerator_type:H100 0.001"),
        ({"num_gpus": 1}, TWO_SMALL, None),
        ({"num_gpus": 0, "num_cpus": 8}, TWO_SMALL, "num_cpus=8, num_gpus=0: .* CPU 8"),
        ({"num_gpus": 0}, [], "there is none; add one"),
    ],
)
def test_a_replica_that_no_node_can_hold_waits_for_a_reason(config_file, keys, nodes, told):
    (config,) = read_plan(config_file, keys).configs
    why = why_unplaced(config, nodes)
    assert (why is None) if told is None else re.search(told, why)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({}, "speculation: off: no draft; try --speculative-algorithm NGRAM"),
        ({"speculative_algorithm": "NGRAM"}, "speculation: NGRAM, adaptive depth"),
        (
            {"speculative_algorithm": "NGRAM", "speculative_adaptive": False},
            "speculation: NGRAM, fixed depth",
        ),
    ],
)
def test_the_announcement_says_whether_the_model_speculates(config_file, keys, told):
    assert told in command.announcement(read_plan(config_file, keys)).splitlines()


def test_the_announcement_says_where_ray_s_dashboard_is_and_how_to_get_its_token(
    config_file, monkeypatch
):
    plan = read_plan(config_file)
    assert "Ray dashboard" not in command.announcement(plan)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    line = "Ray dashboard: http://127.0.0.1:8265"
    assert line in command.announcement(plan, "127.0.0.1:8265").splitlines()
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    assert f"{line}; its token: ray get-auth-token" in command.announcement(plan, "127.0.0.1:8265")


def test_what_serve_says_while_replicas_wait_is_told_once(capsys):
    def app(*messages):
        deployments = {str(i): SimpleNamespace(message=text) for i, text in enumerate(messages)}
        return SimpleNamespace(deployments=deployments)

    told = set()
    for apps in ([app("", "1 replica waits\nfor a GPU")], [app("1 replica waits\nfor 2")], []):
        command._print_news(apps, told)
    assert capsys.readouterr().out == "1 replica waits\n"


ROOT = Path(__file__).parents[2]


@pytest.fixture
def tiny():
    return yaml.safe_load((ROOT / "deploy/tiny.yaml").read_text())


def engines(**options):
    """Give the engine replicas these options."""
    listed = {"name": "EngineReplica", **options}
    return lambda d: d["applications"][0].update(deployments=[listed])


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda d: d.update(http_option={}), "http_options"),
        (lambda d: d["http_options"].update(prt=1), "http_options.port"),
        (lambda d: d["http_options"].update(port="many"), "port"),
        (lambda d: d["applications"][0].update(import_pth="x"), "import_path"),
        (engines(max_queued_request=2), "max_queued_requests"),
        (engines(ray_actor_options={"num_cpu": 2}), "ray_actor_options.num_cpus"),
        (engines(num_replicas="some"), "num_replicas"),
        (engines(autoscaling_config={"upscale_delay": 2}), "upscale_delay_s"),
    ],
)
def test_a_misspelt_key_or_a_wrong_value_is_refused_at_every_level(tiny, spoil, named):
    spoil(tiny)
    with pytest.raises(ConfigError, match=named):
        check_deployment(tiny)
    with pytest.raises(ConfigError) as caught:
        check_deployment(tiny | {"a": 1, "b": 2})
    assert len(caught.value.problems) >= 2, "all that are misspelt"


def test_policy_settings_are_judged_before_anything_starts(tiny):
    engines = {"name": "EngineReplica", "user_config": {"min_dwell_rounds": 4}}
    tiny["applications"][0]["deployments"] = [{"name": "Router", "num_replicas": 2}, engines]
    check_deployment(tiny)
    engines["user_config"] = {"min_dwell_round": 4}
    with pytest.raises(ConfigError, match=r"deployments\.1\.user_config: .*mean min_dwell_rounds"):
        check_deployment(tiny)
    tiny["applications"][0]["import_path"] = "other.app:build"
    check_deployment(tiny)


@pytest.mark.parametrize("text", ["[1, 2]", "just words", "a: [", ""])
def test_a_file_that_is_no_mapping_is_refused(tmp_path, text):
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.yaml"):
        read_deployment(file)


@pytest.mark.parametrize("name", ["serve", "check-config"])
def test_a_policy_that_does_not_import_is_refused_before_anything_is_deployed(
    name, monkeypatch, capsys
):
    monkeypatch.setattr(ray, "init", lambda *args, **options: None)
    monkeypatch.setattr(command, "_run", lambda *args: pytest.fail("Serve would start"))
    strategy = "no_such_package.policy:Mine"
    given = ["configs/tiny.yaml", "--set", f"speculative_adaptive_strategy={strategy}"]
    if name == "serve":
        assert command.main([*given, "--port", str(free_port())]) == 1
    else:
        assert cli.main([name, *given]) == 1
    *_, told = capsys.readouterr().err.splitlines()
    assert told.startswith(f"speculative_adaptive_strategy='{strategy}': no_such_package.policy")
    assert told.endswith("; correct the name, or install its package where engines run")
