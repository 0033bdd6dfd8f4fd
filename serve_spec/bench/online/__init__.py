"""`serve-spec bench online`: load over HTTP."""
