"""Ray Serve's extension point for routing, on `routing_policy`.

Serve pickles the class by value, module and all: keep this file small.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from serve_spec.serving.messages import Attachment, Cancellation, Submission
from serve_spec.serving.routing_policy import Policy, ReplicaLoad, SentPrefixes, blocks, ranked


class SubmissionRouter(RequestRouter):
    """Sends a `Submission` where the policy wants it, other messages to the replica they name.

    Without Serve's FIFO mixin: a replica chosen for one request must not get another one.
    """

    def initialize_state(  # type: ignore[override]
        self, *, policy: Policy, num_places: int, max_rows: int, load_factor: float
    ) -> None:
        """Serve's constructor hook; the arguments are `request_router_kwargs`."""
        self._policy = policy
        self._num_places = num_places
        self._max_rows = max_rows
        self._load_factor = load_factor
        self._prefixes = SentPrefixes()
        # By Serve's id of the call: where it went, and what. Its sender counts a submission down
        # as its requests end, so this router's own rows are exact.
        self._sent: dict[str, tuple[str, Submission]] = {}

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """All replicas, one per rank: Serve takes the next where one is full."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        message = pending_request.args[0] if pending_request.args else None
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if isinstance(message, Attachment | Cancellation) and message.replica in by_name:
            return [[by_name[message.replica]]]
        if not isinstance(message, Submission):
            return [candidate_replicas]
        names = self._ranked(by_name, message)
        # Until Serve knows: submissions that are routed meanwhile must see this one.
        self._sent[pending_request.metadata.internal_request_id] = names[0], message
        return [[by_name[name]] for name in names]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """The replica took it."""
        message = pending_request.args[0] if pending_request.args else None
        if isinstance(message, Submission):
            name = message.replica = replica_id.unique_id
            self._sent[pending_request.metadata.internal_request_id] = name, message
            if self._policy == "prefix":
                for request in message.requests:
                    self._prefixes.note(name, blocks(request.prompt))

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """The replica is gone."""
        super().on_replica_actor_died(replica_id)
        self._prefixes.forget(replica_id.unique_id)

    def _ranked(self, replicas: dict[str, RunningReplica], submission: Submission) -> list[str]:
        self._sent = {
            call: (name, sent) for call, (name, sent) in self._sent.items() if sent.num_open
        }
        own_rows: Counter[str] = Counter()
        for name, sent in self._sent.values():
            own_rows[name] += 0 if sent is submission else sent.num_open
        by_prefix = self._policy == "prefix"
        prompts = [blocks(request.prompt) for request in submission.requests if by_prefix]
        loads = [
            replace(
                ReplicaLoad.of(
                    name,
                    replica.routing_stats or {},
                    submission.sender,
                    submission.heard.get(name),
                ),
                own_rows=own_rows[name],
                num_places=self._num_places,
                max_rows=self._max_rows,
                matched_blocks=sum(self._prefixes.matched(name, prompt) for prompt in prompts),
            )
            for name, replica in replicas.items()
        ]
        return ranked(
            self._policy,
            loads,
            len(submission.requests),
            load_factor=self._load_factor,
            avoid=submission.requests[0].avoid.union(submission.silent),
        )
