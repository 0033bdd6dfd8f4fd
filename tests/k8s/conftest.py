"""Every overlay, and the deployment it runs."""

from __future__ import annotations

import pytest

from tests.k8s.deployments import Deployment, read
from tests.k8s.overlays import USED_BY, Overlay, rendered


@pytest.fixture(scope="module", params=sorted(USED_BY))
def overlay(request: pytest.FixtureRequest) -> Overlay:
    return rendered(request.param)


@pytest.fixture(scope="module")
def deployment(overlay: Overlay, tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    return read(overlay.app, tmp_path_factory.mktemp("models"))
