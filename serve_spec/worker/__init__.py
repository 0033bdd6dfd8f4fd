"""Executes plans on one rank: target, draft model and verification."""
