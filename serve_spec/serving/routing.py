"""Choose the replica for requests: `routing_policy` with what this router knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from serve_spec.serving.links import Link
from serve_spec.serving.messages import GenerateRequest
from serve_spec.serving.routing_policy import Policy, ReplicaLoad, SentPrefixes, blocks, ranked


class ReplicaChooser:
    """Chooses for one router.

    num_open: how many requests of this router a replica has, as of now.
    num_places: requests that a replica runs at once. max_rows: with more it is full.
    """

    def __init__(
        self,
        policy: Policy,
        router: str,
        num_open: Callable[[str], int],
        *,
        num_places: int,
        max_rows: int,
        load_factor: float,
    ) -> None:
        self._policy = policy
        self._router = router
        self._num_open = num_open
        self._num_places = num_places
        self._max_rows = max_rows
        self._load_factor = load_factor
        self._prefixes = SentPrefixes()

    def choose(self, requests: Sequence[GenerateRequest], links: Mapping[str, Link]) -> str:
        """Return the replica that requests, at least one, are to be sent to together."""
        by_prefix = self._policy == "prefix"
        prompts = [blocks(request.prompt) for request in requests if by_prefix]
        loads = [
            replace(
                ReplicaLoad.of(name, link.load, link.rows, self._router),
                own_rows=self._num_open(name),
                num_places=self._num_places,
                max_rows=self._max_rows,
                matched_blocks=sum(self._prefixes.matched(name, prompt) for prompt in prompts),
            )
            for name, link in links.items()
        ]
        name, *_ = ranked(
            self._policy,
            loads,
            len(requests),
            load_factor=self._load_factor,
            avoid=requests[0].avoid,
        )
        for prompt in prompts:
            self._prefixes.note(name, prompt)
        return name

    def forget(self, replica: str) -> None:
        """Note that a replica is gone, and its cache with it."""
        self._prefixes.forget(replica)
