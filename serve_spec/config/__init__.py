"""The configuration: immutable models, validated before anything starts, without torch."""

from serve_spec.config.base import ConfigError, StrictModel
from serve_spec.config.engine import CacheConfig, ModelConfig, SchedulerConfig
from serve_spec.config.root import ServeSpecConfig
from serve_spec.config.serving import ReplicaConfig, RouterConfig, StatsConfig
from serve_spec.config.speculative import SpeculativeConfig

__all__ = [
    "CacheConfig",
    "ConfigError",
    "ModelConfig",
    "ReplicaConfig",
    "RouterConfig",
    "SchedulerConfig",
    "ServeSpecConfig",
    "SpeculativeConfig",
    "StatsConfig",
    "StrictModel",
]
