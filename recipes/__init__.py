"""Recipes of shipped models; not part of the wheel."""
