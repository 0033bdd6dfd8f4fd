"""The configuration: immutable models, validated before anything starts, without torch."""

from serve_spec.config.base import ConfigError as ConfigError
from serve_spec.config.base import StrictModel as StrictModel
from serve_spec.config.engine import CacheConfig as CacheConfig
from serve_spec.config.engine import ModelConfig as ModelConfig
from serve_spec.config.engine import SchedulerConfig as SchedulerConfig
from serve_spec.config.root import ServeSpecConfig as ServeSpecConfig
from serve_spec.config.serving import ReplicaConfig as ReplicaConfig
from serve_spec.config.serving import RouterConfig as RouterConfig
from serve_spec.config.serving import StatsConfig as StatsConfig
from serve_spec.config.speculative import SpeculativeConfig as SpeculativeConfig
