"""The manifests are right as far as that can be known without a cluster."""

import copy
import re
import shutil
import subprocess

import kubernetes_validate
import pytest
import ray
import yaml
from pydantic import ValidationError
from ray._common.utils import import_attr
from ray.serve._private import constants as ray_constants

import serve_spec
from serve_spec import cli
from tests.k8s.deployments import DEPLOY_FILES, MODELS, THROUGHPUT, checkpoints, read
from tests.k8s.kuberay import PodMonitor, PodTemplate, PrometheusRule, RayService
from tests.k8s.overlays import (
    KUBERNETES,
    ROOT,
    SERVE_PORT,
    USED_BY,
    Overlay,
    composed,
    pod,
    render,
    rendered,
)

# Where the Dockerfiles put the checkout.
IMAGE_ROOT = "/app/"
# What Ray, kernel compilers and the package's own cache write; all else is read-only.
WRITABLE = {"/tmp", "/home/serve", "/dev/shm"}
CACHE = "/home/serve/.cache"
DOWNLOAD = ROOT / "k8s/overlays/my-model/download"


def mebibytes(quantity):
    number, unit = re.fullmatch(r"(\d+)(Mi|Gi)", quantity).groups()
    return int(number) * {"Mi": 1, "Gi": 1024}[unit]


def cpus(quantity):
    return int(quantity[:-1]) / 1000 if quantity.endswith("m") else float(quantity)


def test_there_is_an_overlay_for_every_way_to_run():
    assert {p.name for p in (ROOT / "k8s/overlays").iterdir()} == USED_BY.keys()
    own = ROOT / "k8s/overlays/my-model/application/serve.yaml"
    assert {ROOT / file for file in USED_BY.values()} == {own, *DEPLOY_FILES}


def test_every_document_and_pod_template_is_valid(overlay):
    check(overlay)


def check(overlay):
    """Validate what Kubernetes, KubeRay and the Prometheus operator would get."""
    for number, group in enumerate(overlay.cluster.groups):
        kubernetes_validate.validate(pod(f"group-{number}", group), KUBERNETES, strict=True)
    assert not overlay.of_kind("Secret")
    for document in overlay.documents:
        match document["kind"]:
            case "RayService":
                RayService.model_validate(document)
            case "PodMonitor":
                PodMonitor.model_validate(document)
            case "PrometheusRule":
                PrometheusRule.model_validate(document)
            case _:
                kubernetes_validate.validate(document, KUBERNETES, strict=True)


@pytest.mark.parametrize(
    ("place", "spoiled"),
    [
        ((), {"unknownField": 1}),
        (("upgradeStrategy",), {"type": "Recreate"}),
        (("upgradeStrategy",), {"type": "NewClusterWithIncrementalUpgrade"}),
        (("rayClusterConfig", "headGroupSpec", "rayStartParams"), {"redis-password": "x"}),
    ],
)
def test_what_the_operator_would_misread_is_refused(overlay, place, spoiled):
    (service,) = copy.deepcopy(overlay.of_kind("RayService"))
    part = service["spec"]
    for key in place:
        part = part.setdefault(key, {})
    part |= spoiled
    with pytest.raises(ValidationError):
        RayService.model_validate(service)


def test_the_application_is_the_one_that_runs_without_kubernetes(overlay):
    there, here = overlay.service.spec.serve_config, overlay.deploy_file
    (app,) = there["applications"]
    if "config" in app["args"]:
        assert app["args"]["config"].startswith(IMAGE_ROOT)
        app["args"]["config"] = app["args"]["config"].removeprefix(IMAGE_ROOT)
    # Every pod has an HTTP proxy, and not for itself alone.
    here["proxy_location"] = "EveryNode"
    here["http_options"]["host"] = "0.0.0.0"
    assert there == here
    assert callable(import_attr(app["import_path"]))


def test_versions_and_image_agree_with_the_package_and_its_ray(overlay, deployment):
    assert overlay.cluster.rayVersion == ray.__version__
    image = "gpu" if deployment.engines.num_gpus else "cpu"
    assert (ROOT / f"deploy/Dockerfile.{image}").is_file()
    for group in overlay.cluster.groups:
        tag = group.template.container["image"]
        assert tag.endswith(f"serve-spec:{serve_spec.__version__}-{image}")


def test_a_worker_holds_one_replica_and_uses_all_its_gpus(overlay, deployment):
    limits = overlay.workers.template.container["resources"]["limits"]
    engines, routers = deployment.engines, deployment.routers
    assert float(limits.get("nvidia.com/gpu", 0)) == engines.num_gpus
    # In the worst case every router runs on the same worker.
    assert cpus(limits["cpu"]) >= engines.num_cpus + routers.num_cpus * routers.max_replicas
    assert "nvidia.com/gpu" not in overlay.cluster.headGroupSpec.template.container["resources"]
    # An idle worker would have no HTTP proxy and never become ready.
    workers = overlay.workers
    assert workers.minReplicas == engines.min_replicas
    assert workers.maxReplicas == engines.max_replicas
    assert overlay.cluster.enableInTreeAutoscaling == (engines.autoscaling is not None)


def test_pods_get_the_memory_they_may_use(overlay, deployment):
    for group in overlay.cluster.groups:
        resources = group.template.container["resources"]
        assert resources["requests"]["memory"] == resources["limits"]["memory"]
        shared = group.template.mounts.get("/dev/shm")
        if shared is not None:  # it counts as the pod's memory
            shared_mb = mebibytes(shared["emptyDir"]["sizeLimit"])
            assert 2 * shared_mb <= mebibytes(resources["limits"]["memory"])
    if deployment.engines.num_gpus == 0:
        cache_mb = 1024 * deployment.config.cache.cpu_cache_gb
        limit = overlay.workers.template.container["resources"]["limits"]["memory"]
        assert cache_mb <= mebibytes(limit) / 2
    else:
        assert "/dev/shm" in overlay.workers.template.mounts, "64 MiB are too few for NCCL"


def test_every_pod_finds_the_checkpoints_and_ray_can_write_where_it_must(overlay):
    # The head's too: Serve may build the application there, which looks for them.
    needed = {MODELS.rstrip("/")} if checkpoints(overlay.app) else set()
    for group in overlay.cluster.groups:
        mounts = group.template.mounts
        assert mounts.keys() - WRITABLE - {CACHE} == needed
        assert all("emptyDir" in mounts[path] for path in ("/tmp", "/home/serve"))
        assert all(mounts[path]["readOnly"] for path in needed)


def test_pods_outlive_the_streams_they_drain(overlay, deployment):
    drain_s = max(p.options["graceful_shutdown_timeout_s"] for p in deployment.parts.values())
    # What a replica with an HTTP proxy of its own adds before and after.
    drain_s += ray_constants.RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S
    drain_s += ray_constants.RAY_SERVE_DIRECT_INGRESS_SHUTDOWN_BUFFER_S
    assert overlay.workers.template.spec["terminationGracePeriodSeconds"] >= drain_s
    old_cluster_s = overlay.service.spec.rayClusterDeletionDelaySeconds
    assert old_cluster_s is not None
    assert old_cluster_s >= deployment.config.router.request_timeout_s


def test_every_pod_has_the_same_settings_of_ray_serve_and_logs_as_serve_does(overlay, deployment):
    wanted = THROUGHPUT if deployment.engines.num_gpus else {}
    encoding = overlay.deploy_file["logging_config"].get("encoding", "TEXT")
    for group in overlay.cluster.groups:
        env = group.template.env
        assert {n: v for n, v in env.items() if n.startswith("RAY_SERVE_")} == wanted
        assert env.get("SERVE_SPEC_LOG_FORMAT", "text") == encoding.lower()


def test_without_a_secret_of_api_keys_nothing_starts_on_gpus(overlay, deployment):
    """It is in every pod: any of them may build the application."""
    variables = [
        variable
        for group in overlay.cluster.groups
        for variable in group.template.container.get("env", [])
        if variable["name"] == "SERVE_SPEC_ROUTER__API_KEYS"
    ]
    if not overlay.of_kind("PodMonitor"):
        assert not variables, "the demo needs no variables"
        assert deployment.config.router.allow_anonymous
        return
    assert len(variables) == len(list(overlay.cluster.groups))
    for variable in variables:
        secret = variable["valueFrom"]["secretKeyRef"]
        assert secret == {"name": "serve-spec-api-keys", "key": "keys"}
    assert not deployment.config.router.allow_anonymous


def test_containers_run_without_privileges_and_the_autoscaler_alone_gets_a_token(overlay):
    cluster = overlay.cluster
    for group in cluster.groups:
        scales = group is cluster.headGroupSpec and cluster.enableInTreeAutoscaling
        assert group.template.spec.get("automountServiceAccountToken", True) == scales
    templates = [group.template.spec for group in cluster.groups]
    templates += [d["spec"]["template"]["spec"] for d in overlay.of_kind("StatefulSet")]
    for spec in templates:
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


def test_a_drain_of_nodes_leaves_a_worker_and_is_never_blocked(overlay):
    for budget in overlay.of_kind("PodDisruptionBudget"):
        spec = budget["spec"]
        # A RayCluster has no scale, so Kubernetes takes no other form for its pods.
        assert set(spec) == {"minAvailable", "selector"}
        assert isinstance(spec["minAvailable"], int)
        assert overlay.selected(spec["selector"]["matchLabels"]) == [overlay.workers]
        assert 1 <= spec["minAvailable"] < overlay.workers.minReplicas


def test_the_state_of_the_head_is_where_it_is_looked_for(overlay):
    options = overlay.cluster.gcsFaultToleranceOptions
    assert (options is None) == (not overlay.of_kind("PodMonitor")), "the small ones do without"
    if options is None:
        return
    host, _, port = options.redisAddress.rpartition(":")
    (service,) = [d for d in overlay.of_kind("Service") if d["metadata"]["name"] == host]
    assert int(port) in [p["port"] for p in service["spec"]["ports"]]
    (redis,) = overlay.of_kind("StatefulSet")
    template = redis["spec"]["template"]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    (container,) = template["spec"]["containers"]
    (password,) = [e["valueFrom"]["secretKeyRef"] for e in container["env"]]
    assert password == options.redisPassword["valueFrom"]["secretKeyRef"].model_dump()


def test_grafana_finds_every_dashboard(overlay):
    if not overlay.of_kind("PodMonitor"):
        return
    (dashboards,) = overlay.of_kind("ConfigMap")
    assert dashboards["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert dashboards["metadata"]["annotations"]["grafana_folder"] == "Ray"
    (provider,) = yaml.safe_load((ROOT / "deploy/dashboards/provider.yaml").read_text())[
        "providers"
    ]
    assert (provider["type"], provider["folder"]) == ("file", "Ray")
    files = {file.name: file.read_text() for file in (ROOT / "deploy/dashboards").glob("*.json")}
    assert dashboards["data"] == files
    # `kubectl apply` keeps what it applied in an annotation, of at most so many bytes.
    assert len(yaml.safe_dump(dashboards).encode()) < 262_144


def policy_of(overlay):
    """The rules of Ray's pods."""
    (policy,) = [d for d in overlay.of_kind("NetworkPolicy") if "ingress" in d["spec"]]
    return policy["spec"]


def admitted(overlay):
    """Ports of Ray's pods that are open to other pods, and whether all pods may reach them."""
    rules = policy_of(overlay)["ingress"]
    return {port["port"]: "from" not in rule for rule in rules for port in rule.get("ports", [])}


def test_monitors_scrape_ports_that_their_pods_have_and_the_network_admits(overlay):
    for document in overlay.of_kind("PodMonitor"):
        monitor = PodMonitor.model_validate(document)
        groups = overlay.selected(monitor.spec.selector["matchLabels"])
        assert groups
        for group in groups:
            for endpoint in monitor.spec.podMetricsEndpoints:
                assert admitted(overlay)[group.template.ports[endpoint.port]] is False


def test_our_series_lose_the_label_of_rays_session_and_others_keep_it(overlay):
    monitors = [PodMonitor.model_validate(each) for each in overlay.of_kind("PodMonitor")]
    ends = [end for monitor in monitors for end in monitor.spec.podMetricsEndpoints]
    for end in (end for end in ends if end.port == "metrics"):
        (rule,) = end.metricRelabelings
        assert (rule.sourceLabels, rule.targetLabel) == (["__name__"], "SessionName")
        assert re.fullmatch(rule.regex, "ray_serve_spec_num_running")
        assert not re.fullmatch(rule.regex, "ray_data_output_bytes")
        # An empty value removes a label; an operator that leaves it out uses the first group.
        assert (rule.replacement, re.compile(rule.regex).groups) == ("", 0)


def test_every_pod_can_be_reached_and_scraped_and_only_serve_is_open_to_all(overlay):
    http = overlay.service.spec.deployment.http_options
    assert (http.host, http.port) == ("0.0.0.0", SERVE_PORT)
    for group in overlay.cluster.groups:
        assert group.template.ports["serve"] == SERVE_PORT
        assert "metrics" in group.template.ports
    assert {port for port, to_all in admitted(overlay).items() if to_all} == {SERVE_PORT}
    dashboard = overlay.cluster.headGroupSpec.template.ports["dashboard"]
    assert dashboard in admitted(overlay), "the operator sends the application there"


def test_policies_hold_for_every_pod_and_let_them_talk_to_each_other(overlay):
    policy = policy_of(overlay)
    labels = policy["podSelector"]["matchLabels"]
    assert len(overlay.selected(labels)) == len(list(overlay.cluster.groups))
    for redis in overlay.of_kind("StatefulSet"):
        assert labels.items() <= redis["spec"]["template"]["metadata"]["labels"].items()
    own_pods = [{"podSelector": {"matchLabels": labels}}]
    assert {"from": own_pods} in policy["ingress"]
    assert {"to": own_pods} in policy["egress"]
    for every in overlay.of_kind("NetworkPolicy"):
        assert overlay.selected(every["spec"]["podSelector"]["matchLabels"])


def test_pods_that_download_reach_the_hub_and_redis_does_not(tmp_path):
    overlay = composed(tmp_path, "gpu", "hub-download")
    (policy,) = [
        p for p in overlay.of_kind("NetworkPolicy") if p["metadata"]["name"].endswith("-hub")
    ]
    assert {"protocol": "TCP", "port": 443} in policy["spec"]["egress"][0]["ports"]
    selector = policy["spec"]["podSelector"]
    assert len(overlay.selected(selector["matchLabels"])) == len(list(overlay.cluster.groups))
    (rule,) = selector["matchExpressions"]
    (redis,) = overlay.of_kind("StatefulSet")
    assert rule["operator"] == "NotIn"
    assert redis["spec"]["template"]["metadata"]["labels"][rule["key"]] in rule["values"]


@pytest.mark.parametrize("name", ["cpu-demo", "gpu", "tp"])
def test_an_overlay_with_hub_download_keeps_what_a_start_can_keep(name, tmp_path):
    overlay = composed(tmp_path, name, "hub-download")
    check(overlay)
    (claim,) = overlay.of_kind("PersistentVolumeClaim")
    template = overlay.workers.template
    mounted = template.mounts[CACHE]["persistentVolumeClaim"]["claimName"]
    assert mounted == claim["metadata"]["name"]
    # A new claim belongs to root.
    assert (
        template.spec["securityContext"]["fsGroup"] == template.spec["securityContext"]["runAsUser"]
    )
    for group in overlay.cluster.groups:
        (source,) = group.template.container["envFrom"]
        assert source["secretRef"] == {"name": "serve-spec-env", "optional": True}
    same_as_kustomize(overlay, tmp_path)


def test_one_line_names_the_model_of_replicas_and_of_the_job_that_fills_their_claim():
    overlay = rendered("my-model")
    (name,) = [app["args"]["model"] for app in overlay.service.spec.serve_config["applications"]]
    files = (ROOT / "k8s/overlays/my-model").rglob("*.yaml")
    lines = [line for file in files for line in file.read_text().splitlines() if name in line]
    assert [line.strip() for line in lines] == [f"model: {name}"]
    # A claim of one node serves one worker.
    (claim,) = overlay.of_kind("PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert overlay.workers.maxReplicas == 1
    assert overlay.service.spec.upgradeStrategy.type == "None"


def job_of(folder):
    """Return the documents of a folder by kind, and the pod of its Job."""
    documents = {document["kind"]: document for document in render(folder)}
    for document in documents.values():
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    same_as_kustomize(Overlay("job", list(documents.values())), folder)
    return documents, PodTemplate.model_validate(documents["Job"]["spec"]["template"])


def test_the_job_downloads_as_the_user_and_into_the_claim_of_the_replicas():
    documents, job = job_of(DOWNLOAD)
    worker = rendered("my-model").workers.template
    assert job.container["image"] == worker.container["image"]
    assert job.container["envFrom"] == worker.container["envFrom"]
    assert job.container["securityContext"] == worker.container["securityContext"]
    assert job.spec["securityContext"] == worker.spec["securityContext"]
    assert job.mounts[CACHE] == worker.mounts[CACHE]
    assert WRITABLE - {"/dev/shm"} < job.mounts.keys()
    policy = documents["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]
    assert policy.items() <= job.labels.items()


def test_the_job_checks_the_serve_file_on_a_node_without_a_gpu(tmp_path, capsys):
    documents, job = job_of(DOWNLOAD)
    program, command, place = job.container["command"]
    folder, _, key = place.rpartition("/")
    assert job.mounts[folder]["configMap"]["name"] == documents["ConfigMap"]["metadata"]["name"]
    text = documents["ConfigMap"]["data"][key]
    file = tmp_path / key
    file.write_text(re.sub(r"model: \S+/\S+", "model: asset:tiny", text))
    assert program == "serve-spec"
    assert cli.main([command, str(file)]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["model"]["device"] == "cuda"


def test_a_job_fills_the_claim_with_the_folders_that_configurations_name(tmp_path):
    folder = ROOT / "k8s/jobs/fill-models"
    _, job = job_of(folder)
    gpu, tp = rendered("gpu"), rendered("tp")
    worker = gpu.workers.template
    assert job.container["image"] == worker.container["image"]
    assert job.container["securityContext"] == worker.container["securityContext"]
    claim = "persistentVolumeClaim"
    assert job.mounts["/models"][claim]["claimName"] == worker.mounts["/models"][claim]["claimName"]
    (tmp_path / "hf").write_text('#!/bin/sh\nfor last; do :; done\necho "$last"\n')
    (tmp_path / "hf").chmod(0o755)
    command = [*job.container["command"], *job.container["args"]]
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(command, env=path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == checkpoints(gpu.app)
    for checkpoint in checkpoints(tp.app):
        assert f"/{checkpoint.removeprefix(MODELS)}" in (folder / "job.yaml").read_text()


def test_the_first_page_applies_folders_that_exist_and_builds_the_image_that_they_run():
    page = (ROOT / "k8s/README.md").read_text()
    commands = "".join(re.findall(r"```sh\n(.*?)```", page, re.DOTALL))
    folders = re.findall(r"kubectl apply -k (k8s/[\w/-]+)", page)
    assert "k8s/overlays/cpu-demo" in folders
    assert all((ROOT / folder / "kustomization.yaml").is_file() for folder in folders)
    images = set(re.findall(r"docker build .*-t (\S+)|load docker-image (\S+)", commands))
    names = {built or loaded for built, loaded in images}
    assert names == {rendered("cpu-demo").workers.template.container["image"]}
    jobs = [
        job_of(ROOT / f)[0]["Job"]["metadata"]["name"]
        for f in folders
        if "overlays/my-model/d" in f
    ]
    assert set(re.findall(r"complete job/(\S+)", commands)) == set(jobs)


def test_an_upgrade_by_steps_starts_with_no_pods_and_needs_no_second_set_of_gpus(tmp_path):
    overlay = composed(tmp_path, "gpu", "incremental-upgrade")
    check(overlay)
    options = overlay.service.spec.upgradeStrategy.clusterUpgradeOptions
    assert options.maxSurgePercent * overlay.workers.maxReplicas == 100, "one replica at a time"
    assert overlay.workers.minReplicas == 0
    same_as_kustomize(overlay, tmp_path)


def by_name(documents):
    return {(d["kind"], d["metadata"]["name"]): d for d in documents}


def test_an_overlay_renders_as_kustomize_renders_it(overlay):
    same_as_kustomize(overlay, ROOT / "k8s/overlays" / overlay.name)


def same_as_kustomize(overlay, folder):
    """Compare with the real binary where there is one."""
    if shutil.which("kubectl") is None:
        return
    command = ["kubectl", "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert by_name(overlay.documents) == by_name(list(yaml.safe_load_all(done.stdout)))


@pytest.fixture(scope="module", params=sorted(USED_BY))
def overlay(request):
    return rendered(request.param)


@pytest.fixture(scope="module")
def deployment(overlay, tmp_path_factory):
    return read(overlay.app, tmp_path_factory.mktemp("models"))
