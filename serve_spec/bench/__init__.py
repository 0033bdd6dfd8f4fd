"""Measurements: each prints a table for people and, last, one JSON line for machines."""
