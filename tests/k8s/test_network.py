"""Who reaches whom: ports, policies, monitors."""

from tests.k8s.kuberay import PodMonitor
from tests.k8s.overlays import SERVE_PORT


def test_every_pod_can_be_reached_and_scraped(overlay):
    http = overlay.service.spec.deployment.http_options
    assert (http.host, http.port) == ("0.0.0.0", SERVE_PORT)
    for group in overlay.cluster.groups:
        assert group.template.ports["serve"] == SERVE_PORT
        assert "metrics" in group.template.ports


def admitted(overlay):
    """Ports of Ray's pods that somebody outside may reach; whether that is everybody."""
    (policy,) = [d for d in overlay.of_kind("NetworkPolicy") if "ingress" in d["spec"]]
    return {
        port["port"]: "from" not in rule
        for rule in policy["spec"]["ingress"]
        for port in rule.get("ports", [])
    }


def test_monitors_scrape_ports_that_their_pods_have_and_the_network_admits(overlay):
    for document in overlay.of_kind("PodMonitor"):
        monitor = PodMonitor.model_validate(document)
        groups = overlay.selected(monitor.spec.selector.matchLabels)
        assert groups
        for group in groups:
            for endpoint in monitor.spec.podMetricsEndpoints:
                assert admitted(overlay)[group.template.ports[endpoint.port]] is False


def test_only_the_door_is_open_to_everybody(overlay):
    assert {port for port, to_all in admitted(overlay).items() if to_all} == {SERVE_PORT}
    dashboard = overlay.cluster.headGroupSpec.template.ports["dashboard"]
    assert dashboard in admitted(overlay), "the operator sends the application there"


def test_policies_hold_for_every_pod_and_let_them_talk_to_each_other(overlay):
    (policy,) = [d for d in overlay.of_kind("NetworkPolicy") if "ingress" in d["spec"]]
    labels = policy["spec"]["podSelector"]["matchLabels"]
    assert len(overlay.selected(labels)) == len(list(overlay.cluster.groups))
    for redis in overlay.of_kind("StatefulSet"):
        assert labels.items() <= redis["spec"]["template"]["metadata"]["labels"].items()
    everybody_here = [{"podSelector": {"matchLabels": labels}}]
    assert {"from": everybody_here} in policy["spec"]["ingress"]
    assert {"to": everybody_here} in policy["spec"]["egress"]
    others = [d for d in overlay.of_kind("NetworkPolicy") if d is not policy]
    for other in others:
        assert overlay.selected(other["spec"]["podSelector"]["matchLabels"])
