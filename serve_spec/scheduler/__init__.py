"""Continuous batching: which sequences run in a step, and what its results mean. Host only."""
