"""Configuration of Ray Serve: router, replicas and fleet statistics."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from serve_spec.config.base import Refusal, StrictModel


class RouterConfig(StrictModel):
    """The HTTP frontend and its queue."""

    batch_wait_ms: float = Field(0.0, ge=0)
    """Time a request may wait for others to be sent to a replica with it, in ms."""
    max_batch_size: int = Field(64, ge=1)
    """Maximum number of requests sent to a replica together."""
    max_queued_requests: int = Field(1024, ge=1)
    """Maximum number of choices waiting in the router; further ones get status 429."""
    max_client_share: float = Field(0.5, gt=0, le=1)
    """Fraction of the request slots of all replicas that one client (API key, else address) may
    hold while others wait, and of max_queued_requests that it may fill at any time."""
    max_body_bytes: int = Field(8 * 2**20, ge=1024)
    """Maximum size of a request body in bytes; larger ones get status 413."""
    routing_policy: Literal["goodput", "balanced", "prefix"] = "goodput"
    """Choice of the replica. goodput: lowest added cost by its cost table (balanced for a replica
    without one); balanced: fewest requests; prefix: longest prompt prefix already sent to it."""
    prefix_load_factor: float = Field(1.25, ge=1)
    """Maximum load of a replica relative to the mean under routing_policy prefix."""
    routing_stats_period_s: float = Field(1.0, gt=0)
    """Seconds between the load reports of a replica to the routers."""
    resume_timeout_s: float = Field(60.0, ge=0)
    """Maximum time a request waits for another replica after its own died, in seconds."""
    request_timeout_s: float = Field(600.0, gt=0)
    """Maximum time from arrival to the last token, in seconds."""
    header_timeout_s: float = Field(30.0, gt=0)
    """Maximum time to receive the headers of a request, in seconds. The proxy reads it from
    SERVE_SPEC_ROUTER__HEADER_TIMEOUT_S, which `serve-spec serve` sets."""
    body_timeout_s: float = Field(60.0, gt=0)
    """Maximum time to receive the body of a request, in seconds; then status 408."""
    max_unread_bytes: int = Field(2**20, ge=4096)
    """Approximate limit of text buffered in the router for one choice of a slow client, in bytes;
    above it the choice ends with code client_too_slow."""
    tool_call_parser: Literal[
        "auto", "none", "hermes", "qwen", "qwen25", "qwen3_coder", "glm45", "llama3_json", "llama3",
        "mistral", "openai", "gpt-oss",
    ] = "auto"  # fmt: skip
    """Format of tool calls, named as in vLLM and SGLang; auto: by the chat template."""
    reasoning_parser: Literal[
        "auto", "none", "qwen3", "glm45", "deepseek_r1", "deepseek-r1", "mistral", "openai_gptoss",
        "gpt-oss",
    ] = "auto"  # fmt: skip
    """Format of reasoning, named as in vLLM and SGLang; auto: by the chat template;
    deepseek_r1: answers always begin with reasoning."""
    per_request_spec_decode_metrics: Literal["none", "summary", "detailed"] = "none"
    """Add vLLM's `metrics.speculative_decoding` to completions and chats; of streams, to the chunk
    with the usage. detailed: with the drafts of every round."""
    strict_fields: bool = False
    """Refuse unknown request fields with status 400; by default they are ignored and counted."""
    api_keys: tuple[str, ...] = Field((), repr=False)
    """Accepted bearer tokens, a list of strings; empty: no authentication."""
    share_prefix_cache: bool = False
    """Share cached prefixes between API keys. It saves the computation of common prompts, but
    `cached_tokens` and the time to the first token then tell a client with a key whether a prompt
    that it guesses was sent with another key. Without it every key has its own cached prefixes."""
    allow_anonymous: bool = True
    """Allow the server to start without api_keys."""
    host: str = Field("127.0.0.1", min_length=1)
    """Address to listen on."""
    port: int = Field(8000, ge=1, le=65535)
    """TCP port to listen on."""

    @field_validator("api_keys")
    @classmethod
    def _strip(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        keys = tuple(key.strip() for key in keys)  # files of keys end with a newline
        if not all(keys):
            fix = "a key is empty; remove it, or set api_keys=[] for no authentication"
            raise Refusal("api_keys", "", fix)
        return keys


class ReplicaConfig(StrictModel):
    """Number, resources and timeouts of engine replicas."""

    num_replicas: int = Field(1, ge=1)
    """Number of engine replicas; another one restarts none of those that stay."""
    num_cpus: float = Field(1.0, ge=0)
    """Logical CPUs that Ray reserves per replica, for all its ranks."""
    num_gpus: float | None = Field(None, ge=0)
    """GPUs that Ray reserves per replica, for all its ranks; null: tensor_parallel_size if the Ray
    cluster has GPUs and model.device allows it, else 0."""
    accelerator_type: str | None = Field(None, min_length=1)
    """Ray's name of the GPU that replicas need, such as H100; null: any."""
    placement_group_strategy: Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"] = (
        "STRICT_PACK"
    )
    """Placement of the ranks of a replica, on one node or several."""
    max_ongoing_requests: int = Field(256, ge=1)
    """Maximum number of requests inside one replica; the router sends at most 1.125 times
    scheduler.max_num_seqs."""
    round_timeout_s: float = Field(60.0, gt=0)
    """Seconds after which a step counts as hung and its replica ends."""
    stall_timeout_s: float = Field(10.0, gt=0)
    """Seconds without a message after which the requests of a replica continue elsewhere and its
    process is ended, unless it answers a health check."""
    torch_num_threads: int | None = Field(None, ge=1, le=1024)
    """CPU threads of torch per replica; null: torch's default."""
    health_check_period_s: float = Field(10.0, gt=0)
    """Seconds between health checks."""
    health_check_timeout_s: float = Field(30.0, gt=0)
    """Seconds after which an unanswered health check counts as failed."""
    graceful_shutdown_timeout_s: float = Field(120.0, ge=0)
    """Seconds that running requests have to finish on shutdown."""


class StatsConfig(StrictModel):
    """The actor that collects statistics of all replicas."""

    actor_name: str = Field("SpecStats", min_length=1)
    """Name of the actor."""
    push_interval_s: float = Field(2.0, gt=0)
    """Seconds between the reports of a replica."""
    stale_after_s: float = Field(15.0, gt=0)
    """Seconds without a report after which the figures of a replica are stale."""
    history_s: float = Field(600.0, gt=0)
    """Seconds of history kept."""
