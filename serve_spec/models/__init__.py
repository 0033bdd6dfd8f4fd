"""Targets and draft heads, loaded from published checkpoints."""
