"""What surrounds the engine in Ray Serve: router, replicas, the fleet's statistics."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from serve_spec.config.base import Refusal, StrictModel


class RouterConfig(StrictModel):
    """The HTTP door and the queue behind it."""

    batch_wait_ms: float = Field(
        0.0,
        ge=0,
        description="How long a request may wait for others to go to a replica with, in ms.",
    )
    max_batch_size: int = Field(64, ge=1, description="Most requests handed over together.")
    max_queued_requests: int = Field(
        1024,
        ge=1,
        description="Choices that may wait in the router for a place at a replica; more are "
        "answered 429.",
    )
    max_client_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Share of the places at replicas that one client (API key, else address) may "
        "hold while others wait, and of max_queued_requests that it may ever fill.",
    )
    max_body_bytes: int = Field(
        8 * 2**20, ge=1024, description="Longest request body in bytes; a longer one is a 413."
    )
    routing_policy: Literal["goodput", "balanced", "prefix"] = Field(
        "goodput",
        description="Which replica a request goes to. goodput: where one more costs least, by "
        "each replica's own cost table (balanced where one has none); balanced: where the fewest "
        "are; prefix: where the longest beginning of its prompt was sent before.",
    )
    prefix_load_factor: float = Field(
        1.25, ge=1, description="Under prefix, most requests of a replica relative to the mean."
    )
    routing_stats_period_s: float = Field(
        1.0, gt=0, description="Seconds between a replica's reports to the routers."
    )
    resume_timeout_s: float = Field(
        60.0, ge=0, description="How long a request whose replica died may wait for another one."
    )
    request_timeout_s: float = Field(
        600.0, gt=0, description="Longest time from arrival to the last token, in seconds."
    )
    header_timeout_s: float = Field(
        30.0,
        gt=0,
        description="Seconds a connection may take to send the headers of a request. The proxy "
        "reads it from the environment, which `serve-spec serve` sets: "
        "SERVE_SPEC_ROUTER__HEADER_TIMEOUT_S.",
    )
    body_timeout_s: float = Field(
        60.0, gt=0, description="Seconds a request may take to send its body; then 408."
    )
    max_unread_bytes: int = Field(
        2**20,
        ge=4096,
        description="Most memory in bytes, about, of the text that waits in the router for one "
        "choice whose client reads too slowly; past it the request ends with code client_too_slow.",
    )
    api_keys: tuple[str, ...] = Field(
        (), repr=False, description="Accepted bearer tokens, a list of strings; empty: no check."
    )
    allow_anonymous: bool = Field(
        True, description="Whether the server may run without api_keys; false: it does not start."
    )
    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(8000, ge=1, le=65535, description="TCP port to listen on.")

    @field_validator("api_keys")
    @classmethod
    def _strip(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        keys = tuple(key.strip() for key in keys)  # files that hold keys end with a newline
        if not all(keys):
            fix = "a key is empty; remove it, or give api_keys=[] to ask for none"
            raise Refusal("api_keys", "", fix)
        return keys


class ReplicaConfig(StrictModel):
    """Engine replicas: how many, what each takes, and when one counts as dead."""

    num_replicas: int = Field(1, ge=1, description="Engine replicas.")
    num_cpus: float = Field(
        1.0, ge=0, description="Logical CPUs that Ray reserves per replica, for all its ranks."
    )
    num_gpus: float = Field(
        0.0, ge=0, description="GPUs that Ray reserves per replica, for all its ranks."
    )
    placement_group_strategy: Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"] = Field(
        "STRICT_PACK",
        description="Where the ranks of one replica go: on one node, or on several.",
    )
    max_ongoing_requests: int = Field(
        256,
        ge=1,
        description="Most requests inside one replica. The router sends at most an eighth more "
        "than scheduler.max_num_seqs, so that the rest waits where it can be shared out.",
    )
    round_timeout_s: float = Field(
        60.0, gt=0, description="Seconds after which a round counts as hung, and its replica ends."
    )
    stall_timeout_s: float = Field(
        10.0,
        gt=0,
        description="Seconds of silence after which a replica's requests go on elsewhere, and its "
        "process is ended unless it answers.",
    )
    torch_num_threads: int | None = Field(
        None, ge=1, le=1024, description="CPU threads of one replica's torch; null: torch decides."
    )
    health_check_period_s: float = Field(10.0, gt=0, description="Seconds between health checks.")
    health_check_timeout_s: float = Field(
        30.0, gt=0, description="Seconds until an unanswered health check counts as failed."
    )
    graceful_shutdown_timeout_s: float = Field(
        120.0, ge=0, description="Seconds that running requests get to finish on shutdown."
    )


class StatsConfig(StrictModel):
    """The named actor that gathers acceptance statistics of all replicas."""

    actor_name: str = Field("SpecStats", min_length=1, description="Name of the actor.")
    push_interval_s: float = Field(2.0, gt=0, description="Seconds between a replica's reports.")
    stale_after_s: float = Field(
        15.0, gt=0, description="Seconds of silence after which a replica's figures are stale."
    )
    history_s: float = Field(600.0, gt=0, description="Seconds of history that are kept.")
