"""Serve files and Dockerfiles agree with configurations, manifests and the code that they start."""

import json
import os
import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
import ray.serve._private.constants as ray_constants
import yaml
from ray._common.utils import import_attr
from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE

from serve_spec.serving.autoscaling import replicas_for_requests
from serve_spec.serving.deployment.plan import read_deployment
from serve_spec.serving.proxy.settings import (
    CALLBACK,
    CALLBACK_VARIABLE,
    haproxy_files,
    throughput_settings,
)
from tests.k8s.deployments import DEPLOY_FILES, OF_USER, ROOT, THROUGHPUT, checkpoints, read
from tests.k8s.overlays import USED_BY, rendered


@pytest.fixture(scope="module", params=DEPLOY_FILES, ids=lambda p: p.stem)
def deployment(request, tmp_path_factory):
    (app,) = read_deployment(request.param)["applications"]
    assert callable(import_attr(app["import_path"]))
    return read(app, tmp_path_factory.mktemp("models"))


def test_every_model_configuration_is_deployed_by_a_file():
    named = {
        yaml.safe_load(f.read_text())["applications"][0]["args"]["config"] for f in DEPLOY_FILES
    }
    assert named == {str(f.relative_to(ROOT)) for f in (ROOT / "configs").rglob("*.yaml")}


def test_deployments_drain_for_the_longest_request_and_leave_queueing_to_the_router(deployment):
    for part in deployment.parts.values():
        drain_s = part.options["graceful_shutdown_timeout_s"]
        assert drain_s >= deployment.config.router.request_timeout_s
        assert part.options["max_queued_requests"] == -1
        assert part.options["max_ongoing_requests"] >= 1_000_000


def test_a_replica_reserves_the_gpus_of_its_ranks_on_one_host(deployment):
    model, engines = deployment.config.model, deployment.engines
    wanted = model.tensor_parallel_size if model.device == "cuda" else 0
    assert (engines.num_gpus, deployment.routers.num_gpus) == (wanted, 0)
    if len(engines.bundles) > 1:  # a single reservation is never split
        assert engines.options["placement_group_strategy"] == "STRICT_PACK"


def test_a_replica_is_added_by_the_number_of_requests_before_any_waits_for_a_slot(deployment):
    engines, scheduler = deployment.engines, deployment.config.scheduler
    assert scheduler.max_num_seqs <= deployment.config.replica.max_ongoing_requests
    if engines.autoscaling is not None:
        assert engines.autoscaling.target_ongoing_requests < scheduler.max_num_seqs
        # Loading a model takes minutes: none of them is left to start with a request.
        assert engines.min_replicas >= 1
        assert engines.max_replicas > engines.min_replicas
        policy = engines.autoscaling.policy.policy_function
        assert import_attr(policy) is replicas_for_requests


def test_the_demo_needs_nothing_that_does_not_ship():
    (app,) = yaml.safe_load((ROOT / "deploy/tiny.yaml").read_text())["applications"]
    assert checkpoints(app) == []


def test_the_high_throughput_settings_are_ones_that_ray_reads():
    text = Path(ray_constants.__file__).read_text()
    for name, value in THROUGHPUT.items():
        assert f'"{name}"' in text
        assert re.fullmatch(r"[\w. \n{}\"':;,/-]+", value), "a shell and a pod must read the same"


def test_a_shell_finds_the_program_and_the_private_folder_of_haproxy(tmp_path):
    """The folder belongs to the user alone, who may have a colleague on the machine."""
    command = "set -a; . deploy/throughput.env; env -0"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {"PATH": path, "HOME": str(tmp_path)}
    shown = subprocess.run(
        ["bash", "-c", command], env=environment, cwd=ROOT, stdout=-1, check=True
    )
    variables = dict(line.split("=", 1) for line in shown.stdout.decode().rstrip("\0").split("\0"))
    program = {"RAY_SERVE_HAPROXY_BINARY_PATH": str(ROOT / "serve_spec/serving/haproxy.sh")}
    python = {"SERVE_SPEC_PYTHON": str(Path(sys.executable).with_name("python3"))}
    files = haproxy_files(tmp_path / ".haproxy")
    assert {name: variables[name] for name in OF_USER} == program | python | files
    assert os.access(*program.values(), os.X_OK)
    text = Path(ray_constants.__file__).read_text()
    for name in OF_USER - python.keys():
        assert f'"{name}"' in text


def test_serve_spec_serve_sets_what_the_files_do(deployment):
    router = deployment.config.router
    own = throughput_settings(router)
    longest = "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"
    assert {**own, longest: THROUGHPUT[longest]} == THROUGHPUT
    assert min(int(own[longest]), int(THROUGHPUT[longest])) >= router.request_timeout_s
    client_s = int(own["RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S"])
    assert client_s > router.body_timeout_s, "the router answers first"


def test_further_haproxy_settings_follow_the_balance_algorithm():
    section = HAPROXY_CONFIG_TEMPLATE.partition("defaults\n")[2].partition("frontend ")[0]
    assert section.splitlines()[-1].strip() == "balance {{ config.balance_algorithm }}"
    lines = THROUGHPUT["RAY_SERVE_HAPROXY_BALANCE_ALGORITHM"].splitlines()
    *settings, broken_off, router_died, no_router = (line.strip() for line in lines)
    assert settings == [
        "leastconn",
        "timeout http-request 30s",
        "option forwardfor",
        "no option splice-request",
        "option srvtcpka",
        "srvtcpka-idle 5s",
        "srvtcpka-intvl 5s",
        "srvtcpka-cnt 3",
    ]
    for line, status, code in (
        (broken_off, 400, None),
        (router_died, 502, "server_lost"),
        (no_router, 503, "no_healthy_router"),
    ):
        head, _, body = line.partition(" string ")
        assert head.startswith(f"http-error status {status} content-type application/json")
        assert json.loads(body.strip("'"))["error"]["code"] == code


DOCKERFILES = sorted((ROOT / "deploy").glob("Dockerfile*"))


@pytest.fixture(params=DOCKERFILES, ids=lambda p: p.name)
def dockerfile(request):
    """The instructions, one to a line."""
    text = re.sub(r"^#.*\n", "", request.param.read_text(), flags=re.MULTILINE)
    return text.replace("\\\n", "")


def last_stage(dockerfile):
    return re.split(r"^FROM ", dockerfile, flags=re.MULTILINE)[-1]


def test_an_image_copies_files_that_are_sent_and_stages_that_exist(dockerfile):
    sent = [line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line[0] == "!"]
    for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", dockerfile, re.MULTILINE):
        for source in sources.split():
            assert (ROOT / source).exists(), f"COPY {source}"
            assert any(fnmatch(source, pattern) for pattern in sent), f"{source} is ignored"
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", dockerfile, re.MULTILINE))
    used = set(re.findall(r"^COPY --from=(\S+)", dockerfile, re.MULTILINE))
    assert used == stages


def test_the_haproxy_of_an_image_runs_as_that_of_serve_spec_serve(dockerfile):
    (program,) = re.findall(r"^ENV .*RAY_SERVE_HAPROXY_BINARY_PATH=(\S+)", dockerfile, re.MULTILINE)
    ((command, link),) = re.findall(
        r'^RUN ln -s "(.+)" +(\S+)$', last_stage(dockerfile), re.MULTILINE
    )
    assert link == program
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    line = ["sh", "-c", f'echo "{command}"']
    shown = subprocess.run(line, env={"PATH": path}, cwd=ROOT, stdout=-1, text=True, check=True)
    assert os.access(shown.stdout.strip(), os.X_OK)


def test_an_image_starts_a_deployment_that_exists(dockerfile):
    (command,) = re.findall(r"^CMD (\[.+\])$", dockerfile, re.MULTILINE)
    program, subcommand, file, *_ = yaml.safe_load(command)
    assert (program, subcommand) == ("serve-spec", "serve")
    assert (ROOT / file).is_file()
    assert "WORKDIR /app\n" in last_stage(dockerfile)


def test_an_image_installs_the_versions_that_were_tested(dockerfile):
    assert "$(grep '^torch==' constraints.txt)" in dockerfile
    (package,) = re.findall(
        r"^RUN pip install .* (\.|\"\.\[[\w,]+\]\")( .*)?$", dockerfile, re.MULTILINE
    )
    assert "-c constraints.txt" in dockerfile
    # What it names beside the package is pinned, too.
    assert all("==" in extra for extra in package[1].split())


def test_an_image_limits_slow_connections_and_runs_as_the_user_of_the_pods(dockerfile):
    assert f"{CALLBACK_VARIABLE}={CALLBACK} " in last_stage(dockerfile)
    assert callable(import_attr(CALLBACK))
    assert "HOME=/home/serve " in last_stage(dockerfile), "pods mount it"
    (user,) = re.findall(r"^USER (\d+)$", last_stage(dockerfile), re.MULTILINE)
    assert f"--uid {user}" in dockerfile
    for overlay in map(rendered, USED_BY):
        for group in overlay.cluster.groups:
            assert group.template.spec["securityContext"]["runAsUser"] == int(user)
