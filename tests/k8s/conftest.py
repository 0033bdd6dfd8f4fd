"""Every overlay, and the deployment it runs."""

import pytest

from tests.k8s.deployments import read
from tests.k8s.overlays import USED_BY, rendered


@pytest.fixture(scope="module", params=sorted(USED_BY))
def overlay(request):
    return rendered(request.param)


@pytest.fixture(scope="module")
def deployment(overlay, tmp_path_factory):
    return read(overlay.app, tmp_path_factory.mktemp("models"))
