"""Serve's extension point: what it asks is answered from what it told before."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray import cloudpickle

from serve_spec.config import ServeSpecConfig
from serve_spec.serving.app import routing_of
from serve_spec.serving.messages import Attachment, Cancellation, ReplicaRows, Submission
from serve_spec.serving.routing import SubmissionRouter
from serve_spec.serving.routing_policy import blocks
from tests.serving.fakes import request

PROMPT = "x" * 640


def replica(name: str, **stats: Any) -> Any:
    return SimpleNamespace(replica_id=SimpleNamespace(unique_id=name), routing_stats=stats)


class Serve:
    """The part of Serve that a request router is called by."""

    def __init__(self, *replicas: Any, policy: str = "balanced", max_rows: int = 100) -> None:
        # Serve's own constructor needs a running controller.
        self.router = SubmissionRouter.__new__(SubmissionRouter)
        places = {"num_places": 100, "max_rows": max_rows}
        self.router.initialize_state(policy=policy, load_factor=1.25, **places)
        self.replicas = {r.replica_id.unique_id: r for r in replicas}
        self.num_calls = 0

    def choose(self, message: Any) -> tuple[list[str], Any]:
        self.num_calls += 1
        pending = SimpleNamespace(
            args=[message],
            metadata=SimpleNamespace(internal_request_id=f"call{self.num_calls}"),
            routing_context=SimpleNamespace(should_backoff=False),
        )
        ranks = asyncio.run(self.router.choose_replicas(list(self.replicas.values()), pending))
        assert pending.routing_context.should_backoff, "or Serve asks again without a pause"
        return [r.replica_id.unique_id for rank in ranks for r in rank], pending

    def send(self, message: Any) -> tuple[str, Any]:
        """Chooses, and the first choice takes it."""
        names, pending = self.choose(message)
        self.router.on_request_routed(pending, self.replicas[names[0]].replica_id, None)
        return names[0], pending


def submission(num: int = 1, prompt: str = PROMPT, sender: str = "me") -> Submission:
    return Submission(sender, [request(prompt) for _ in range(num)])


def test_what_is_on_its_way_counts_before_the_replica_has_reported_or_even_taken_it() -> None:
    serve = Serve(replica("a"), replica("b"))
    first, _ = serve.choose(submission())
    second, _ = serve.choose(submission())
    assert first[0] != second[0]


def test_requests_that_ended_inside_a_submission_count_no_more() -> None:
    serve = Serve(replica("a"), replica("b"))
    big, small = submission(8), submission(4)
    there, _ = serve.send(big)
    other, _ = serve.send(small)
    assert other != there
    big.num_open = 1
    assert serve.send(submission())[0] == there


def test_a_submission_that_ended_is_forgotten() -> None:
    serve = Serve(replica("a"), replica("b"))
    ended, running = submission(8), submission(4)
    there, _ = serve.send(ended)
    serve.send(running)
    ended.num_open = 0
    assert serve.send(submission())[0] == there
    assert len(serve.router._sent) == 2


def test_a_submission_that_another_replica_took_counts_there() -> None:
    serve = Serve(replica("a"), replica("b"))
    names, pending = serve.choose(submission(4))
    serve.router.on_request_routed(pending, serve.replicas[names[1]].replica_id, None)
    assert serve.choose(submission())[0][0] == names[0]


def test_what_other_routers_sent_counts_as_reported() -> None:
    serve = Serve(replica("a", rows={"you": 5}), replica("b", rows={"me": 5}))
    assert serve.choose(submission())[0] == ["b", "a"]


def test_what_came_with_a_replica_s_answers_counts_where_it_is_newer_than_its_report() -> None:
    serve = Serve(replica("a", rows={"you": 5}), replica("b", rows={"you": 4}))
    message = submission()
    message.heard = {"b": ReplicaRows("b", 1.0, {"you": 6})}
    assert serve.choose(message)[0] == ["a", "b"]


def test_goodput_uses_each_replica_s_own_costs() -> None:
    dear, cheap = {"0": 9.0, "1": 9.5}, {"0": 3.0, "1": 4.0}
    serve = Serve(
        replica("dear", marginal_ms_by_rows=dear),
        replica("cheap", marginal_ms_by_rows=cheap),
        policy="goodput",
    )
    assert [serve.send(submission())[0] for _ in range(2)] == ["cheap", "cheap"]


def test_prefix_stays_where_the_prompt_was_sent_and_forgets_the_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ray.serve.request_router.RequestRouter.on_replica_actor_died", print)
    serve = Serve(replica("a"), replica("b"), policy="prefix")
    sent = submission()
    there, _ = serve.send(sent)
    sent.num_open = 0
    assert serve.choose(submission())[0][0] == there
    serve.router.on_replica_actor_died(serve.replicas[there].replica_id)
    assert serve.router._prefixes.matched(there, blocks(PROMPT)) == 0


@pytest.mark.parametrize(
    "to", [lambda name: Cancellation(name, ("id",)), lambda name: Attachment(name, "me")]
)
def test_what_names_a_replica_goes_there_and_nowhere_else(to: Callable[[str], Any]) -> None:
    serve = Serve(replica("a"), replica("b"), max_rows=1)
    serve.send(submission())
    serve.send(submission())
    for name in serve.replicas:
        assert serve.choose(to(name))[0] == [name]
    assert set(serve.choose(to("gone"))[0]) == {"a", "b"}, "harmless anywhere"


def test_replicas_to_be_avoided_are_the_last_resort() -> None:
    serve = Serve(replica("a"), replica("b", rows={"you": 9}))
    asked = replace(request(PROMPT), avoid=frozenset({"a"}))
    assert serve.choose(Submission("me", [asked]))[0] == ["b", "a"]


def test_serve_can_pickle_it_as_the_application_configures_it(config: ServeSpecConfig) -> None:
    built = routing_of(config)
    found = cloudpickle.loads(built.get_serialized_request_router_cls())
    router = found.__new__(found)
    router.initialize_state(**built.request_router_kwargs)
    assert built.request_routing_stats_period_s == config.router.routing_stats_period_s
