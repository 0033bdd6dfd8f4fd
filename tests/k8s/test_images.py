"""The Dockerfiles build what the manifests start; as far as that shows without building them."""

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml
from ray._common.utils import import_attr

from serve_spec.serving import proxy
from tests.k8s.overlays import USED_BY, rendered

ROOT = Path(__file__).parents[2]
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


def test_an_image_starts_a_deployment_that_exists(dockerfile):
    (command,) = re.findall(r"^CMD (\[.+\])$", dockerfile, re.MULTILINE)
    program, subcommand, file, *_ = yaml.safe_load(command)
    assert (program, subcommand) == ("serve-spec", "serve")
    assert (ROOT / file).is_file()
    assert "WORKDIR /app\n" in last_stage(dockerfile)


def test_an_image_installs_the_versions_that_were_tested(dockerfile):
    assert "$(grep '^torch==' constraints.txt)" in dockerfile
    (package,) = re.findall(
        r"^RUN pip install .* (\.|\"\.\[gpu\]\")( .*)?$", dockerfile, re.MULTILINE
    )
    assert "-c constraints.txt" in dockerfile
    # What it names beside the package is pinned, too.
    assert all("==" in extra for extra in package[1].split())


def test_an_image_limits_slow_connections_and_runs_as_the_user_of_the_pods(dockerfile):
    assert f"{proxy.CALLBACK_VARIABLE}={proxy.CALLBACK} " in last_stage(dockerfile)
    assert callable(import_attr(proxy.CALLBACK))
    assert "HOME=/home/serve " in last_stage(dockerfile), "pods mount it"
    (user,) = re.findall(r"^USER (\d+)$", last_stage(dockerfile), re.MULTILINE)
    assert f"--uid {user}" in dockerfile
    for overlay in map(rendered, USED_BY):
        for group in overlay.cluster.groups:
            assert group.template.spec["securityContext"]["runAsUser"] == int(user)
