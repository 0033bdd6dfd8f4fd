"""The costs of steps: measured by synthetic plans, cached, read."""
